"""Kill -9 at random moments, relaunch with resume=auto, compare with a run that nobody killed.

    python tests/kill_resume.py --kills 20 [--nproc 2] [--config FILE] [key=value ...]

Kills the whole process group, so nothing gets a chance to clean up. Passes when every relaunch finds a readable
checkpoint, and the final metrics.jsonl has the same steps and bits as the straight run's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "recipes" / "tiny" / "train.yaml"
WORDS = [
    "log.interval=3",
    "log.backends=[file,jsonl]",
    "loop.eval_interval=50",
    "checkpoint.interval=2",  # so that a checkpoint is being written most of the time
    "tiny.dropout=0.2",
    "tiny.noise=0.1",
    "tiny.step_seconds=0.005",
]


def command(config: Path, nproc: int, words: list[str]) -> list[str]:
    launch = ["-m", "mvp_engine.launch", "--config", str(config), *words]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    return [sys.executable, *(torchrun if nproc > 1 else []), *launch]


def records(folder: Path) -> list[dict[str, Any]]:
    [file] = folder.glob("*/metrics.jsonl")
    return [{k: v for k, v in json.loads(line).items() if k != "perf"} for line in file.read_text().splitlines()]


def run(config: Path, nproc: int, words: list[str], kill_after: float | None, log: Path) -> int:
    """Launch and kill -9 so many seconds after training began or went on; a negative number counts from the start."""
    folder = Path(next(w for w in words if w.startswith("project.dir=")).split("=", 1)[1])
    before = _size(folder)
    with open(log, "a") as out:
        process = subprocess.Popen(
            command(config, nproc, words), stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
        )
        while kill_after is not None and kill_after >= 0 and process.poll() is None and _size(folder) == before:
            time.sleep(0.01)  # starting up
        deadline = time.monotonic() + (600 if kill_after is None else abs(kill_after))
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if process.poll() is None:
            # torchrun's workers have sessions of their own: kill them too, or leave them to notice by themselves.
            workers = _children(process.pid) if nproc > 1 and int(deadline * 1000) % 2 else []
            os.killpg(process.pid, signal.SIGKILL)
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
        return process.wait()


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*/log.txt"))


def compare(
    kills: int,
    nproc: int,
    config: Path,
    words: list[str],
    seed: int,
    folder: Path,
    launch: Callable[..., list[int]] | None = None,
) -> dict[str, Any]:
    """`launch`: what runs the straight one, where there are ranks already; else processes of its own."""
    log = folder / "output.txt"
    straight = [*words, f"project.dir={folder / 'straight'}"]
    codes = launch(config, *straight) if launch else [run(config, nproc, straight, None, log)]
    assert not any(codes), log.read_text()
    killed = [*words, f"project.dir={folder / 'killed'}", "resume=auto"]
    dice = random.Random(seed)
    done, during_save = 0, 0
    while done < kills:
        moment = -dice.uniform(0.1, 4.0) if dice.random() < 0.2 else dice.uniform(0.0, 0.9)
        code = run(config, nproc, killed, moment, log)
        if code != -signal.SIGKILL:
            assert code == 0, f"a relaunch failed with {code}:\n{log.read_text()[-4000:]}"
            break  # finished before the kill came
        done += 1
        during_save += any((folder / "killed").glob("*/checkpoints/.tmp-*"))
    assert run(config, nproc, killed, None, log) == 0, log.read_text()[-4000:]
    a, b = records(folder / "straight"), records(folder / "killed")
    different = [pair for pair in zip(a, b, strict=False) if pair[0] != pair[1]]
    assert a == b, f"{len(a)} and {len(b)} records; the first that differ: {different[:1]}"
    return {"kills": done, "while_a_checkpoint_was_being_written": during_save, "records": len(a), "bit_equal": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--config", type=Path, default=TINY)
    parser.add_argument("--seed", type=int, default=0)
    args, words = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="kill-resume-"))
    words = words or ([*WORDS, f"loop.total_steps={100 + 60 * args.kills}"] if args.config == TINY else [])
    print(json.dumps(compare(args.kills, args.nproc, args.config, words, args.seed, folder)))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
