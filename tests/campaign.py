"""The fault campaign: trainings under kill -9, stop signals and bad disks, each compared with an undisturbed one.

    python tests/campaign.py [--kills 200] [--storms 30] [--disks 12] [--seed 0] [--out FILE]

Each launch of a training gets one fault at a random moment and is then launched again with resume=auto, until the
training ends. After every launch the metrics of all steps so far are compared with those of the undisturbed training,
and at its end all weights and optimizer states, too. Counted are launches that could not continue (lost), processes
that were still alive `HUNG_SECONDS` after a fault (hung), and launches or trainings that differ in any bit (unequal).
Ranks are forked from a server that has imported everything, and watch each other and are stopped as under torchrun.
`--minutes` ends the campaign earlier, each kind of fault after its share of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaign_compare import difference, last_step, records, size_of
from conftest import ROOT, TINY, spawn
from ranks import free_port

from mvp_engine.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR
from mvp_engine.runs import list_runs

HUNG_SECONDS = 60.0
EVAL_INTERVAL = 20
SETTINGS = [
    "log.interval=1",
    "log.backends=[file,jsonl]",
    f"loop.eval_interval={EVAL_INTERVAL}",
    "checkpoint.interval=3",
    "data.micro_batch_size=4",
    "tiny.dropout=0.2",
    "tiny.noise=0.1",
    "tiny.step_seconds=0.004",
    "parallel.timeout=30",
]
# (ranks, settings): data parallel, sharded, and other kinds of loaders.
JOBS = [
    (1, ["tiny.loader=torch"]),
    (1, ["tiny.loader=iterable"]),
    (2, []),
    (2, ["parallel.shard=2"]),
    (3, ["data.global_batch_size=9", "data.micro_batch_size=3"]),
]
MOMENTS = ["start", "first steps", "save", "evaluation", "epoch end", "any"]


@dataclass
class Tally:
    """A row of the table."""

    runs: int = 0  # launches
    compared: int = 0  # launches whose metrics were compared
    steps: int = 0  # that were compared, each once for every launch that has it in its log
    ended: int = 0  # trainings, whose weights were compared
    faults: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    hung: int = 0
    unequal: int = 0
    slowest: float = 0.0  # seconds from a fault that ended the training to the end of all ranks
    notes: list[str] = field(default_factory=list)


class Job:
    """The ranks of one launch."""

    def __init__(self, nproc: int, words: list[str], log: Path, module: str = "mvp_engine.launch", **env: str) -> None:
        shared = {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), "TORCHELASTIC_RUN_ID": "campaign"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **env}
        command = ["-m", module] if not module.endswith(".py") else [module]
        command += ["--config", str(TINY), *words]
        self.ranks = []
        for rank in range(nproc):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.ranks.append(spawn(*command, env=shared | place))
        self.log = log
        self._readers = [threading.Thread(target=self._read, args=(rank,), daemon=True) for rank in self.ranks]
        for reader in self._readers:
            reader.start()

    def _read(self, rank: Any) -> None:
        text = rank.stdout.read()
        with open(self.log, "a") as out:
            out.write(text)

    @property
    def is_running(self) -> bool:
        return any(rank.poll() is None for rank in self.ranks)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of all ranks; False if some still run after that, which are then killed.

        As torchrun does, it sends SIGTERM to the others when a rank has failed.
        """
        deadline = time.monotonic() + seconds
        stopped = False
        while self.is_running and time.monotonic() < deadline:
            time.sleep(0.01)
            if not stopped and any(rank.poll() for rank in self.ranks):
                stopped = True
                time.sleep(0.1)
                for rank in self.ranks:
                    rank.send_signal(signal.SIGTERM)
        ended = not self.is_running
        for rank in self.ranks:
            rank.kill()
        for reader in self._readers:
            reader.join(10)
        return ended

    @property
    def codes(self) -> list[int]:
        return [rank.returncode or 0 for rank in self.ranks]


