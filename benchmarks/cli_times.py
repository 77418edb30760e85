"""How long the commands of `mvp` that need no torch take: the best of several calls, each a process of its own.

    PYTHONPATH=. python benchmarks/cli_times.py [--repeats 5] [--out FILE]

Wall time is that of idle cores only if nothing else runs; CPU time (user and system) hardly depends on the load.
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

from mvp_engine.runs import Run

RECORDS = 10_000
ROOT = Path(__file__).resolve().parents[1]
DIGITS = str(ROOT / "recipes" / "digits_vlm" / "configs" / "train.yaml")
LIMITS = {"mvp runs latest": 0.3, "mvp config": 1.5}  # seconds of wall time on two idle cores
COMMANDS = {
    "mvp --help": ["--help"],
    "mvp runs latest": ["runs", "latest"],
    "mvp runs": ["runs"],
    "mvp config": ["config", DIGITS],
    "mvp config --explain": ["config", "--explain", "optim.lr"],
    "mvp data inspect": ["data", "inspect", "rows.jsonl"],
    "mvp train, a typo in a key": ["train", DIGITS, "optim.lrr=1"],
}


def make_folder(folder: Path) -> None:
    """A finished run, and a file of rows."""
    run = Run.create(folder / "outputs", "digits", "digits")
    run.note(status="finished", step=RECORDS)
    records = [{"step": step, "split": "train", "loss": 1.0 / step} for step in range(1, RECORDS + 1)]
    (run.dir / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (folder / "rows.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 1000)


def measure(words: list[str], folder: Path, repeats: int) -> dict[str, float]:
    wall = list[float]()
    cpu = list[float]()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        command = [sys.executable, "-m", "mvp_engine.cli", *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        wall.append(time.perf_counter() - started)
        if done.returncode != (2 if words[0] == "train" else 0):
            raise SystemExit(done.stderr)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return {"wall_s": round(min(wall), 3), "cpu_s": round(min(cpu), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    print("| command | wall s | CPU s | limit s |\n| --- | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as name:
        make_folder(Path(name))
        for title, words in COMMANDS.items():
            results[title] = measure(words, Path(name), args.repeats)
            times = results[title]
            print(f"| `{title}` | {times['wall_s']} | {times['cpu_s']} | {LIMITS.get(title, '')} |")
    if args.out:
        machine = f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"
        facts = {"command": "python benchmarks/cli_times.py", "machine": machine, "load": os.getloadavg()[0]}
        facts["python"] = platform.python_version()
        args.out.write_text(json.dumps({**facts, "times": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
