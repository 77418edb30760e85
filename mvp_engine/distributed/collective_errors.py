"""Errors under collectives: an error on one rank is raised on every rank of the group.

Without this, the ranks that did not fail would wait in their next collective until its time-out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from mvp_engine.errors import UserError


@contextlib.contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None) -> Iterator[None]:
    """A context: an exception inside it on one rank is raised on all ranks of `group`."""
    own: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, when the others know
        own = error
    message = own if own is None or isinstance(own, UserError) else f"{type(own).__name__}: {own}"
    errors = [message] * (group.size() if group else 1)
    if group:
        dist.all_gather_object(errors, message, group=group)
    for rank, failure in enumerate(errors):
        if isinstance(failure, UserError):
            raise failure
        if failure:
            raise RuntimeError(f"rank {rank}: {failure}") from own
