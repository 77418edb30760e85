"""Meter: seconds per step, throughput, MFU, data wait, peak memory and ETA of a log interval; a run's slowest steps.

The phases of a step are timed on the host, and on a GPU by CUDA events, which are read when the GPU has passed them: a
step has no host sync for it. `slow_steps.jsonl` in the run folder has the slowest steps with what their time went to.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from traceback import format_tb
from typing import TYPE_CHECKING, Any

import torch
from torch import OutOfMemoryError

from mvp_engine.config.schema import Guard
from mvp_engine.distributed import World
from mvp_engine.distributed.world import waits
from mvp_engine.errors import UserError, count
from mvp_engine.files import atomic_write_text
from mvp_engine.log.metrics import device_peak
from mvp_engine.model_engine import StepStatus
from mvp_engine.process.signals import settle
from mvp_engine.runs import REASON, SLOW_STEPS

if TYPE_CHECKING:
    from mvp_engine.engine.engine import Engine
    from mvp_engine.engine.feed import Feed

DIVERGED = 3  # skipped steps in a row, from which on the weights are suspected
LOGGER = logging.getLogger("mvp_engine")


class LossTrend:
    """Since which step the loss has been non-finite or far above its average: a sign that the weights diverged."""

    MEMORY = 0.9  # of the moving average
    FAR = 3.0  # times the average

    def __init__(self) -> None:
        self.average: float | None = None
        self.rising_since: int | None = None

    def add(self, step: int, loss: float | None) -> None:
        if loss is None:
            return
        average = loss if self.average is None else self.average
        if math.isfinite(loss) and loss - average <= (self.FAR - 1) * abs(average):
            self.rising_since = None
            self.average = self.MEMORY * average + (1 - self.MEMORY) * loss
        elif self.rising_since is None:
            self.rising_since = step


class SkipGuard:
    """Every rank keeps the same counts, because every rank has the same step statuses."""

    def __init__(self, config: Guard, folder: Path, rank: int) -> None:
        self.config = config
        self.rank = rank
        self.file = folder / (
            "skipped_steps.jsonl" if rank == 0 else f"skipped_steps.rank{rank}.jsonl"
        )
        self.replay_command = f"mvp check {folder}"
        self.total = self.consecutive = self.overflows = 0
        self.trend = LossTrend()
        self._steps: deque[dict[str, Any]] = deque()  # steps without a status yet

    def watch(self, step: int, place: dict[str, Any]) -> None:
        self._steps.append({"step": step, "place": place})

    def take(self, statuses: list[StepStatus], engine: Engine) -> None:
        for status in statuses:
            entry = self._steps.popleft()
            self.trend.add(entry["step"], status.loss)
            if status.reason is None:
                self.consecutive = 0
            elif status.overflow:
                self.overflows += 1
                LOGGER.info("step %d skipped: %s", entry["step"], status.reason)
            else:
                self._skip(entry, status, engine)

    def _skip(self, entry: dict[str, Any], status: StepStatus, engine: Engine) -> None:
        self.total += 1
        self.consecutive += 1
        self._record(entry, status.reason, status.micro_batches, engine.feed)
        step = entry["step"]
        where = ""
        if status.micro_batches:
            numbers = ", ".join(str(number + 1) for number in status.micro_batches)
            where = f", in micro-batch {numbers} of rank {self.rank}"
        if self.rank == 0 or where:
            text = f"step {step} skipped on all ranks: {status.reason}{where}. Skipped so far: {self.total} "
            text += f"({self.consecutive} in a row). Find the row with: {self.replay_command}"
            LOGGER.warning(text)
        if self.consecutive < self.config.max_skips:
            return
        limit = f"guard.max_skips={self.config.max_skips}"
        raise UserError(
            f"stopped at step {step}: skipped {count(self.consecutive, 'step')} in a row and {self.total} in all"
            f" ({limit}); the last because {status.reason}. {self._advice(engine)}"
        )

    def _advice(self, engine: Engine) -> str:
        """What to do after a stop. Checkpoints of weights that may have diverged are renamed, so the command works."""
        rise = self.trend.rising_since
        text = f"Find the row and the parameter with: {self.replay_command}."
        overrides = []
        if rise is not None and self.consecutive >= DIVERGED:
            # The loss of a step shows what the update before it did to the weights.
            retired = engine.checkpoints.retire(after=rise - 2)
            text += (
                f" Since step {rise} the loss is non-finite or far above its average: unless all "
            )
            text += "of these rows are bad, the weights diverged, and optim.lr is too high. "
            text += f"Checkpoints renamed to diverged-*: {', '.join(retired) or 'none'}."
            overrides = [f"optim.lr={min(engine.config.optim.lr / 10, 1e-3):g}"]
        command = engine.run.resume_command(*overrides)
        return f"{text} Then continue, for example with: {command}"

    def report_end(self, step: int) -> None:
        """Warn at the end of a run that skipped steps."""
        if self.total and self.rank == 0:
            share = f"{self.total} of {step} steps ({self.total / step:.0%}) were skipped"
            share += ", also the last one" if self.consecutive else ""
            LOGGER.warning(
                f"{share}: their samples were not learnt. Find the rows: {self.replay_command}"
            )

    @contextmanager
    def recorded_errors(self, feed: Feed, meter: Meter) -> Iterator[None]:
        """A context for a step: it records one whose error a row may have caused, for `mvp check RUN`.

        No row causes an error outside of forward and backward, that of a collective whose other ranks have died, or
        that of too little memory.
        """
        try:
            yield
        except Exception as error:
            is_first = feed.world.failed_first(error)[0] == self.rank  # the others only follow
            no_row = meter.phase not in ("forward", "backward")
            no_row |= isinstance(error, OutOfMemoryError) or waits(format_tb(error.__traceback__))
            if is_first and not no_row:
                entry = self._steps[-1]
                self._record(entry, f"{type(error).__name__}: {error}", (), feed)
                text = f"step {entry['step']} failed. If a row caused it, this finds the row: "
                LOGGER.error(text + self.replay_command)
            raise

    def _record(
        self, entry: dict[str, Any], reason: str | None, bad: tuple[int, ...], feed: Feed
    ) -> None:
        record = {
            "step": entry["step"],
            "rank": self.rank,
            "ranks": feed.world.size,
            "reason": reason,
            **entry["place"],
            "nonfinite_micro_batches": list(bad),
            "sample_ids": feed.sample_ids(entry["place"]),
        }
        with open(self.file, "a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")

    def state_dict(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "consecutive": self.consecutive,
            "overflows": self.overflows,
            "trend": vars(self.trend),
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Steps after `step` will run again, so their records are removed."""
        if self.file.is_file():
            lines = self.file.read_text().splitlines(keepends=True)
            atomic_write_text(
                self.file, "".join(line for line in lines if json.loads(line)["step"] <= step)
            )
        self.total = state["total"]
        self.consecutive = state["consecutive"]
        self.overflows = state["overflows"]
        vars(self.trend).update(state.get("trend", {}))


