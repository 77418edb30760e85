"""A watchdog for DataLoader workers: an error names the row at which a worker died or hangs.

torch reports the death of a worker without what it was reading, and waits forever for one that hangs.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import get_worker_info

from mvp_engine.data.worker_memory import ROW_TIMER
from mvp_engine.errors import UserError

MAX_WORKERS = 256
MAX_POSITION_BYTES = 256
CHECK_SECONDS = 5.0


def check_seconds(stall_seconds: float) -> float:
    """The timeout of a DataLoader: only after it does torch look whether its workers are alive."""
    return min(CHECK_SECONDS, stall_seconds)


class WorkerWatchdog:
    """The current row of each worker, in shared memory: workers write it, the main process reads it."""

    def __init__(self) -> None:
        shape = (MAX_WORKERS, MAX_POSITION_BYTES)
        self.positions_WB = torch.zeros(shape, dtype=torch.uint8).share_memory_()

    def set_position(self, where: str) -> None:
        """Record that this process starts to read the row at `where`, and when; the main process reads the places."""
        ROW_TIMER.begin(where)
        info = get_worker_info()
        if info is None:
            return
        text = where.encode()[:MAX_POSITION_BYTES].ljust(MAX_POSITION_BYTES, b"\0")
        self.positions_WB[info.id % MAX_WORKERS] = torch.frombuffer(
            bytearray(text), dtype=torch.uint8
        )

    def positions(self) -> list[str]:
        found = []
        for worker, row in enumerate(self.positions_WB):
            text = bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
            if text:
                found.append(f"worker {worker} at {text}")
        return found

    def iterate(self, start: Callable[[], Iterator[Any]], seconds: float) -> Iterator[Any]:
        """The items of a DataLoader that has a timeout of `check_seconds`.

        Timeouts are an error only if no worker moved to another row for twice as many seconds as given.
        """
        self.positions_WB.zero_()
        iterator: Any = None
        last_positions = None
        moved = 0.0
        while True:
            try:
                if iterator is None:
                    iterator = start_without_sigchld_handler(start)
                    end_all_after_the_first(iterator)
                item = next(iterator)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                positions, death = self._inspect(iterator, error)
                where = "; ".join(positions) or "none at a row yet"
                if death:
                    raise UserError(
                        f"data: {death} What was being read: {where}. Out of memory? Then set data.num_workers lower; "
                        "or look at the row with mvp data inspect --row"
                    ) from error
                if not str(error).startswith("DataLoader timed out"):
                    raise
                if positions != last_positions:
                    last_positions, moved = positions, time.monotonic()
                elif time.monotonic() - moved >= 2 * seconds:
                    raise UserError(
                        f"data: nothing came from the workers for {2 * seconds:g} seconds, and they did not get any "
                        f"further: {where}. Take the row out, or raise mllm.limits.timeout"
                    ) from error
                continue
            last_positions = None
            yield item

    def _inspect(self, iterator: Any, error: Exception) -> tuple[list[str], str | None]:
        """Where the workers are, and the death of a worker if that is what the error is about."""
        try:
            return self.positions(), _worker_death(iterator, error)
        except RuntimeError as later:
            # torch's signal handler raises in whatever runs when it hears of a death, here too.
            return self.positions(), _worker_death(iterator, later)


def _worker_death(iterator: Any, error: Exception) -> str | None:
    """A description of the dead worker; None if the error has another cause.

    torch's own error describes it, except when the main process was fetching what the worker had ready: that is an
    OSError or EOFError.
    """
    if re.match(r"DataLoader worker \(pid", str(error)):
        return f"{str(error).rstrip(' .')}."
    if isinstance(error, RuntimeError):
        return None
    workers = {worker.sentinel: worker for worker in getattr(iterator, "_workers", ())}
    dead = wait(workers, timeout=1.0)
    if not dead:
        return None
    worker = workers[dead[0]]
    return f"DataLoader worker (pid {worker.pid}) is gone, exit code {worker.exitcode}."


def end_all_after_the_first(iterator: Any) -> None:
    """Start a thread that ends all workers some time after one of them has died, if torch has not reported it.

    A worker that is killed while it writes leaves half of a message. The reader waits for the rest
    until no process has the pipe open for writing: neither the other workers nor this one.
    """
    workers = {worker.sentinel: worker for worker in getattr(iterator, "_workers", ())}
    if not workers:
        return
    results = iterator._worker_result_queue

    def watch() -> None:
        first = workers[wait(workers)[0]]
        first.join()  # its exit code may follow a moment later
        if first.exitcode == 0:  # the end of an epoch
            return
        time.sleep(2 * CHECK_SECONDS)
        for worker in workers.values():
            worker.kill()
        results._writer.close()

    threading.Thread(target=watch, name="mvp-workers", daemon=True).start()


def start_without_sigchld_handler(start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Start the workers, but keep the process's own SIGCHLD handler.

    torch installs one that raises in the middle of whatever the main process is doing.
    """
    if threading.current_thread() is not threading.main_thread():
        return start()
    handler = signal.getsignal(signal.SIGCHLD)
    iterator = start()
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)
    return iterator
