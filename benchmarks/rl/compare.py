"""GRPO on one GPU: this engine and TRL's GRPOTrainer with Liger's kernels, in one run, each with its own generation.

    PYTHONPATH=. python benchmarks/rl/compare.py --out benchmarks/results/grpo_text.json
    PYTHONPATH=. python benchmarks/rl/compare.py --shape tiny --prompts 2 --group 4 --new 8 --steps 4    # on a CPU

Each side is a process of its own. Both train all weights of the same random model (bf16 autocast over float32 weights)
with AdamW, one optimizer step on each batch of `--prompts` x `--group` completions, without a reference model: prompts
of 32 to 1,024 words, completions of up to `--new` tokens at temperature 1. Random weights stop about nowhere, so
completions have about `--new` tokens. The reward counts a letter. Ours is `mvp_engine.kit.rl` with
`generation.backend=packed`; TRL generates with transformers (no server on either side) and pads `--batch` completions.
Figures are medians over the second half of the steps; `steps_s` are all of them. `update_s` is everything of a step but
generation and rewards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from engine import share_of_e

sys.path.append(str(Path(__file__).parents[1]))
from preference import SHAPES, about, make

HERE = Path(__file__).parent
SIDES = ("ours", "TRL + Liger")


def ours(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The shipped RL engine, by a config file."""
    config = {
        "engine": f"{HERE / 'engine.py'}:LetterEngine",
        "run_name": "grpo",
        "output_dir": str(folder / "runs"),
        "model": {
            "type": "language_model",
            "path": str(folder / "model"),
            "compile": args.compile if torch.cuda.is_available() else None,
        },
        "rl": {"algorithm": "grpo", "prompts_per_step": args.prompts, "num_generations": args.group, "updates": 1},
        "generation": {"max_new_tokens": args.new, "temperature": 1.0},
        "data": {
            "pack_tokens": args.tokens,
            "sources": {"prompts": {"path": str(folder / "prompts.jsonl")}},
            "cache": str(folder / "costs"),
        },
        "train": {"max_steps": args.steps, "precision": "auto"},
        "optim": {"lr": 1e-6, "weight_decay": 0.0, "schedule": "constant"},
        "log": {"interval": 1, "backends": ["jsonl"]},
        "checkpoint": {"interval": None},
    }
    file = folder / "grpo.yaml"
    file.write_text(json.dumps(config))
    subprocess.run([sys.executable, "-m", "mvp_engine.launch", "--config", str(file)], check=True)
    (log,) = (folder / "runs").glob("*/metrics.jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    perf = [record["perf"] for record in records]
    generate = [one["generate_s"] + one["sync_s"] for one in perf]
    return {
        **medians(
            [one["step_s"] for one in perf],
            generate,
            [one["step_s"] - g - one["reward_s"] for one, g in zip(perf, generate, strict=True)],
        ),
        "memory_gib": perf[-1].get("memory_gib"),
        "length": records[-1]["length"],
        "gap": records[-1]["gap"],
    }


def medians(steps: list[float], generate: list[float], update: list[float]) -> dict[str, Any]:
    half = len(steps) // 2
    found = {"step_s": steps, "generate_s": generate, "update_s": update}
    by_name: dict[str, Any] = {name: statistics.median(values[half:]) for name, values in found.items()}
    return by_name | {"steps_s": [round(value, 3) for value in steps]}


def theirs(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """TRL's GRPOTrainer with one optimizer step per batch of completions."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = torch.cuda.is_available()
    ends: list[float] = []
    generating: list[float] = []
    lengths: list[float] = []

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(now())

    class Timed(GRPOTrainer):
        def _generate(self, *rest: Any, **more: Any) -> Any:
            started = now()
            found = super()._generate(*rest, **more)
            generating.append(now() - started)
            lengths.append(sum(map(len, found[1])) / len(found[1]))
            return found

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [share_of_e(one if isinstance(one, str) else one[0]["content"]) for one in completions]

    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    total = args.prompts * args.group
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=args.peer_steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=max(1, total // args.batch),
        num_generations=args.group,
        max_completion_length=args.new,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        use_liger_kernel=on_gpu,
        gradient_checkpointing=False,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        logging_steps=args.peer_steps,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = Timed(model, reward, arguments, Dataset.from_list(chats), processing_class=tokenizer)
    trainer.add_callback(Clock())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    steps = [end - start for start, end in pairwise(ends)]
    generating = generating[-len(steps) :]
    return {
        **medians(steps, generating, [step - g for step, g in zip(steps, generating, strict=True)]),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "length": sum(lengths) / len(lengths),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=SIDES)
    parser.add_argument("--shape", default="qwen3_1_7b", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--peer-steps", type=int, default=5, help="TRL's, which has nothing to compile")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of our packs")
    parser.add_argument("--batch", type=int, default=8, help="completions that TRL computes at once")
    parser.add_argument("--compile", default="auto", help="torch.compile backend of our blocks")
    parser.add_argument("--inside", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        side, name = args.inside
        found = (ours if side == "ours" else theirs)(Path(name), args)
        (Path(name) / "found.json").write_text(json.dumps(found))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, args.shape, False, 2 * args.prompts * args.steps)
        with open(folder / "rows.jsonl") as lines, open(folder / "prompts.jsonl", "w") as prompts:
            for line in lines:
                prompts.write(json.dumps({"prompt": json.loads(line)["prompt"]}) + "\n")
        for side in args.sides:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--inside", side, name], check=True)
            rows.append({"side": side, **json.loads((folder / "found.json").read_text())})
            print(rows[-1], flush=True)
    if len(rows) == 2:
        for what in ("step_s", "update_s"):
            print(f"TRL / ours, {what}: {rows[1][what] / rows[0][what]:.2f}")
    if args.out:
        args.out.write_text(json.dumps({**about(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
