"""What a training loop can use of a loader, as protocols. Any iterable of micro-batches is a loader without them."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, TypeVar

from mvp_engine.data.step_plan import StepPlan

T = TypeVar("T")


def implements(loader: object, protocol: type[T]) -> TypeGuard[T]:
    """Does a loader have all attributes of a protocol?

    `isinstance` would not see, from Python 3.12 on, what a wrapper passes on by `__getattr__`.
    """
    names = {*vars(protocol), *protocol.__annotations__}
    return all(hasattr(loader, name) for name in names if not name.startswith("_"))


class StatefulLoader(Protocol):
    """Keeps a cursor of its own. The loop replays the epoch of any other loader when it resumes."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class MovesBetweenRanks(Protocol):
    """A stateful loader whose positions on some ranks can be continued on another number of them."""

    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        """`states`: of all ranks that saved; ranks that share their data have the same one."""


class KnowsLength(Protocol):
    @property
    def steps_per_epoch(self) -> int: ...


class KnowsEpochs(Protocol):
    epochs_differ: bool  # in length; of a loader with a global cursor

    def steps_in_epoch(self, epoch: int) -> int: ...


class LimitsBatches(Protocol):
    def limit_batches(self, micro_batches: int) -> None:
        """Read only the first so many micro-batches of an epoch, counted over all ranks."""


class KnowsSamples(Protocol):
    def sample_ids(self, first: int, last: int) -> list[Any]:
        """The samples of this rank's micro-batches `first` to `last` (exclusive), counted from the cursor."""


class KnowsPlan(Protocol):
    accumulation: int  # micro-batches of a rank in one step

    def step_plan(self, step: int) -> StepPlan | None:
        """What all ranks hold in a step, counted from the cursor, if the loader knows."""
