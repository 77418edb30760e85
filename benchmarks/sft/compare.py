"""SFT on one GPU: this engine, Hugging Face's Trainer, the Trainer with Liger's kernels, and TRL, in one run.

    PYTHONPATH=. python benchmarks/sft/compare.py --out benchmarks/results/text_sft.json
    PYTHONPATH=. python benchmarks/sft/compare.py --shape qwen3_vl_2b --mixes images --batch 8 --checkpointing \\
        --out benchmarks/results/vlm_sft.json
    PYTHONPATH=. python benchmarks/sft/compare.py --shape qwen3_a3b_6 --mixes "mix 64k" --sides ours Trainer \\
        --steps 20 --out benchmarks/results/experts_sft.json
    python benchmarks/sft/compare.py --table benchmarks/results/text_sft.json     # into docs/performance.md

Each side is a process of its own, with the same weights, sequences, order, optimizer, clipping and precision (bf16
autocast over float32 weights). `mix` has lengths as chats have them, `full` nothing but 4,096 tokens, so that padding
costs the Trainer nothing. `images` has text behind none to four images, and trains the encoder too. A step is 32 (8,
40) rows, about 32k tokens. Tokens are useful ones, never padding; MFU is by MFUKit's formula, the same for all, of the
card's peak for bf16. The first interval warms up and does not count. `ours, fp8` has 8-bit products (`model.fp8`),
`ours, fp8 all` has weight gradients in FP8 as well. Rows lie in memory, save for `ours, JPEG files`: there the data
kit's loader reads the same rows from a jsonl and real files, in packs of its own (`files.py`), for `images` alone. With
`--add`, rows that are in the file stay there; `run` says which of the commands a row is from.

`TRL + Liger` is SFTTrainer (`pip install trl`), which packs rows itself, and so has them in another order, in blocks of
`--longest` tokens: counted are the sequences that its steps really had, each apart from the others. It keeps them whole
and apart; `TRL + Liger, wrapped` cuts some, and lets them see each other (`trl_side.py`). It packs no rows with images.
Without a GPU, to try things out, sides with Liger do without it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from data import PER_STEP, Pixels, Row, packed, rows, shape

from benchmarks.watch import limit_of, watch
from mvp_engine.files import atomic_write_text
from mvp_engine.hf import LanguageModel
from mvp_engine.kit import MFUKit
from mvp_engine.log.metrics import device_peak

HERE = Path(__file__).parent
FP8 = "model.fp8=true"
OURS: dict[str, list[str]] = {"ours": [], "ours, fp8": [FP8], "ours, JPEG files": ["sft.source=files"]}
OURS["ours, fp8 all"] = ["model.fp8=all"]
SIDES = ["ours", "Trainer", "Trainer + Liger"]
TRL = {"TRL + Liger": "bfd", "TRL + Liger, wrapped": "wrapped"}  # how it packs
INTERVAL = 5
DAY = 86_400.0


def our_command(args: argparse.Namespace, mix: str, folder: Path, side: str, interval: int = INTERVAL) -> list[str]:
    words = [f"train.max_steps={args.steps}", f"log.interval={interval}", f"output_dir={folder}", *args.keys]
    words += [f"sft.mix={mix}", f"sft.shape={args.shape}", f"sft.longest={args.longest}"]
    size, step = (1, args.packs) if "files" in side else (PER_STEP[mix] // args.packs, PER_STEP[mix])  # packs, or rows
    words += [f"data.micro_batch_size={size}", f"data.global_batch_size={step}", *OURS[side]]
    return [sys.executable, "-m", "mvp_engine.launch", "--config", str(HERE / "train.yaml"), *words]


def ours(args: argparse.Namespace, mix: str, folder: Path, side: str) -> dict[str, Any]:
    command = our_command(args, mix, folder / "runs", side)
    seen = watch(command, folder, args.limit or DAY, last_step=args.steps)
    records = [record for _, record in seen.records]
    if seen.code not in (0, None) or len(intervals(records)) < 2:
        print(seen.output, file=sys.stderr, flush=True)
        raise subprocess.CalledProcessError(seen.code or 124, command)
    return figures(records)


def our_records(folder: Path) -> list[dict[str, Any]]:
    (log,) = folder.glob("*/metrics.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


def figures(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a log: what was really trained in the intervals that count, and how long it took."""
    records = intervals(records)
    counted = records[1:]
    seconds = [record["perf"]["step_s"] * INTERVAL for record in counted]
    waited = sum(record["perf"]["data_wait"] * time for record, time in zip(counted, seconds, strict=True))
    found = {"losses": [record["loss"] for record in records], "seconds": sum(seconds)}
    found["steps"] = len(counted) * INTERVAL
    found |= {"data_wait": waited / sum(seconds), "memory_gib": records[-1]["perf"]["memory_gib"]}
    return found | {name: sum(record["totals"][name] for record in counted) for name in ("tokens", "flops")}