class Campaign:
    def __init__(self, folder: Path, seed: int, steps: int) -> None:
        self.folder = folder
        self.dice = random.Random(seed)
        self.steps = steps
        self.log = folder / "output.txt"
        self.log.touch()
        self.deadline = float("inf")  # of the kind of fault that is tried
        self._straight: dict[str, Path] = {}

    def words(self, extra: list[str], runs: Path) -> list[str]:
        return [*SETTINGS, *extra, f"loop.total_steps={self.steps}", f"project.dir={runs}", "resume=auto"]

    def straight(self, nproc: int, extra: list[str]) -> Path:
        """The runs folder of an undisturbed training."""
        key = f"{nproc} {extra}"
        if key not in self._straight:
            runs = self.folder / f"straight-{len(self._straight)}"
            job = Job(nproc, self.words(extra, runs), self.log)
            assert job.wait(600), self.tail()
            assert set(job.codes) == {0}, self.tail()
            self._straight[key] = runs
        return self._straight[key]

    def tail(self) -> str:
        return self.log.read_text()[-3000:]

    # ---- Faults ---------------------------------------------------------------------------------------------------

    def disturb(self, tally: Tally, fault: Callable[[Job, Path], str | None], wanted: int, **options: Any) -> None:
        """Train under faults, one for each launch, until `wanted` of them have happened."""
        while not self._has_enough(tally, wanted) and not tally.lost + tally.hung > 20:
            nproc, extra = self.dice.choice(options.get("jobs", JOBS))
            expected = self.straight(nproc, extra)
            runs = Path(tempfile.mkdtemp(prefix="run-", dir=options.get("folder", self.folder)))
            self._train(tally, fault, wanted, nproc, extra, runs, options)
            tally.ended += 1
            problem = difference(expected, runs, all_records=options.get("all_records", True))
            if problem:
                tally.unequal += 1
                tally.notes.append(f"{nproc} ranks, {extra}: {problem} ({runs})")
            else:
                shutil.rmtree(runs)

    def _train(
        self, tally: Tally, fault: Any, wanted: int, nproc: int, extra: list[str], runs: Path, options: dict[str, Any]
    ) -> None:
        words = self.words(extra, runs)
        for _ in range(1000):
            tally.runs += 1
            job = Job(nproc, words, self.log, options.get("module", "mvp_engine.launch"), **options.get("env", {}))
            kind = None if self._has_enough(tally, wanted) else fault(job, runs)
            began = time.monotonic()
            if not job.wait(HUNG_SECONDS if kind else 600.0):
                tally.hung += 1
                tally.notes.append(f"hung after {kind}: {self.tail()}")
            self._compare(tally, nproc, extra, runs)
            if kind:
                tally.faults[kind] += 1
                if set(job.codes) != {0}:
                    tally.slowest = max(tally.slowest, time.monotonic() - began)
            if set(job.codes) == {0}:
                return
            allowed = options.get("allowed", lambda _: True) if kind else (lambda _: False)
            if not all(allowed(code) for code in job.codes):
                tally.lost += 1
                tally.notes.append(f"exit codes {job.codes} after {kind}: {self.tail()}")
                return

    def _has_enough(self, tally: Tally, wanted: int) -> bool:
        return sum(tally.faults.values()) >= wanted or time.monotonic() > self.deadline

    def _compare(self, tally: Tally, nproc: int, extra: list[str], runs: Path) -> None:
        """Compare the metrics that a launch left, whatever ended it, with those of the undisturbed training."""
        if not list_runs(runs):
            return  # it was ended before it had a run
        tally.compared += 1
        want = records(list_runs(self.straight(nproc, extra))[-1])
        for run in list_runs(runs):
            try:
                have = records(run, cut_short=True)
                wrong = [place for place, record in have.items() if want.get(place) != record]
            except (AssertionError, ValueError) as error:
                have, wrong = {}, [error]
            tally.steps += len(have)
            if wrong:
                tally.unequal += 1
                tally.notes.append(f"{nproc} ranks, {extra}: {wrong[:3]} differ ({run.dir})")

    def kill_rank(self, job: Job, runs: Path) -> str | None:
        """Kill -9 of one random rank, or of all of them."""
        moment = self.dice.choice(MOMENTS)
        if not self.wait_for(moment, job, runs):
            return None
        everyone = self.dice.random() < 0.15
        for rank in job.ranks if everyone else [self.dice.choice(job.ranks)]:
            rank.kill()
        return moment

    def storm(self, job: Job, runs: Path) -> str | None:
        """Several SIGTERM within a second, to single ranks and to all."""
        moment = self.dice.choice(MOMENTS)
        if not self.wait_for(moment, job, runs):
            return None
        for _ in range(self.dice.randint(1, 8)):
            for rank in job.ranks if self.dice.random() < 0.5 else [self.dice.choice(job.ranks)]:
                with contextlib.suppress(ProcessLookupError):
                    rank.send_signal(signal.SIGTERM)
            time.sleep(self.dice.uniform(0.0, 0.1))
        return moment

    def full_disk(self, job: Job, runs: Path) -> str | None:
        """Fill the disk for a while, at a random moment."""
        if not self.wait_for(self.dice.choice(["first steps", "save", "any"]), job, runs):
            return None
        filler = runs.parent / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as out:
            while True:
                out.write(bytes(4096))
        time.sleep(self.dice.uniform(0.1, 1.0))
        filler.unlink()
        return "full"

    def read_only(self, job: Job, runs: Path) -> str | None:
        """Make the folder of the checkpoints read-only for a while."""
        if not self.wait_for(self.dice.choice(["first steps", "save", "any"]), job, runs):
            return None
        folder = str(list_runs(runs)[-1].checkpoints)
        if subprocess.run(["mount", "--bind", "-o", "ro", folder, folder], check=False).returncode:
            return None
        time.sleep(self.dice.uniform(0.1, 1.0))
        subprocess.run(["umount", "-l", folder], check=True)
        return "read-only"

    # ---- Moments --------------------------------------------------------------------------------------------------

    def wait_for(self, moment: str, job: Job, runs: Path) -> bool:
        """Wait for a moment of the training; False if it ended before."""
        if moment == "start":
            time.sleep(self.dice.uniform(0.0, 1.5))
            return job.is_running
        seen = size_of(runs, "log.txt")
        while job.is_running and size_of(runs, "log.txt") == seen:
            time.sleep(0.002)
        before = last_step(runs)
        per_epoch = 6
        reached: dict[str, Callable[[], bool]] = {
            "first steps": lambda: last_step(runs) != before,
            "save": lambda: any(runs.glob("*/checkpoints/.tmp-step_*")),
            "evaluation": lambda: last_step(runs) != before and last_step(runs) % EVAL_INTERVAL == 0,
            "epoch end": lambda: last_step(runs) != before and last_step(runs) % per_epoch == 0,
        }
        if moment in reached:
            deadline = time.monotonic() + 20
            while job.is_running and not reached[moment]() and time.monotonic() < deadline:
                time.sleep(0.0005)
            time.sleep(self.dice.choice([0.0, 0.002, 0.01]))
        else:
            time.sleep(self.dice.uniform(0.0, 0.8))
        return job.is_running


