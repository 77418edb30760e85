"""Which row each worker is at, so that one that dies or hangs can be told by name, and nobody waits for ever."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import get_worker_info

from mvp_engine.errors import UserError

WORKERS, LETTERS = 256, 256


class Watch:
    """A board in shared memory. Workers write where they are, the process that waits for them reads it."""

    def __init__(self) -> None:
        self.board = torch.zeros((WORKERS, LETTERS), dtype=torch.uint8).share_memory_()

    def at(self, where: str) -> None:
        """This worker begins with the row at `where`."""
        if (info := get_worker_info()) is not None:
            text = where.encode()[:LETTERS].ljust(LETTERS, b"\0")
            self.board[info.id % WORKERS] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def places(self) -> list[str]:
        lines = [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in self.board]
        return [f"worker {i} at {line}" for i, line in enumerate(lines) if line]

    def _looked(self, iterator: Any, error: Exception) -> tuple[list[str], str | None]:
        try:
            return self.places(), _death(iterator, error)
        except (
            RuntimeError
        ) as later:  # torch's handler of signals tells of a death whenever it hears of it
            return self.places(), _death(iterator, later)

    def items(self, begin: Callable[[], Iterator[Any]], seconds: float) -> Iterator[Any]:
        """What a DataLoader with this time-out gives. A time-out counts only if no worker went on to another row."""
        self.board.zero_()
        iterator: Any = None
        before = None
        while True:
            try:
                iterator = _begun(begin) if iterator is None else iterator
                item = next(iterator)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                now, told = self._looked(iterator, error)
                at = "; ".join(now) or "none at a row yet"
                if told:
                    raise UserError(
                        f"data: {told} What was being read: {at}. Out of memory? Then set data.num_workers lower; or "
                        "look at the row with mvp data inspect --row"
                    ) from error
                if not str(error).startswith("DataLoader timed out"):
                    raise
                if now == before:
                    raise UserError(
                        f"data: nothing came from the workers for {2 * seconds:g} seconds, and they did not get any "
                        f"further: {at}. Take the row out, or raise stall_seconds"
                    ) from error
                before = now
                continue
            before = None
            yield item


def _death(iterator: Any, error: Exception) -> str | None:
    """Is a worker's death what this is about? torch says so, unless it was fetching what the worker had ready."""
    if re.match(r"DataLoader worker \(pid", str(error)):
        return str(error)
    workers = (
        {}
        if isinstance(error, RuntimeError)
        else {w.sentinel: w for w in getattr(iterator, "_workers", ())}
    )
    gone = [workers[end] for end in wait(workers, timeout=1.0)]
    return (
        f"DataLoader worker (pid {gone[0].pid}) is gone, exit code {gone[0].exitcode}."
        if gone
        else None
    )


def _begun(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Without torch's own handler for dying workers: it would raise in the middle of whatever the process is doing."""
    if threading.current_thread() is not threading.main_thread():
        return begin()
    handler = signal.getsignal(signal.SIGCHLD)
    iterator = begin()
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)
    return iterator