def intervals(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of whole intervals: the first step has one, too."""
    return [record for record in records if record["step"] % INTERVAL == 0]


def their_command(
    args: argparse.Namespace, mix: str, out: Path, side: str, interval: int = INTERVAL, **more: Any
) -> list[str]:
    """Writes to `out`; `more` are arguments of `trainer.run`."""
    how = {"out": str(out), "name": args.shape, "mix": mix, "steps": args.steps, "interval": interval}
    how |= {"batch": args.batch, "liger": "Liger" in side, "longest": args.longest, "checkpointing": args.checkpointing}
    how |= {"packing": TRL.get(side), **more}
    return [sys.executable, str(HERE / "trainer.py"), json.dumps(how)]


def theirs(args: argparse.Namespace, mix: str, folder: Path, side: str) -> dict[str, Any]:
    out = folder / "trainer.json"
    command = their_command(args, mix, out, side)
    with contextlib.suppress(subprocess.TimeoutExpired):  # then what it had by then counts
        subprocess.run(command, check=True, timeout=limit_of(args.limit or DAY))
    found = json.loads(out.read_text()) if out.is_file() else {"ends": []}
    done = len(found["ends"])
    warm = INTERVAL if done > INTERVAL else 1
    if done <= warm:
        raise subprocess.CalledProcessError(124, command)
    seconds = found["ends"][-1] - found["ends"][warm - 1]
    if "sequences" in found:
        counted = [[text(length) for length in step] for step in found["sequences"][warm:done]]
    else:
        every, size = rows(mix, args.steps, args.longest), PER_STEP[mix]
        counted = [every[i : i + size] for i in range(warm * size, done * size, size)]
    kept = {"losses": found["losses"], "seconds": seconds, "memory_gib": found["memory_gib"], "steps": done - warm}
    return kept | work(args.shape, counted)


def work(name: str, steps: list[list[Row]]) -> dict[str, Any]:
    """Tokens and FLOPs of these steps."""
    kit, pixels = MFUKit(LanguageModel.on_meta(None, shape(name))), Pixels()
    flops = sum(float(kit.flops(packed(step, name, pixels))) for step in steps)
    return {"tokens": sum(len(row.ids) for step in steps for row in step), "flops": flops}


def text(length: int) -> Row:
    """So many tokens, whichever."""
    return Row(torch.zeros(length, dtype=torch.long), torch.ones(length, dtype=torch.bool))


def measure(args: argparse.Namespace, side: str, mix: str) -> dict[str, Any]:
    row: dict[str, Any] = {"side": side, "mix": mix}
    try:
        with tempfile.TemporaryDirectory() as folder:
            where = (args, mix, Path(folder))
            found = (ours if side in OURS else theirs)(*where, side)
    except subprocess.CalledProcessError as error:
        return {**row, "why": f"ended with {error.returncode}"}
    tokens, flops = found["tokens"], found["flops"]
    peak = device_peak(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    steps = found["steps"]
    row |= {"tokens_per_s": tokens / found["seconds"], "step_ms": 1e3 * found["seconds"] / steps}
    row |= {"mfu": flops / found["seconds"] / peak if peak else None, "tokens_per_step": tokens / steps}
    kept = {name: found.get(name) for name in ("data_wait", "memory_gib", "losses", "steps")}
    return {**row, **kept}


def table(result: dict[str, Any]) -> str:
    lines = [
        "| lengths | side | tokens/s | MFU | step | data wait | memory | last loss |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        head = f"| {row['mix']} | {row['side']} |"
        if "why" in row:
            lines.append(f"{head} - | - | - | - | - | {row['why']} |")
            continue
        mfu = "-" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
        memory = "-" if row["memory_gib"] is None else f"{row['memory_gib']:.0f} GiB"
        wait = "-" if row.get("data_wait") is None else f"{100 * row['data_wait']:.1f} %"
        shown = (f"{row['tokens_per_s']:,.0f}", mfu, f"{row['step_ms']:.0f} ms", wait, memory)
        lines.append(f"{head} {' | '.join(shown)} | {row['losses'][-1]:.3f} |")
    return "\n".join(lines)


def into_page(name: str, result: dict[str, Any], page: Path) -> None:
    text = re.sub(
        rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
        lambda found: f"{found[1]}{table(result)}\n{found[2]}",
        page.read_text(),
        flags=re.DOTALL,
    )
    page.write_text(text)


def about(script: str = "compare.py") -> dict[str, Any]:
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    peers = ("transformers", "accelerate", "peft", "liger-kernel", "trl", "datasets")
    for name in ("torch", "triton", *peers, "nvidia-cudnn-frontend"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "hardware": gpu,
        "versions": versions,
        "commands": [shlex.join(["python", f"benchmarks/sft/{script}", *sys.argv[1:]])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--add", action="store_true", help="to what is in --out already")
    parser.add_argument("--table", type=Path, help="only put the table of this JSON into docs/performance.md")
    parser.add_argument("--shape", default="qwen3_1_7b")
    parser.add_argument("--mixes", nargs="+", default=["mix", "full"], choices=PER_STEP)
    parser.add_argument("--sides", nargs="*", default=SIDES, choices=[*OURS, *SIDES[1:], *TRL])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument(
        "--batch", type=int, default=4, help="sequences, or wrapped blocks, that a Trainer takes at once"
    )
    parser.add_argument("--packs", type=int, default=2, help="micro-batches that we make of a step")
    parser.add_argument("--checkpointing", action="store_true", help="the Trainer recomputes activations")
    parser.add_argument("--keys", nargs="*", default=[], help="keys of our config")
    parser.add_argument("--limit", type=float, help="seconds of one side; the steps that it had by then count")
    args = parser.parse_args()
    if args.steps % INTERVAL or args.steps < 2 * INTERVAL:
        parser.error(f"--steps {args.steps}: take a multiple of {INTERVAL}, {2 * INTERVAL} or more")
    if TRL.keys() & args.sides and "images" in args.mixes:
        parser.error("TRL packs no rows with images: leave out its sides, or --mixes images")
    if TRL.keys() & args.sides and not find_spec("trl"):
        parser.error("the sides of TRL want trl: pip install trl")
    if args.add and not (args.out and args.out.is_file()):
        parser.error("--add wants a file of results to add to: give it with --out")
    if args.table:
        into_page(args.table.stem, json.loads(args.table.read_text()), HERE.parents[1] / "docs" / "performance.md")
        return
    result: dict[str, Any] = {**about(), "rows": []}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.add:
        before = json.loads(args.out.read_text())
        result |= {"commands": before["commands"] + result["commands"], "rows": before["rows"]}
    for mix in args.mixes:
        for side in args.sides:
            result["rows"].append({"run": len(result["commands"]) - 1, **measure(args, side, mix)})
            print(result["rows"][-1], file=sys.stderr, flush=True)
            if args.out:  # after each, should the next one take the process with it
                atomic_write_text(args.out, json.dumps(result, indent=2) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
