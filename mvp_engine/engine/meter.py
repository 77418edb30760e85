"""Meter: seconds per step, throughput, MFU, data wait, peak memory and ETA of a log interval."""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
import time
from collections.abc import Iterator

import torch

from mvp_engine.distributed import World
from mvp_engine.log.peaks import device_peak
from mvp_engine.process.garbage import settle

LOGGER = logging.getLogger("mvp_engine")
MOST_EVALUATING = 0.1  # the share of the time above which a warning is logged
COUNTED_EVALUATIONS = 3  # by then; the first one compiles
SETTLING = 2  # intervals after which what was made stays, such as compiled graphs


class Meter:
    def __init__(self, world: World) -> None:
        self.world = world
        self.steps = 0
        self.samples = 0
        self._started = time.perf_counter()
        self._paused = 0.0
        self._first = self._started
        self._evaluations: list[float] = []  # seconds of each
        self._reads = 0

    def step(self, samples: int) -> None:
        self.steps += 1
        self.samples += samples

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context (evaluation, saving) that does not count as training time."""
        started = time.perf_counter()
        yield
        self._paused += time.perf_counter() - started

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context of one evaluation. A warning says once if evaluations take much of the time."""
        started = time.perf_counter()
        with self.paused():
            yield
        now = time.perf_counter()
        self._evaluations.append(now - started)
        share = sum(self._evaluations) / (now - self._first)
        if len(self._evaluations) == COUNTED_EVALUATIONS and share > MOST_EVALUATING:
            LOGGER.warning(
                "evaluations take %.0f %% of the time, %.1f s each: raise loop.eval_interval, or lower "
                "loop.eval_batches or eval_generation.max_samples (of RL: evaluation.samples)",
                100 * share,
                sum(self._evaluations) / len(self._evaluations),
            )

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


def peak_memory(device: torch.device) -> int:
    """Peak memory so far in bytes: of the CUDA allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
