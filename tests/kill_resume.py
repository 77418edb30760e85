"""Kill -9 at random moments, relaunch with resume=auto, compare with an uninterrupted run.

    python tests/kill_resume.py --kills 20 [--nproc 2] [--config FILE] [key=value ...]

Kills the whole process group, so that no process can clean up. Passes when every relaunch finds a readable
checkpoint, and the final metrics.jsonl has the same steps and is bit-equal to that of the uninterrupted run.
"""

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
from pathlib import Path
from typing import Protocol

from conftest import ROOT, TINY, spawn
from ranks import reserve_port

SETTINGS = [
    "log.interval=3",
    "log.backends=[file,jsonl]",
    "eval.steps=50",
    "checkpoint.interval=2",  # so that a checkpoint is being written most of the time
    "tiny.dropout=0.2",
    "tiny.noise=0.1",
    "tiny.step_seconds=0.005",
]


class Job(Protocol):
    """A running training on one or several ranks."""

    def is_running(self): ...

    def kill(self): ...

    def exit_code(self):
        """Wait for the end of all processes."""
        ...


class FreshJob:
    """Processes that start from nothing, several ranks under torchrun."""

    def __init__(self, config, nproc, settings, log):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        launch = ["-m", "mvp_engine.launch", "--config", str(config), *settings]
        command = [sys.executable, *(torchrun if nproc > 1 else []), *launch]
        with open(log, "a") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
            )
        self.nproc = nproc

    def is_running(self):
        return self.process.poll() is None

    def kill(self):
        # torchrun's workers have their own sessions: kill them too, or leave it to them to see that torchrun died.
        kill_workers = self.nproc > 1 and time.monotonic_ns() // 1_000_000 % 2
        workers = child_pids(self.process.pid) if kill_workers else []
        os.killpg(self.process.pid, signal.SIGKILL)
        for worker in workers:
            os.kill(worker, signal.SIGKILL)

    def exit_code(self):
        return self.process.wait()


class ForkedJob:
    """Ranks forked from the tests' fork server: no imports, no torchrun, otherwise the same."""

    def __init__(self, config, nproc, settings, log):
        launch = ["-m", "mvp_engine.launch", "--config", str(config), *settings]
        job = {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
        self.held = reserve_port()  # for as long as this job lives
        job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.held.getsockname()[1])}
        environments = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)]
        self.ranks = [spawn(*launch, env=env if nproc > 1 else None) for env in environments]
        self.log = log

    def is_running(self):
        return any(rank.poll() is None for rank in self.ranks)

    def kill(self):
        for rank in self.ranks:
            rank.kill()

    def exit_code(self):
        outputs = [rank.communicate(timeout=600)[0] for rank in self.ranks]
        with open(self.log, "a") as out:
            out.writelines(outputs)
        return next((rank.returncode for rank in self.ranks if rank.returncode), 0)


def child_pids(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def run_and_kill(job, folder, kill_after):
    """Kill -9 `kill_after` seconds after training began or resumed; a negative number counts from the launch."""
    size_before = _log_size(folder)
    while kill_after >= 0 and job.is_running() and _log_size(folder) == size_before:
        time.sleep(0.01)  # starting up
    deadline = time.monotonic() + abs(kill_after)
    while job.is_running() and time.monotonic() < deadline:
        time.sleep(0.001)
    if job.is_running():
        job.kill()
    return job.exit_code()


def _log_size(folder):
    return sum(file.stat().st_size for file in folder.glob("*/log.txt"))


def records(folder):
    [file] = folder.glob("*/metrics.jsonl")
    return [
        {k: v for k, v in json.loads(line).items() if k != "perf"}
        for line in file.read_text().splitlines()
    ]


def compare(
    kills,
    nproc,
    settings,
    folder,
    *,
    config=TINY,
    seed=0,
    start=FreshJob,
):
    """Train once without and once with `kills` kills; raises AssertionError where the two differ."""
    log = folder / "output.txt"
    log.touch()
    uninterrupted = start(config, nproc, [*settings, f"output_dir={folder / 'straight'}"], log)
    assert uninterrupted.exit_code() == 0, log.read_text()
    killed = [*settings, f"output_dir={folder / 'killed'}", "resume=auto"]
    dice = random.Random(seed)
    done = 0
    during_save = 0
    while done < kills:
        moment = -dice.uniform(0.1, 4.0) if dice.random() < 0.2 else dice.uniform(0.0, 0.9)
        code = run_and_kill(start(config, nproc, killed, log), folder / "killed", moment)
        if code != -signal.SIGKILL:
            assert code == 0, f"a relaunch failed with {code}:\n{log.read_text()[-4000:]}"
            break  # finished before the kill
        done += 1
        during_save += any((folder / "killed").glob("*/checkpoints/.tmp-*"))
    assert start(config, nproc, killed, log).exit_code() == 0, log.read_text()[-4000:]
    expected, found = records(folder / "straight"), records(folder / "killed")
    different = [pair for pair in zip(expected, found, strict=False) if pair[0] != pair[1]]
    assert expected == found, (
        f"{len(expected)} and {len(found)} records; the first that differ: {different[:1]}"
    )
    return {"kills": done, "during_save": during_save, "records": len(found), "bit_equal": True}


def settings_for(kills):
    """Settings of the tiny recipe with steps enough for so many kills."""
    return [*SETTINGS, f"train.max_steps={60 + 60 * kills}"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--config", type=Path, default=TINY)
    parser.add_argument("--seed", type=int, default=0)
    args, settings = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="kill-resume-"))
    settings = settings or (settings_for(args.kills) if args.config == TINY else [])
    print(
        json.dumps(
            compare(args.kills, args.nproc, settings, folder, config=args.config, seed=args.seed)
        )
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
