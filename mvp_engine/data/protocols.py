"""What a training loop can use of a loader, as protocols. Any iterable of micro-batches is a loader without them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from mvp_engine.data.step_plan import StepPlan


@runtime_checkable
class StatefulLoader(Protocol):
    """Keeps a cursor of its own. The loop replays the epoch of any other loader when it resumes."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class GlobalCursor(Protocol):
    """Its state is the same on all ranks, and right on any number of them."""

    global_cursor: bool


@runtime_checkable
class KnowsLength(Protocol):
    @property
    def steps_per_epoch(self) -> int: ...


@runtime_checkable
class KnowsSamples(Protocol):
    def sample_ids(self, first: int, last: int) -> list[Any]:
        """The samples of this rank's micro-batches `first` to `last` (exclusive), counted from the cursor."""


@runtime_checkable
class KnowsPlan(Protocol):
    def step_plan(self, step: int) -> StepPlan:
        """What all ranks hold in a step, counted from the cursor."""


@runtime_checkable
class HasEpochs(Protocol):
    def set_epoch(self, epoch: int) -> None: ...
