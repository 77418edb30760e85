"""Loss curves of this engine beside those of Hugging Face's Trainer, and beside a noise floor: are they the same?

    PYTHONPATH=. python benchmarks/sft/curves.py --parallel 12 --out benchmarks/results/curves.json
    PYTHONPATH=. python benchmarks/sft/curves.py --tiny --steps 20                    # on a CPU, in float32
    python benchmarks/sft/curves.py --table benchmarks/results/curves.json            # only print the table

Four kinds of training: text, LoRA (peft on the Trainer's side), images in front of text with the encoder trained, and
experts. Both sides have the same initial weights and adapters, rows, order of steps, optimizer, learning rate, clipping
and precision (bf16 autocast over float32 weights on a GPU). A loss is that of one step, summed over its tokens and
divided by their number, on both sides. With images the Trainer takes all rows of a step at once: over several
micro-batches it would average their means, since Qwen3-VL's class has `accepts_loss_kwargs = False`. Its experts are
computed one by one (`experts_implementation="eager"`), which is bf16 as ours: autocast does not reach its grouped GEMM.

The noise floor is the difference between two trainings of this engine that differ only in the number of micro-batches
of a step: mathematically equal, rounded differently. Nothing is timed here, so `--parallel` runs many processes at
once. A process that fails, or is not finished after `--limit` seconds, leaves the steps that it had.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compare import about, our_command, our_records, their_command
from data import EXPERTS

OURS, FLOOR, TRAINER = "ours", "ours, 4 packs", "Trainer"
PACKS = {OURS: 2, FLOOR: 4}  # micro-batches of a step


@dataclass(frozen=True)
class Kind:
    shape: str
    tiny: str
    mix: str = "full"
    longest: int = 512
    lr: float = 1e-4
    rank: int | None = None  # of LoRA
    batch: int = 4  # rows that the Trainer takes at once

    def as_tiny(self) -> Kind:
        return replace(self, shape=self.tiny, longest=128, lr=10 * self.lr)


KINDS = {
    "text": Kind("small", "tiny"),
    "LoRA": Kind("small", "tiny", "few words", lr=5e-4, rank=16),
    "images": Kind("small_vl", "tiny_vl", "small images", batch=8),
    "experts": Kind("small_moe", "tiny_moe"),
}


def command(kind: Kind, side: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """Of the process that trains one side of one kind."""
    words = [f"optim.lr={kind.lr}", "model.compile=null", f"train.precision={args.precision}"]
    if kind.rank:
        words.append(f"lora={{rank: {kind.rank}}}")
    how = argparse.Namespace(
        shape=kind.shape, longest=kind.longest, steps=args.steps, packs=PACKS.get(side), keys=words
    )
    if side in PACKS:
        return our_command(how, kind.mix, folder, "ours", interval=1)
    how.batch, how.checkpointing = kind.batch, False
    more: dict[str, Any] = {"lr": kind.lr, "lora": {"rank": kind.rank} if kind.rank else None}
    more["experts"] = "eager" if kind.shape in EXPERTS else None
    more["bf16"] = None if args.precision == "auto" else args.precision == "bf16"
    return their_command(how, kind.mix, folder / "trainer.json", side, interval=1, **more)


def losses(side: str, folder: Path) -> list[float]:
    """Those of the steps so far."""
    if side in PACKS:
        found = list(folder.glob("*/metrics.jsonl"))
        return [record["loss"] for record in our_records(folder) if "loss" in record] if found else []
    out = folder / "trainer.json"
    return json.loads(out.read_text())["losses"] if out.is_file() else []


@dataclass
class Job:
    kind: str
    side: str
    command: list[str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self, threads: int) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
        with (self.folder / "log").open("wb") as log:
            how: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "env": env}
            self.process = subprocess.Popen(self.command, start_new_session=True, **how)

    def kill(self) -> None:
        """With the processes that it started."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def row(self, why: str | None) -> dict[str, Any]:
        found = {"kind": self.kind, "side": self.side, "losses": losses(self.side, self.folder)}
        return found | ({"why": why} if why else {})

    def last_lines(self) -> str:
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-25:])


