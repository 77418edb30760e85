"""What a group raises when one of its ranks failed."""

from __future__ import annotations

from mvp_engine.checkpoint import CorruptCheckpoint
from mvp_engine.errors import UserError


class WorkerError(RuntimeError):
    """An exception in a rank, with its traceback there."""

    def __init__(self, group: str, rank: int, method: str, reason: str, remote: str) -> None:
        super().__init__(
            f"rank {rank} of group {group}, in {method}: {reason}\n\n{remote}".rstrip()
        )
        self.group = group
        self.rank = rank
        self.method = method
        self.reason = reason
        self.remote = remote  # the traceback of the rank

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.group, self.rank, self.method, self.reason, self.remote)


class WorkerUserError(WorkerError, UserError):
    """A user error in a rank: its text names what is wrong and the fix, so it has no traceback."""


class WorkerCorruptCheckpoint(WorkerUserError, CorruptCheckpoint):
    """A rank found a corrupt checkpoint file; a training then loads the checkpoint before it."""


class WorkerDied(RuntimeError):
    """A process of a group died. All processes of the group have been ended."""

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank
