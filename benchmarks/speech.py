"""Training a talker on one GPU: Qwen3-Omni's in its real shape, on synthetic speech of 2 to 30 seconds.

    PYTHONPATH=. python benchmarks/speech.py --out benchmarks/results/speech.json
    PYTHONPATH=. python benchmarks/speech.py --only predictor mimi --limit 60 --out FILE --add
    PYTHONPATH=. python benchmarks/speech.py --tiny    # tries it on a CPU

What is measured, each in processes of its own, so that a part that fails is a row with its error:

- `train`: `MLLMEngine` with `model.type=omni_model`, talker SFT: the thinker is frozen, and since rows are text its
  blocks do not run (it has one layer here, and its whole embedding). Rows have codes of 2 to 30 s at 12.5 frames per
  second. Frames per second, MFU, peak memory, and what `mvp plan` predicts. `--tried` lists trainings as
  TOKENS:CHECKPOINTING:COMPILE[:PACKS], where PACKS are the micro-batches of a step (1). The first half of the steps
  warms up; a training that reaches `--limit` before its last step counts with the steps it logged. It ends without a
  checkpoint.
- `predictor`: forward and backward of the code predictor on the same frames, in one pass over 16 positions, and in 15
  passes of growing length, as `generate` runs it.
- `sync`: a forward and backward under `torch.cuda.set_sync_debug_mode("error")`.
- `mimi`: encoding of waveforms of 2 to 30 s to 16 codebooks by a random Mimi, as a multiple of real time.

Random weights are drawn on the GPU; those of `train` are a folder in bf16, written once. `--out` is written after each
row.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.attempt import FOUND, attempt
from benchmarks.speech_model import WORDS, model_config, tokenizer
from benchmarks.watch import watch

FRAME_RATE = 12.5
INTERVAL = 2  # steps of a log record
ROWS = 8192  # enough for the steps that are measured: the end of an epoch has a small pack, and starts workers again
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def seconds(dice: np.random.Generator, count: int, tiny: bool) -> list[float]:
    """Lengths of sounds: log-uniform from 2 to 30 seconds."""
    longest = 4.0 if tiny else 30.0
    return np.exp(dice.uniform(np.log(2.0), np.log(longest), count)).tolist()


def make_rows(folder: Path, count: int, tiny: bool) -> None:
    """Chats of about three words per second, and their codes."""
    dice = np.random.default_rng(0)
    if (folder / "tokenizer").is_dir():
        return
    (folder / "codes").mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w") as rows:
        for i, length in enumerate(seconds(dice, count, tiny)):
            codes = dice.integers(0, 2048, (round(length * FRAME_RATE), 16))
            np.save(folder / "codes" / f"{i}.npy", codes)
            text = " ".join(dice.choice(WORDS, round(3 * length)))
            answer = [{"type": "text", "text": text}, {"type": "audio", "codes": f"codes/{i}.npy"}]
            question = " ".join(dice.choice(WORDS, 20))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            rows.write(json.dumps({"messages": messages}) + "\n")
    tokenizer().save_pretrained(folder / "tokenizer")


# ---- Training -----------------------------------------------------------------------------------------------------


def make_model(folder: Path, tiny: bool) -> Path:
    """A Qwen3-Omni folder with random weights in bf16, drawn on the GPU: the training's own initialization is slow."""
    from transformers import Qwen3OmniMoeForConditionalGeneration

    from mvp_engine.hf.model.config_source import read_config
    from mvp_engine.kit.speech.plugin import OmniModelFolder

    out = folder / "model"
    if out.is_dir():
        return out
    config = read_config(None, model_config(tiny))
    OmniModelFolder.complete_config(config)
    config.dtype = torch.bfloat16
    with torch.device(DEVICE):
        whole: Any = Qwen3OmniMoeForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    draw_weights(whole)
    whole.save_pretrained(out)
    del whole
    if ON_GPU:
        torch.cuda.empty_cache()
    return out


def draw_weights(model: torch.nn.Module) -> None:
    """transformers does not initialize the talker's experts."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)


def train(folder: Path, args: argparse.Namespace, tried: str) -> dict[str, Any]:
    tokens, mode, backend, *packs = tried.split(":")
    name = tried.replace(":", "_")
    config = {
        "engine": "mvp_engine.kit.mllm:MLLMEngine",
        "processor": str(folder / "tokenizer"),
        "run_name": "speech",
        "output_dir": str(folder / name / "runs"),
        "model": {
            "type": "omni_model",
            "path": str(make_model(folder, args.tiny)),
            "freeze": ["vision", "audio", "projector", "llm"],
            "activation_checkpointing": {"talker": mode},
            "compile": None if backend == "null" else backend,
        },
        "data": {
            "pack_tokens": int(tokens),
            "sources": {"rows": {"path": str(folder / "rows.jsonl")}},
            "cache": str(folder / "costs"),
            "speech": {"books": 16, "require": True},
            "global_batch_size": int(*packs or [1]),
            "num_workers": args.workers,
        },
        "train": {"max_steps": 1_000_000, "precision": "auto"},
        "optim": {"max_grad_norm": 1.0, "lr": 1e-5, "weight_decay": 0.0, "schedule": "constant"},
        "log": {"interval": INTERVAL, "backends": ["jsonl", "terminal"]},
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(config))
    gpu = torch.cuda.get_device_name() if ON_GPU else "H200"
    predict = [sys.executable, "-m", "mvp_engine.cli", "plan", str(file), "--gpu", gpu, "--json", *args.keys]
    shutil.rmtree(folder / name, ignore_errors=True)
    command = [sys.executable, "-m", "mvp_engine.launch", "--config", str(file), *args.keys]
    with subprocess.Popen(predict, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as prediction:
        seen = watch(command, folder / name, args.limit, last_step=args.steps)
        predicted, why = prediction.communicate()
    trained = [record for _, record in seen.records if record.get("split") == "train"]
    counted = [record["perf"] for record in trained[len(trained) // 2 :]]
    if not counted:
        return {"error": seen.output}
    found: dict[str, Any] = {"steps": trained[-1]["step"], "first_record_s": seen.records[0][0]}
    seconds = sum(perf["step_s"] for perf in counted)
    for key in ("frames_per_s", "mfu", "data_wait"):
        if all(perf.get(key) is not None for perf in counted):
            found[key] = sum(perf[key] * perf["step_s"] for perf in counted) / seconds
    found |= {"step_s": seconds / len(counted), "memory_gib": counted[-1]["memory_gib"]}
    if "frames_per_s" in found:
        found["real_time"] = found["frames_per_s"] / FRAME_RATE
    try:
        estimate = json.loads(predicted)
    except json.JSONDecodeError:
        return {**found, "estimate_error": (predicted + why)[-1000:]}
    found |= {"estimate_gib": estimate.get("peak_gib"), "estimate_step_s": estimate.get("step_s")}
    if estimate.get("peak_gib") and ON_GPU:
        found["memory_of_estimate"] = found["memory_gib"] / estimate["peak_gib"]
    return found


# ---- Parts --------------------------------------------------------------------------------------------------------


def one_batch(folder: Path, tiny: bool, tokens: int) -> Any:
    from mvp_engine.hf.model.config_source import read_config
    from mvp_engine.kit import MLLMData, MLLMDataKit

    values = {
        "sources": [{"path": str(folder / "rows.jsonl")}],
        "pack_tokens": tokens,
        "cache": str(folder / "costs"),
        "speech": {"books": 16, "require": True},
    }
    config = read_config(None, model_config(tiny))
    kit = MLLMDataKit(MLLMData.model_validate(values), tokenizer(), model_config=config)
    return next(iter(kit.loader("train", global_batch_size=1)))


def build(tiny: bool) -> Any:
    from mvp_engine.hf.model.config_source import read_config
    from mvp_engine.kit.speech.omni_model import OmniModel

    config = read_config(None, model_config(tiny))
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            model = OmniModel.from_config(config).to(dtype)
    finally:
        torch.set_default_dtype(default)
    draw_weights(model)
    model.requires_grad_(False)
    model.talker.requires_grad_(True)
    return model


def timed(work: Any, steps: int) -> float:
    """Seconds of a call, after a warm-up."""
    work()
    if ON_GPU:
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        work()
    if ON_GPU:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def predictor(folder: Path, args: argparse.Namespace, tried: str) -> dict[str, Any]:
    model = build(args.tiny)
    passes = model.passes()
    decoder = model.talker.code_predictor.model
    heads = model.talker.code_predictor.lm_head
    size, books = decoder.config.hidden_size, decoder.config.num_code_groups
    frames = int(tried)
    embeds = torch.randn(frames, books, size, device=DEVICE, dtype=next(decoder.parameters()).dtype)
    hidden = torch.randn_like(embeds[:, 0])

    def one_pass() -> None:
        rest = passes.rest_hidden(hidden, embeds)
        torch.bmm(rest, passes.rest_heads().transpose(1, 2)).float().logsumexp(-1).sum().backward()

    def growing_passes() -> None:
        inputs = torch.cat([hidden[:, None], embeds[:, :-1]], 1)
        for step, head in enumerate(heads):
            last = decoder(inputs_embeds=inputs[:, : step + 2], use_cache=False).last_hidden_state[:, -1]
            head(last).float().logsumexp(-1).sum().backward()

    one = timed(one_pass, max(1, args.steps // 4))
    many = timed(growing_passes, max(1, args.steps // 8))
    return {"frames": frames, "one_pass_ms": 1e3 * one, "growing_passes_ms": 1e3 * many, "ratio": many / one}


def sync(folder: Path, args: argparse.Namespace, tried: str) -> dict[str, Any]:
    """Whether a forward and backward of the model syncs with the GPU, and where."""
    if not ON_GPU:
        return {"host_sync": None, "reason": "needs a GPU"}
    model = build(args.tiny)
    batch = one_batch(folder, args.tiny, int(tried)).pin_memory().to(DEVICE, non_blocking=True)

    def work() -> None:
        model(batch, ["speech_loss"])["speech_loss"].sum().backward()

    work()  # kernels are chosen and compiled here
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        import traceback

        places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        return {"host_sync": True, "where": places[-6:], "error": str(error)[:300]}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"host_sync": False}


def mimi(folder: Path, args: argparse.Namespace, tried: str) -> dict[str, Any]:
    from transformers import MimiConfig, MimiModel

    from mvp_engine.kit.speech import open_codec

    options: dict[str, Any] = {}
    if args.tiny:
        options = {"hidden_size": 32, "num_filters": 4, "codebook_size": 64, "codebook_dim": 16}
        options |= {"vector_quantization_hidden_dimension": 16, "num_hidden_layers": 1, "intermediate_size": 32}
        options |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "upsample_groups": 32}
    torch.manual_seed(0)
    MimiModel(MimiConfig(**options)).save_pretrained(folder / "mimi")
    codec = open_codec(str(folder / "mimi"), 16, DEVICE)
    dice = np.random.default_rng(1)
    sounds = [
        dice.normal(0, 0.1, round(24_000 * one)).astype(np.float32) for one in seconds(dice, int(tried), args.tiny)
    ]
    total = sum(map(len, sounds)) / 24_000
    took = timed(lambda: codec.encode_many(sounds), max(1, args.steps // 8))
    return {"sounds": len(sounds), "audio_seconds": total, "seconds": took, "real_time": total / took}


PARTS = {"train": train, "predictor": predictor, "sync": sync, "mimi": mimi}


def about() -> dict[str, Any]:
    versions = {"python": platform.python_version(), **{name: version(name) for name in ("torch", "transformers")}}
    hardware = torch.cuda.get_device_name() if ON_GPU else platform.processor()
    return {"hardware": hardware, "versions": versions, "command": shlex.join(["python", *sys.argv])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--out", type=Path, help="write the figures as JSON, after each row")
    parser.add_argument("--add", action="store_true", help="keep the other rows of --out")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--steps", type=int, default=24, help="of a training; other parts repeat a quarter of it")
    parser.add_argument("--limit", type=float, default=300, help="seconds of one training")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=ROWS)
    text = "tokens of a pack, activation checkpointing, compile backend (or null), packs of a step, of each training"
    tried = ["16384:none:inductor", "24576:none:inductor:2", "32768:selective:inductor:2"]
    parser.add_argument("--tried", nargs="*", default=tried, help=text)
    parser.add_argument("--keys", nargs="*", default=[], metavar="key=value", help="of the trainings, to try others")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "mvp-speech", help="rows, weights")
    parser.add_argument("--inside", nargs=3, metavar=("PART", "TRIED", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.workers, args.rows = min(args.steps, 4), 0, 12
    if args.inside:
        part, tried_one, folder = args.inside
        found = PARTS[part](Path(folder), args, tried_one)
        (Path(folder) / FOUND).write_text(json.dumps(found))
        return
    attempts = {"train": args.tried, "predictor": ["4096"], "sync": ["8192"], "mimi": ["64"]}
    if args.tiny:
        attempts = {"train": ["512:none:null"], "predictor": ["32"], "sync": ["512"], "mimi": ["4"]}
    folder = args.folder / ("tiny" if args.tiny else f"rows_{args.rows}")
    make_rows(folder, args.rows, args.tiny)
    result: dict[str, Any] = {**about(), "rows": []}
    if args.add and args.out and args.out.is_file():
        result["rows"] = json.loads(args.out.read_text())["rows"]
    for part in args.only:
        for tried_one in attempts[part]:
            row = {"part": part} | attempt(__file__, part, tried_one, str(folder))
            print(json.dumps(row), flush=True)
            result["rows"].append(row)
            if args.out:
                args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