# ---- Kinds of faults ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(parent: Path) -> Iterator[Path | None]:
    """A disk of three MB; None where mounting is not allowed."""
    disk = parent / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(disk)], check=False).returncode:
        yield None
        return
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def run(
    folder: Path,
    kills: int,
    storms: int,
    disks: int,
    seed: int = 0,
    steps: int = 120,
    minutes: float = float("inf"),
) -> dict[str, Tally]:
    table: dict[str, Tally] = {}
    campaign = Campaign(folder, seed, steps)
    total = kills + storms + 3 * disks

    def add(name: str, fault: Any, wanted: int, **options: Any) -> None:
        if wanted:
            table[name] = Tally()
            campaign.deadline = time.monotonic() + 60 * minutes * wanted / total
            campaign.disturb(table[name], fault, wanted, **options)
            print(row(name, table[name]), flush=True)
            print("\n".join(table[name].notes), flush=True)

    add("kill -9 of a random rank", campaign.kill_rank, kills)
    stopped = (EXIT_INTERRUPTED, -signal.SIGTERM, 0, 1)
    add("SIGTERM storm", campaign.storm, storms, allowed=lambda code: code in stopped)
    slow = {"module": str(ROOT / "tests" / "slow_disk.py"), "env": {"MVP_FSYNC_SECONDS": "0.05"}}
    add("kill -9 on a slow disk", campaign.kill_rank, disks, **slow)
    with small_disk(folder) as disk:
        if disk is not None and disks:
            limits = {"allowed": lambda code: code in (0, EXIT_USER_ERROR), "all_records": False, "folder": disk}
            add("full disk", campaign.full_disk, disks, **limits)
            add("read-only disk", campaign.read_only, disks, **{**limits, "folder": folder})
    return table


def row(name: str, tally: Tally) -> str:
    faults = sum(tally.faults.values())
    moments = ", ".join(f"{kind} {number}" for kind, number in sorted(tally.faults.items()))
    numbers = [tally.runs, faults, tally.compared, tally.steps, tally.ended, tally.lost, tally.hung, tally.unequal]
    numbers += [f"{tally.slowest:.1f} s"]
    return " | ".join(["", name, *map(str, numbers), moments, ""]).strip()


HEADER = "| fault | runs | faults | runs compared | steps compared | trainings | lost | hung | unequal | slowest end "
HEADER += "| moments |\n| --- |" + " --- |" * 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--storms", type=int, default=30)
    parser.add_argument("--disks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    table = run(folder, args.kills, args.storms, args.disks, args.seed, args.steps, args.minutes)
    text = "\n".join([HEADER, *(row(name, tally) for name, tally in table.items())])
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    failed = any(tally.lost or tally.hung or tally.unequal for tally in table.values())
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