MOST_EVALUATING = 0.1  # the share of the time above which a warning is logged
COUNTED_EVALUATIONS = 3  # by then; the first one compiles
SETTLING = 2  # intervals after which what was made stays, such as compiled graphs
# The phases of a step in their order; those in which ranks wait for each other, so that one can be slow in them because
# another one is late.
PHASES = ["data", "train_pre_step", "forward", "backward", "optimizer", "train_post_step"]
PHASES += ["other ranks", "logging", "evaluation", "checkpoint"]
WAITING = {"forward", "backward", "optimizer", "other ranks"}
WARM_UP_STEPS = 3  # of a launch: they compile, and start workers
FEWEST_STEPS = 10  # of a launch, before which none is called slow
COMPARED_STEPS = 50  # steps between two comparisons of all ranks
USUAL_STEPS = 200  # the last ones, whose median is the usual time of a phase
KEPT_STEPS = 10  # in the list of the slowest


@dataclass
class StepTimes:
    """One step of this rank: when each phase began, then the seconds of each."""

    step: int
    marks: list[tuple[str, float, Any]] = field(default_factory=list)  # phase, host time, event
    longest_wait: dict[str, Any] = field(default_factory=dict)  # as in `Feed`
    split: dict[str, float] = field(default_factory=dict)

    def read(self) -> bool:
        """Compute the split; False as long as the GPU has not passed the last event."""
        last = self.marks[-1][2]
        if last is not None and not last.query():
            return False
        for (phase, began, event), (_, ended, end) in pairwise(self.marks):
            seconds = ended - began if event is None else event.elapsed_time(end) / 1e3
            self.split[phase] = self.split.get(phase, 0.0) + seconds
        self.marks = []
        return True

    def compared(self, usual: dict[str, float]) -> dict[str, Any]:
        """The record of this step: `phase` is the one that took most more than usual."""
        compared = {phase: usual.get(phase, 0.0) for phase in self.split}
        phase = max(self.split, key=lambda name: self.split[name] - compared[name])
        record = {
            "step": self.step,
            "phase": phase,
            "seconds": round(sum(self.split.values()), 6),
            "usual_seconds": round(sum(compared.values()), 6),
            "split": {name: round(seconds, 6) for name, seconds in self.split.items()},
            "usual_split": {name: round(seconds, 6) for name, seconds in compared.items()},
        }
        waited = self.split.get("data", 0.0) - compared.get("data", 0.0)
        return record | (self.longest_wait if waited > REASON * _lost(record) else {})


