"""Answers of vLLM, for `mvp export --verify vllm`: a script for the python that has vLLM. It imports nothing of ours.

    python verify_vllm.py JOBS.json ANSWERS.jsonl

Each job is a model and its questions; a line of the output has the answers of one job, or its error.
"""

import gc
import json
import os
import sys
import traceback
from typing import Any

DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def answers(job: dict[str, Any]) -> list[dict[str, Any]]:
    import vllm
    from vllm.lora.request import LoRARequest

    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024}
    options |= {"enable_prefix_caching": False, "kv_cache_memory_bytes": 2**28}
    options |= {"logprobs_mode": "processed_logprobs", "max_num_seqs": 16, **job.get("options", {})}
    lora = None
    if job.get("adapter"):
        options |= {"enable_lora": True, "max_lora_rank": job["max_lora_rank"]}
        lora = LoRARequest("adapter", 1, job["adapter"])
    if job["scores"]:
        options |= {"runner": "pooling"}
        del options["logprobs_mode"]
    llm = vllm.LLM(model=job["folder"], **options)
    questions = job["questions"]
    if job["scores"]:
        prompts = [{"prompt_token_ids": one["ids"]} for one in questions]
        params = vllm.PoolingParams(use_activation=False)
        found = llm.classify(prompts, pooling_params=params, use_tqdm=False)
        return [{"score": one.outputs.probs[0]} for one in found]
    sampling = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=job["max_tokens"],
        stop_token_ids=job["stop"],
        ignore_eos=True,
        logprobs=1,
        logit_bias=dict.fromkeys(job["banned"], -100.0) or None,
    )
    written = []
    for one in questions:
        if "ids" in one:
            prompt: Any = {"prompt_token_ids": one["ids"]}
            (found,) = llm.generate([prompt], sampling, use_tqdm=False, lora_request=lora)
        else:
            (found,) = llm.chat(
                [one["messages"]],
                sampling,
                use_tqdm=False,
                tools=one.get("tools") or None,
                lora_request=lora,
            )
        (output,) = found.outputs
        tokens = list(output.token_ids)
        log_probs = [
            place[token].logprob for place, token in zip(output.logprobs, tokens, strict=True)
        ]
        written.append(
            {"prompt": list(found.prompt_token_ids), "tokens": tokens, "log_probs": log_probs}
        )
    return written


def main(jobs_file: str, answers_file: str) -> None:
    os.environ.update({key: os.environ.get(key, value) for key, value in DEFAULTS.items()})
    with open(jobs_file) as file:
        jobs = json.load(file)
    for job in jobs:
        try:
            result: dict[str, Any] = {"answers": answers(job)}
        except Exception as error:  # noqa: BLE001 - the next model is tried
            traceback.print_exc()
            error.__traceback__ = None  # it would keep the model
            result = {"error": f"{type(error).__name__}: {error}"}
        with open(answers_file, "a") as out:
            out.write(json.dumps(result) + "\n")
        release()


def release() -> None:
    """Free the model, so that the next one can be loaded."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(*sys.argv[1:])
