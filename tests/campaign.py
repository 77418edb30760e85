"""The fault campaign: trainings under kill -9, stop signals and bad disks, each compared with an undisturbed one.

    python tests/campaign.py [--kills 200] [--storms 30] [--disks 12] [--seed 0] [--minutes M] [--out FILE]

Each launch of a training gets one fault at a random moment and is then launched again with resume=auto. After
`FAULTS_PER_TRAINING` of them the training is left alone until it ends. After every launch the metrics of all steps so
far are compared with those of the undisturbed training, and at its end all weights and optimizer states, too. Counted
are launches that could not continue (lost), those that did nothing for `HUNG_SECONDS` after a fault (hung), launches or
trainings that differ in any bit (unequal), and processes that are alive `SURVIVOR_SECONDS` after the last rank.
Ranks are forked from a server that has imported everything, and watch each other and are stopped as under torchrun;
spawned workers of RL start from nothing. The kinds of faults take turns, and the table in FILE is written after every
launch, so that a campaign that is ended early, by `--minutes` or Ctrl-C, has figures of all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from campaign_compare import difference, last_step, records, size_of
from conftest import ROOT, TINY, spawn
from ranks import free_port

from mvp_engine.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR
from mvp_engine.files import atomic_path
from mvp_engine.process.watchdog import adopt_orphans, descendants
from mvp_engine.runs import list_runs

HUNG_SECONDS = 120.0
SURVIVOR_SECONDS = 15.0
FAULTS_PER_TRAINING = 5
EVAL_INTERVAL = 20
LOGS = ["log.interval=1", "log.backends=[file,jsonl]"]
TINY_SETTINGS = [
    *LOGS,
    f"eval.steps={EVAL_INTERVAL}",
    "checkpoint.interval=3",
    "data.micro_batch_size=4",
    "tiny.dropout=0.2",
    "tiny.noise=0.1",
    "tiny.step_seconds=0.004",
    "parallel.timeout=30",
]
# (ranks, settings): data parallel, sharded, and other kinds of loaders.
JOBS = [
    (1, ["tiny.loader=torch", "data.num_workers=2"]),
    (1, ["tiny.loader=iterable"]),
    (2, ["data.num_workers=2"]),
    (2, ["parallel.shard=2"]),
    (3, ["data.global_batch_size=9", "data.micro_batch_size=3"]),
    (4, ["parallel.shard=2", "data.micro_batch_size=2"]),
]
MOMENTS = ["start", "first steps", "save", "evaluation", "epoch end", "any"]
VLM_SETTINGS = [
    *LOGS,
    "eval.steps=20",
    "checkpoint.interval=3",
    "checkpoint.keep_n=2",
    "digits.count=100",
    "digits.drawings=1",
    "data.num_workers=2",
    "data.global_batch_size=4",
    "model.config.text_config.num_hidden_layers=2",
    "model.config.vision_config.depth=2",
    "model.config.vision_config.deepstack_visual_indexes=[0]",
]
RL_SETTINGS = [
    *LOGS,
    "eval.steps=null",
    "checkpoint.interval=2",
    "checkpoint.keep_n=2",
    "export_link=null",
    "workers.where=spawn",
    "reward.workers=2",
    "rl.prompts_per_step=4",
    "rl.num_generations=4",
    "made.rows=40",
]


@dataclass
class Recipe:
    """A training, and the jobs that run it: (ranks, settings)."""

    name: str
    config: Path
    settings: list[str]
    jobs: list[tuple[int, list[str]]]
    steps: int
    moments: list[str] = field(default_factory=lambda: MOMENTS)
    workers: Callable[[int], bool] | None = None  # which processes of a rank may be killed, too


def tiny(steps=120, jobs=JOBS):
    return Recipe("text", TINY, TINY_SETTINGS, jobs, steps)


def vision_language():
    config = ROOT / "recipes" / "digits_vlm" / "configs" / "train.yaml"
    jobs = [(1, []), (2, []), (4, ["parallel.shard=2"])]
    return Recipe("vision-language", config, VLM_SETTINGS, jobs, 40, workers=lambda _: True)


def reinforcement_learning(folder):
    """GRPO from a short SFT in `folder`, by a controller with two ranks that it spawns."""
    configs = ROOT / "recipes" / "reverse_rl" / "configs"
    base = Recipe(
        "",
        configs / "sft.yaml",
        [*LOGS, "made.rows=40", "optim.warmup=0", "resume=null"],
        [],
        16,
    )
    job = Job(
        base,
        1,
        [*base.settings, f"output_dir={folder}", "train.max_steps=16"],
        folder / "output.txt",
    )
    assert job.wait(600), (folder / "output.txt").read_text()
    settings = [
        *RL_SETTINGS,
        f"made.folder={folder}/reverse_data",
        f"model.path={folder}/reverse_base",
    ]
    jobs = [(1, ["groups.actor={ranks: 2, parallel: {shard: 2}}"])]
    moments = ["start", "first steps", "save", "any"]
    # A reward whose worker is killed is lost, which changes the step.
    return Recipe("RL", configs / "grpo.yaml", settings, jobs, 16, moments, workers=is_spawned)


def is_spawned(pid):
    with contextlib.suppress(OSError):
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


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
    survivors: int = 0  # processes
    slowest: float = 0.0  # seconds from a fault that ended the training to the end of all ranks
    notes: list[str] = field(default_factory=list)


class Job:
    """The ranks of one launch."""

    def __init__(
        self,
        recipe,
        nproc,
        words,
        log,
        module="mvp_engine.launch",
        **env,
    ):
        shared = {
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "TORCHELASTIC_RUN_ID": "campaign",
        }
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **env}
        command = ["-m", module] if not module.endswith(".py") else [module]
        command += ["--config", str(recipe.config), *words]
        self.ranks = []
        for rank in range(nproc):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.ranks.append(spawn(*command, env=shared | place))
        self.log = log
        self._readers = [
            threading.Thread(target=self._read, args=(rank,), daemon=True) for rank in self.ranks
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, rank):
        text = rank.stdout.read()
        with open(self.log, "a") as out:
            out.write(text)

    @property
    def is_running(self):
        return any(rank.poll() is None for rank in self.ranks)

    def wait(self, seconds, progress=lambda: None):
        """Wait for the end of all ranks; False if some run and `progress` is the same for so long. Those are killed.

        As torchrun does, it sends SIGTERM to the others when a rank has failed.
        """
        deadline = time.monotonic() + seconds
        reached = progress()
        stopped = False
        while self.is_running and time.monotonic() < deadline:
            time.sleep(0.02)
            if (now := progress()) != reached:
                reached = now
                deadline = time.monotonic() + seconds
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
    def codes(self):
        return [rank.returncode or 0 for rank in self.ranks]


class Campaign:
    def __init__(self, folder, seed, report):
        self.folder = folder
        self.dice = random.Random(seed)
        self.report = report  # called after every launch
        self.log = folder / "output.txt"
        self.log.touch()
        self.deadline = float("inf")
        self._straight: dict[str, Path] = {}
        adopt_orphans()  # survivors of a launch become children of this process

    def words(self, recipe, extra, runs):
        last = [
            f"train.max_steps={recipe.steps}",
            "train.epochs=null",
            f"output_dir={runs}",
            "resume=auto",
        ]
        return [*recipe.settings, *extra, *last]

    def straight(self, recipe, nproc, extra):
        """The runs folder of an undisturbed training."""
        key = f"{recipe.name} {nproc} {extra}"
        if key not in self._straight:
            runs = self.folder / f"straight-{len(self._straight)}"
            job = Job(recipe, nproc, self.words(recipe, extra, runs), self.log)
            assert job.wait(600), self.tail()
            assert set(job.codes) == {0}, self.tail()
            self._straight[key] = runs
        return self._straight[key]

    def tail(self):
        return self.log.read_text()[-3000:]

    # ---- Faults ---------------------------------------------------------------------------------------------------

    def disturb(self, fault):
        """One training under faults, one for each of its launches."""
        tally, recipe = fault.tally, fault.recipe
        nproc, extra = self.dice.choice(recipe.jobs)
        expected = self.straight(recipe, nproc, extra)
        runs = Path(tempfile.mkdtemp(prefix="run-", dir=fault.folder or self.folder))
        if not self._train(fault, nproc, extra, runs):
            return
        tally.ended += 1
        problem = difference(expected, runs, all_records=fault.all_records)
        if problem:
            tally.unequal += 1
            tally.notes.append(f"{recipe.name}, {nproc} ranks, {extra}: {problem} ({runs})")
        else:
            shutil.rmtree(runs)
        self.report(fault.name, tally)

    def _train(self, fault, nproc, extra, runs):
        """Launch a training until it ends; False if it cannot continue."""
        tally, recipe = fault.tally, fault.recipe
        words = self.words(recipe, extra, runs)
        faults = 0
        while True:
            tally.runs += 1
            job = Job(recipe, nproc, words, self.log, fault.module, **fault.env)
            enough = (
                faults == FAULTS_PER_TRAINING or fault.is_done or time.monotonic() > self.deadline
            )
            try:
                kind = None if enough else fault.inject(self, fault, job, runs)
                began = time.monotonic()
                if not job.wait(
                    HUNG_SECONDS if kind else 600.0, lambda: size_of(runs, "metrics.jsonl")
                ):
                    tally.hung += 1
                    tally.notes.append(f"hung after {kind}: {self.tail()}")
                seconds = time.monotonic() - began
                self._count_survivors(tally, kind)
            finally:
                job.wait(0.0)
            self._compare(tally, recipe, nproc, extra, runs)
            if kind:
                faults += 1
                tally.faults[kind] += 1
                if set(job.codes) != {0}:
                    tally.slowest = max(tally.slowest, seconds)
            allowed = fault.allowed if kind else (lambda _: False)
            is_lost = set(job.codes) != {0} and not all(allowed(code) for code in job.codes)
            if is_lost:
                tally.lost += 1
                tally.notes.append(f"exit codes {job.codes} after {kind}: {self.tail()}")
            self.report(fault.name, tally)
            if is_lost or set(job.codes) == {0}:
                return not is_lost

    def _count_survivors(self, tally, kind):
        """Count the processes that a launch has left, and kill them."""
        ours = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
        deadline = time.monotonic() + SURVIVOR_SECONDS
        while (left := descendants(os.getpid()) - ours) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            name = Path(f"/proc/{pid}/cmdline")
            with contextlib.suppress(OSError):
                tally.notes.append(f"process {pid} survived {kind}: {name.read_text()[:200]!r}")
                os.kill(pid, signal.SIGKILL)
                tally.survivors += 1

    def _compare(self, tally, recipe, nproc, extra, runs):
        """Compare the metrics that a launch left, whatever ended it, with those of the undisturbed training."""
        if not list_runs(runs):
            return  # it was ended before it had a run
        tally.compared += 1
        want = records(list_runs(self.straight(recipe, nproc, extra))[-1])
        for run in list_runs(runs):
            try:
                have = records(run, cut_short=True)
                wrong = [place for place, record in have.items() if want.get(place) != record]
            except (AssertionError, ValueError) as error:
                have, wrong = {}, [error]
            tally.steps += len(have)
            if wrong:
                tally.unequal += 1
                tally.notes.append(
                    f"{recipe.name}, {nproc} ranks, {extra}: {wrong[:3]} differ ({run.dir})"
                )

    def kill(self, fault, job, runs):
        """Kill -9 of one random rank, of a worker, or of all ranks."""
        moment = self.dice.choice(fault.recipe.moments)
        if not self.wait_for(moment, job, runs):
            return None
        victims = [rank.pid for rank in job.ranks]
        draw = self.dice.random()
        if draw < 0.25 and fault.recipe.workers:
            below = sorted(set().union(*map(descendants, victims)))
            victims = [pid for pid in below if fault.recipe.workers(pid)] or victims
        for pid in victims if draw > 0.85 else [self.dice.choice(victims)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return moment

    def storm(self, fault, job, runs):
        """Several SIGTERM within a second, to single ranks and to all."""
        moment = self.dice.choice(fault.recipe.moments)
        if not self.wait_for(moment, job, runs):
            return None
        for _ in range(self.dice.randint(1, 8)):
            for rank in job.ranks if self.dice.random() < 0.5 else [self.dice.choice(job.ranks)]:
                with contextlib.suppress(ProcessLookupError):
                    rank.send_signal(signal.SIGTERM)
            time.sleep(self.dice.uniform(0.0, 0.1))
        return moment

    def full_disk(self, fault, job, runs):
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

    def read_only(self, fault, job, runs):
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

    def wait_for(self, moment, job, runs):
        """Wait for a moment of the training; False if it ended before."""
        if moment == "start":
            time.sleep(self.dice.uniform(0.0, 1.5))
            return job.is_running
        seen = size_of(runs, "log.txt")
        while job.is_running and size_of(runs, "log.txt") == seen:
            time.sleep(0.002)
        before = last_step(runs)
        per_epoch = 6
        reached = {
            "first steps": lambda: last_step(runs) != before,
            "save": lambda: any(runs.glob("*/checkpoints/.tmp-step_*")),
            "evaluation": lambda: (
                last_step(runs) != before and last_step(runs) % EVAL_INTERVAL == 0
            ),
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
def small_disk(parent):
    """A disk of three MB; None where mounting is not allowed."""
    disk = parent / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(disk)], check=False
    ).returncode:
        yield None
        return
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@dataclass
class Fault:
    """A row of the table: what is done to which training, and what may come of it."""

    name: str
    inject: Callable[[Campaign, Fault, Job, Path], str | None]
    recipe: Recipe
    wanted: int
    allowed: Callable[[int], bool] = lambda _: True  # exit codes of a launch with a fault
    module: str = "mvp_engine.launch"
    env: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None
    all_records: bool = True
    tally: Tally = field(default_factory=Tally)

    @property
    def done(self):
        return sum(self.tally.faults.values())

    @property
    def is_done(self):
        return self.done >= self.wanted or self.tally.lost + self.tally.hung > 5


def run(
    folder,
    kills,
    storms,
    disks,
    seed=0,
    minutes=float("inf"),
    out=None,
    recipes=None,
    text=None,
):
    """`text`: the training that is stopped by signals and runs on bad disks."""
    text = text or tiny()
    began = time.monotonic()
    faults = []

    def report(name, tally):
        """Print a line, and write the table."""
        clock = f"{(time.monotonic() - began) / 60:.1f} min"
        all_faults = sum(fault.done for fault in faults)
        bad = f"lost {tally.lost}, hung {tally.hung}, unequal {tally.unequal}, survivors {tally.survivors}"
        wanted = sum(fault.wanted for fault in faults)
        print(
            f"[{clock}, {all_faults}/{wanted}] {name}: {tally.ended} trainings compared, {bad}",
            flush=True,
        )
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(out) as file:
                file.write_text(table(faults, began))

    campaign = Campaign(folder, seed, report)
    campaign.deadline = began + 60 * minutes
    with small_disk(folder) as disk:
        for recipe, share in (recipes or all_recipes)(folder):
            faults.append(
                Fault(f"kill -9, {recipe.name}", Campaign.kill, recipe, round(share * kills))
            )
        stopped = (EXIT_INTERRUPTED, -signal.SIGTERM, 0, 1)
        faults.append(
            Fault("SIGTERM storm", Campaign.storm, text, storms, lambda code: code in stopped)
        )
        slow = {
            "module": str(ROOT / "tests" / "slow_disk.py"),
            "env": {"MVP_FSYNC_SECONDS": "0.05"},
        }
        faults.append(Fault("kill -9 on a slow disk", Campaign.kill, text, disks, **slow))
        for name, inject, place in (
            ("full disk", Campaign.full_disk, disk),
            ("read-only disk", Campaign.read_only, folder),
        ):
            if disk is not None:
                fault = Fault(name, inject, text, disks, folder=place, all_records=False)
                fault.allowed = lambda code: code in (0, EXIT_USER_ERROR)
                faults.append(fault)
        faults[:] = [fault for fault in faults if fault.wanted]
        while time.monotonic() < campaign.deadline and (
            left := [fault for fault in faults if not fault.is_done]
        ):
            campaign.disturb(min(left, key=lambda fault: fault.done / fault.wanted))
    return {fault.name: fault.tally for fault in faults}


def all_recipes(folder):
    """The recipes whose ranks are killed, and their shares of the kills."""
    return [(tiny(), 0.5), (vision_language(), 0.35), (reinforcement_learning(folder), 0.15)]


def table(faults, began):
    head = [
        "fault",
        "runs",
        "faults",
        "runs compared",
        "steps compared",
        "trainings",
        "lost",
        "hung",
        "unequal",
    ]
    head += ["survivors", "slowest end", "moments"]
    lines = [head, ["---"] * len(head), *([fault.name, *cells(fault.tally)] for fault in faults)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n".join(note for fault in faults for note in fault.tally.notes)
    kills = [fault for fault in faults if fault.name.startswith("kill -9")]
    trainings = sum(fault.tally.ended for fault in kills)
    minutes = (time.monotonic() - began) / 60
    total = f"{sum(fault.done for fault in kills)} kills, {trainings} trainings of them compared, {minutes:.1f} minutes"
    return f"{text}\n\n{total}\n{notes}\n"


def cells(tally):
    moments = ", ".join(f"{kind} {number}" for kind, number in sorted(tally.faults.items()))
    numbers = [
        tally.runs,
        sum(tally.faults.values()),
        tally.compared,
        tally.steps,
        tally.ended,
        tally.lost,
        tally.hung,
    ]
    return [
        *map(str, [*numbers, tally.unequal, tally.survivors]),
        f"{tally.slowest:.1f} s",
        moments,
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--storms", type=int, default=30)
    parser.add_argument("--disks", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "fault_campaign.md")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    try:
        found = run(folder, args.kills, args.storms, args.disks, args.seed, args.minutes, args.out)
    except KeyboardInterrupt:
        return 130
    finally:
        print(args.out.read_text() if args.out.exists() else "no launch was compared", flush=True)
        print(f"The table is in {args.out}")
    failed = any(
        tally.lost or tally.hung or tally.unequal or tally.survivors for tally in found.values()
    )
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