class Meter:
    evaluation_keys = "eval.batches or eval.generation.max_samples"  # which make it shorter

    def __init__(self, world: World, folder: Path, step: int) -> None:
        """`step`: the last one before this launch; slow steps after it will run again, so their records are removed."""
        self.world = world
        self.steps = 0
        self.samples = 0
        self._started = time.perf_counter()
        self._paused = 0.0
        self._first = self._started
        self._evaluations: list[float] = []  # seconds of each
        self._reads = 0
        self.now = StepTimes(step)
        self._warm = step + WARM_UP_STEPS
        self._fewest = step + FEWEST_STEPS
        self._num_graphs = 0
        self._ended: list[StepTimes] = []  # steps that were not compared yet
        self._usual: dict[str, deque[float]] = {}  # seconds of a phase in the last steps with it
        self._file = folder / SLOW_STEPS
        self.slowest: list[dict[str, Any]] = []
        if world.is_main and self._file.is_file():
            records = [json.loads(line) for line in self._file.read_text().splitlines()]
            self.slowest = [record for record in records if record["step"] <= step]
            self._write()

    def step(self, samples: int, longest_wait: dict[str, Any] | None = None) -> None:
        self.steps += 1
        self.samples += samples
        self.now.longest_wait = longest_wait or {}

    # ---- The slowest steps ----------------------------------------------------------------------------------------

    def begin(self, step: int, phase: str = "data") -> None:
        """A step begins, or begins again in the next epoch. All ranks call it together."""
        if step != self.now.step:
            self._end_step(step)
            if step % COMPARED_STEPS == 0:
                self.keep_slowest()
        self.mark(phase)

    @property
    def phase(self) -> str:
        """The phase of the step that runs."""
        return self.now.marks[-1][0]

    def mark(self, phase: str) -> None:
        """The time from here on is that of `phase`; on a GPU, from where it has done what it was given so far."""
        event = None
        # A controller of models in other processes computes nothing on its GPU.
        if self.world.device.type == "cuda" and torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.now.marks.append((phase, time.perf_counter(), event))

    def _end_step(self, following: int) -> None:
        self.mark("")
        dynamo = sys.modules.get("torch._dynamo.utils")  # not imported: nothing is compiled
        graphs = dynamo.counters["stats"]["unique_graphs"] if dynamo else 0
        if self.now.step > self._warm and graphs == self._num_graphs:
            self._ended.append(self.now)
        self._num_graphs = graphs
        self.now = StepTimes(following)

    def end(self, step: int) -> None:
        """The last step was this one; another one may have begun, for which there was no data. All ranks call it."""
        if self.now.step == step:
            self._end_step(step)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.keep_slowest(at_end=True)

    def keep_slowest(self, at_end: bool = False) -> None:
        """Compare the steps since the last call on all ranks, and keep the slowest. All ranks call it together."""
        if self.now.step <= self._fewest and not at_end:
            return
        done = [one for one in self._ended if one.read()]
        self._ended = [one for one in self._ended if one.marks]
        for one in done:
            for phase, seconds in one.split.items():
                self._usual.setdefault(phase, deque(maxlen=USUAL_STEPS)).append(seconds)
        usual = {phase: statistics.median(seconds) for phase, seconds in self._usual.items()}
        records = {one.step: one.compared(usual) for one in done}
        least = _lost(self.slowest[-1]) if len(self.slowest) == KEPT_STEPS else 0.0
        own = {step: _lost(record) for step, record in records.items() if _lost(record) > least}
        if not any(self.world.any(bool(own))):
            return
        lost: dict[int, float] = {}
        for of_rank in self.world.all_gather(own):
            for step, seconds in of_rank.items():
                lost[step] = max(seconds, lost.get(step, 0.0))
        chosen = sorted(lost, key=lambda step: (-lost[step], step))[:KEPT_STEPS]
        of_ranks = self.world.all_gather([records.get(step) for step in chosen])
        for of_step in zip(*of_ranks, strict=True):
            found = _slow_rank(list(of_step))
            if found is not None:
                self.slowest.append(found)
        self.slowest = sorted(self.slowest, key=_lost, reverse=True)[:KEPT_STEPS]
        self._write()

    def _write(self) -> None:
        if self.world.is_main:
            lines = "".join(json.dumps(record) + "\n" for record in self.slowest)
            with contextlib.suppress(OSError):  # a full disk is reported by the log backends
                atomic_write_text(self._file, lines)

    # ---- A log interval -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """A context (evaluation, checkpoint) that does not count as training time."""
        self.mark(phase)
        started = time.perf_counter()
        yield
        self._paused += time.perf_counter() - started

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context of one evaluation. A warning says once if evaluations take much of the time."""
        started = time.perf_counter()
        with self.paused("evaluation"):
            yield
        now = time.perf_counter()
        self._evaluations.append(now - started)
        share = sum(self._evaluations) / (now - self._first)
        if len(self._evaluations) == COUNTED_EVALUATIONS and share > MOST_EVALUATING:
            LOGGER.warning(
                "evaluations take %.0f %% of the time, %.1f s each: raise eval.steps, or lower %s",
                100 * share,
                sum(self._evaluations) / len(self._evaluations),
                self.evaluation_keys,
            )

    def peak(self) -> int:
        """Peak memory so far in bytes, of the process that trains."""
        return peak_memory(self.world.device)

    def read(
        self, totals: dict[str, float], waited: float, remaining_steps: int | None
    ) -> dict[str, float]:
        """The figures since the last call; then a new interval starts."""
        now = time.perf_counter()
        seconds = max(1e-9, now - self._started - self._paused)
        per_step = seconds / max(1, self.steps)
        figures = {"step_s": per_step}
        rates = {"samples": float(self.samples), **totals}
        figures |= {f"{name}_per_s": amount / seconds for name, amount in rates.items()}
        if "flops" in totals and (peak := device_peak(self.world.device)):
            figures["mfu"] = totals["flops"] / seconds / (peak * self.world.size)
        figures |= {
            "data_wait": waited / seconds,
            "memory_gib": peak_memory(self.world.device) / 2**30,
        }
        if remaining_steps is not None:
            figures["eta_s"] = remaining_steps * per_step
        if self._reads < SETTLING:
            settle()
        self._reads += 1
        self.steps = 0
        self.samples = 0
        self._started = now
        self._paused = 0.0
        return figures


def _lost(record: dict[str, Any]) -> float:
    """Seconds more than usual."""
    return float(record["seconds"] - record["usual_seconds"])


def _slow_rank(of_ranks: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The record of the rank for which the others waited in a step, which they do in a later phase than its slow one.

    None if a rank waited for one that was late from the step before, whose own step took no longer than usual.
    """
    found = [{"rank": rank, **record} for rank, record in enumerate(of_ranks) if record is not None]
    most = max(_lost(record) for record in found)
    slow = [record for record in found if _lost(record) > most / 2]
    order = {phase: place for place, phase in enumerate(PHASES)}
    # An engine with phases of its own runs on one rank.
    first = min(slow, key=lambda record: (order.get(record["phase"], 0), -_lost(record)))
    return None if first["phase"] in WAITING and len(slow) < len(found) else first


def peak_memory(device: torch.device) -> int:
    """Peak memory so far in bytes: of the CUDA allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
