"""recipes/calculator_rl, and the same training by TRL's GRPOTrainer, on one CPU thread each.

    uv venv .venvs/trl && uv pip install --python .venvs/trl/bin/python trl==1.16.0 jmespath
    PYTHONPATH=. python benchmarks/rl/trl_calculator.py --trl .venvs/trl/bin/python --out FILE

Both start from the export of the recipe's SFT and take the same rows, tool, reward, sizes of a step, clipping, entropy
bonus, optimizer and schedule. TRL calls the tool between rounds of `model.generate`, in its own process, and pads rows.
The share of right sums is that of greedy answers on the 200 held-out sums, by the recipe's own evaluation of both
exports. CPU seconds are those of a whole command with all of its processes: start, training, export, no evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[2] / "recipes/calculator_rl/configs"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# How the recipe's policy writes calls: TRL's template for Qwen3 without the reasoning.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def measured(*command: str) -> dict[str, float]:
    """Run a command; its CPU seconds with those of all its processes, and its wall time."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=ENVIRONMENT, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": round(cpu, 1), "wall_s": round(time.perf_counter() - started, 1)}


def train(config: str, folder: Path, seed: int, *words: str) -> dict[str, float]:
    command = [sys.executable, "-m", "mvp_engine.cli", "train", str(CONFIGS / f"{config}.yaml")]
    return measured(*command, f"output_dir={folder}", f"seed={seed}", "log.backends=[jsonl]", *words)


def held_out(model: Path, folder: Path, seed: int) -> float:
    """The share of held-out sums that a model gets right, by greedy answers with the tool."""
    run = f"evaluation_{model.name}"
    train("rl", folder, seed, "workflow=evaluate", f"model.path={model}", f"run_id={run}", "export_link=null")
    records = [json.loads(line) for line in (folder / run / "evaluate.jsonl").read_text().splitlines()]
    share: float = records[-1]["reward_exact"]
    return share


def compare(folder: Path, seed: int, trl: str) -> dict[str, Any]:
    from mvp_engine.config.compose import compose  # here: TRL's environment does not have it

    train("sft", folder, seed)
    base = folder / "calculator_base"
    ours = train("rl", folder, seed, "eval.steps=null", f"export_link={folder / 'ours'}", "run_id=ours")
    config = compose(CONFIGS / "rl.yaml").config.model_dump(include={"rl", "generation", "train", "optim"}, mode="json")
    (folder / "config.json").write_text(json.dumps(config))
    theirs = measured(trl, __file__, "--side", str(folder), "--seed", str(seed))
    return {
        "seed": seed,
        "start": held_out(base, folder, seed),
        "ours": {"right": held_out(folder / "ours", folder, seed), **ours},
        "TRL": {"right": held_out(folder / "theirs", folder, seed), **theirs},
    }


def train_by_trl(folder: Path, seed: int) -> None:
    """The side of TRL, in its own environment: reads rows, base and config of `folder`, and writes `theirs`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    sys.path.append(str(CONFIGS.parent))
    from tools import add

    config = json.loads((folder / "config.json").read_text())
    rl, optim = config["rl"], config["optim"]
    lines = (folder / "calculator_data/train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    samples = rl["prompts_per_step"] * rl["num_generations"]
    turns = config["generation"]["max_turns"]
    options = GRPOConfig(
        output_dir=str(folder / "trl"),
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=samples // rl["updates"],
        steps_per_generation=rl["updates"],
        num_generations=rl["num_generations"],
        max_steps=config["train"]["max_steps"] * rl["updates"],
        # Of all turns together, with what the tool returns.
        max_completion_length=turns * (config["generation"]["max_new_tokens"] + 12),
        max_tool_calling_iterations=turns - 1,
        temperature=1.0,
        epsilon=rl["clip"][0],
        epsilon_high=rl["clip"][1],
        beta=0.0,
        loss_type="grpo",
        entropy_coef=rl["entropy"],
        learning_rate=optim["lr"],
        lr_scheduler_type=optim["schedule"],
        warmup_steps=optim["warmup"] * rl["updates"],
        weight_decay=optim["weight_decay"],
        adam_beta1=optim["betas"][0],
        adam_beta2=optim["betas"][1],
        adam_epsilon=optim["eps"],
        max_grad_norm=optim["max_grad_norm"],
        save_strategy="no",
        report_to=[],
        logging_steps=20,
    )
    base = str(folder / "calculator_base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.response_template = RESPONSE_TEMPLATE
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        reward,
        args=options,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        tools=[add],
    )
    trainer.train()
    trainer.save_model(str(folder / "theirs"))


def reward(completions: list[list[dict[str, Any]]], numbers: list[list[int]], **_: Any) -> list[float]:
    """1 for the right sum, and a quarter for each call that leads to it, as in the recipe's episode."""
    rewards = []
    for messages, (a, b, c) in zip(completions, numbers, strict=True):
        useful = [{"a": a, "b": b}, {"a": a + b, "b": c}]
        value = 0.0
        for message in messages:
            if calls := message.get("tool_calls"):
                value += 0.25 * (useful[:1] == [calls[0]["function"].get("arguments")])
                useful = useful[1:]
        last = messages[-1] if messages else {}
        is_answer = last.get("role") == "assistant" and not last.get("tool_calls")
        rewards.append(value + float(is_answer and last.get("content") == str(a + b + c)))
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", help="the Python of TRL's environment", default=".venvs/trl/bin/python")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        train_by_trl(args.side, args.seed[0])
        sys.exit()
    results = []
    for seed in args.seed:
        with tempfile.TemporaryDirectory() as folder:
            results.append(compare(Path(folder), seed, args.trl))
        print(json.dumps(results[-1], indent=1))
    if args.out:
        command = "python benchmarks/rl/trl_calculator.py --seed " + " ".join(map(str, args.seed))
        machine = f"{platform.processor() or platform.machine()}, one thread"
        args.out.write_text(json.dumps({"machine": machine, "command": command, "runs": results}, indent=1) + "\n")