def run_all(jobs: list[Job], parallel: int, limit: float, done: Any) -> None:
    """Run so many jobs at once; `done` gets the row of each that has ended."""
    waiting, running, end = list(jobs), list[Job](), time.monotonic() + limit
    threads = max(1, (os.cpu_count() or 1) // min(parallel, len(jobs)))
    while waiting or running:
        late = time.monotonic() > end
        while waiting and len(running) < parallel and not late:
            running.append(waiting.pop(0))
            running[-1].start(threads)
        for job in list(running):
            assert job.process is not None
            code = job.process.poll()
            if code is None and not late:
                continue
            if code is None:
                job.kill()
            running.remove(job)
            why = f"stopped after {limit:.0f} s" if code is None else f"ended with {code}" if code else None
            if code:
                print(f"{job.kind}, {job.side}: ended with {code}\n{job.last_lines()}", file=sys.stderr, flush=True)
            done(job.row(why))
        if late:
            for job in waiting:
                done({"kind": job.kind, "side": job.side, "losses": [], "why": "not started: the time was up"})
            return
        time.sleep(0.2)


def difference(one: list[float], other: list[float]) -> dict[str, float] | None:
    """Largest and mean, over the steps that both have."""
    each = [abs(a - b) for a, b in zip(one, other, strict=False)]
    return {"steps": len(each), "max": max(each), "mean": sum(each) / len(each)} if each else None


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each kind: how far the Trainer is from this engine, and how far this engine is from itself."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        found.setdefault(row["kind"], {})[row["side"]] = row["losses"]
    return [
        {
            "kind": kind,
            "trainer": difference(sides.get(OURS, []), sides.get(TRAINER, [])),
            "floor": difference(sides.get(OURS, []), sides.get(FLOOR, [])),
        }
        for kind, sides in found.items()
    ]


def table(result: dict[str, Any]) -> str:
    by_side = {(row["kind"], row["side"]): row for row in result["rows"]}
    steps = [1, max(1, result["steps"] // 2), result["steps"]]
    at = " / ".join(map(str, steps))
    lines = [
        f"| training | ours, steps {at} | Trainer | ours and Trainer: largest, mean | noise floor: largest, mean |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for one in summary(result["rows"]):
        cells = []
        for side in (OURS, TRAINER):
            row = by_side.get((one["kind"], side), {"losses": []})
            shown = [f"{row['losses'][i - 1]:.4f}" if i <= len(row["losses"]) else "-" for i in steps]
            cells.append(" / ".join(shown) + (f" ({row['why']})" if "why" in row else ""))
        for against in (one["trainer"], one["floor"]):
            short = "" if not against or against["steps"] == result["steps"] else f" ({against['steps']} steps)"
            cells.append(f"{against['max']:.2g}, {against['mean']:.2g}{short}" if against else "-")
        lines.append(f"| {one['kind']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--table", type=Path, help="only print the table of this JSON")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--tiny", action="store_true", help="tiny models and short rows, for a CPU")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--parallel", type=int, default=1, help="processes at once")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds of all together")
    parser.add_argument("--keep", type=Path, help="an empty folder for the logs of the processes; default: not kept")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    if "LoRA" in args.kinds and not find_spec("peft"):
        parser.error("LoRA on the Trainer's side wants peft: pip install peft, or leave it out of --kinds")
    result: dict[str, Any] = {**about("curves.py"), "steps": args.steps, "precision": args.precision}
    result |= {"kinds": {}, "rows": []}

    def done(row: dict[str, Any]) -> None:
        result["rows"] = sorted([*result["rows"], row], key=lambda one: list(KINDS).index(one["kind"]))
        print(f"{row['kind']}, {row['side']}: {len(row['losses'])} steps {row.get('why', '')}", file=sys.stderr)
        if args.out:  # after each, should the next one take the process with it
            args.out.write_text(json.dumps({**result, "summary": summary(result["rows"])}, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for name in args.kinds:
            kind = KINDS[name].as_tiny() if args.tiny else KINDS[name]
            result["kinds"][name] = vars(kind)
            for side in (TRAINER, OURS, FLOOR):  # the slowest first
                where = (args.keep or Path(folder)) / f"{name}_{side}".replace(", ", "_").replace(" ", "_")
                where.mkdir(parents=True)
                jobs.append(Job(name, side, command(kind, side, args, where.resolve()), where))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # of `timeout`: no process may stay on the GPU
        try:
            run_all(jobs, args.parallel, args.limit, done)
        finally:
            for job in jobs:
                job.kill()
    print(table(result))
    if any("why" in row for row in result["rows"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
