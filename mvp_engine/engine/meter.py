"""Meter: seconds per step, throughput, MFU, data wait, peak memory and ETA of a log interval; a run's slowest steps.

The phases of a step are timed on the host, and on a GPU by CUDA events, which are read when the GPU has passed them: a
step has no host sync for it. `slow_steps.jsonl` in the run folder has the slowest steps with what their time went to.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from mvp_engine.distributed import World
from mvp_engine.files import atomic_write_text
from mvp_engine.log.peaks import device_peak
from mvp_engine.process.garbage import settle
from mvp_engine.runs import REASON, SLOW_STEPS

LOGGER = logging.getLogger("mvp_engine")
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
    evaluation_keys = "loop.eval_batches or eval_generation.max_samples"  # which make it shorter

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
                "evaluations take %.0f %% of the time, %.1f s each: raise loop.eval_interval, or lower %s",
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
