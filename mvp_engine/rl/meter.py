"""RLMeter: a Meter that also says what the steps of an RL training spend their time on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from mvp_engine.distributed import World
from mvp_engine.engine.meter import Meter


class RLMeter(Meter):
    def __init__(self, world: World, folder: Path, step: int) -> None:
        super().__init__(world, folder, step)
        self.seconds: dict[str, float] = {}
        # Bytes of the rank that has most: the controller itself holds no model.
        self.peak_memory = 0

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """A context whose time is logged as `<name>_s` per step."""
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def read(
        self, totals: dict[str, float], waited: float, remaining_steps: int | None
    ) -> dict[str, float]:
        steps = max(1, self.steps)
        spent = {f"{name}_s": seconds / steps for name, seconds in self.seconds.items()}
        self.seconds = {}
        if self.peak_memory:
            spent["memory_gib"] = self.peak_memory / 2**30
        return {**super().read(totals, waited, remaining_steps), **spent}
