"""StepContext: what the step hooks are given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mvp_engine.data.step_plan import StepPlan
from mvp_engine.log.metrics import MetricStore
from mvp_engine.model_engine.base import StepNumbers


@dataclass
class StepContext:
    """One step on its way through the hooks. Hooks may change `micro_batches` and set `stop`."""

    step: int  # counted from 1; 0 in an evaluation before any training
    epoch: int  # counted from 0
    split: str  # "train", or the split that is evaluated
    metrics: MetricStore
    micro_batches: list[Any] = field(default_factory=list)
    # What the loader planned for all ranks. A hook that changes the number of micro-batches, or their media, sets it to
    # None on all ranks; the ranks then communicate instead.
    plan: StepPlan | None = None
    numbers: StepNumbers | None = None  # set after the step
    is_dummy: bool = False  # a dummy forward that this rank runs for others: nothing of it counts
    stop: bool = False  # a hook sets it to end the training after this step (on any rank)

    def log(self, name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add to a weighted mean: `value` is a sum over `weight` items. Averaged over the interval and all ranks."""
        if not self.is_dummy:
            self.metrics.add(name, value, weight)

    def count(self, name: str, amount: Tensor | float) -> None:
        """Add to a total, such as tokens; it is logged as a rate per second too."""
        if not self.is_dummy:
            self.metrics.count(name, amount)
