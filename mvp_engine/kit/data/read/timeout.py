"""Timeouts for decoders, which may hang in C code."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from mvp_engine.kit.data.read.row_types import BadRow

T = TypeVar("T")
TaskQueue = SimpleQueue[tuple[Callable[[], Any], Future[Any]]]

_idle_threads: list[TaskQueue] = []  # the queues of threads that wait for work
os.register_at_fork(after_in_child=_idle_threads.clear)  # a fork copies no threads


def run_with_timeout(seconds: float, work: Callable[[], T], what: str) -> T:
    """The result of `work`, or BadRow("timeout").

    `work` runs in a daemon thread, which is abandoned when the time is over: no signal interrupts a
    decoder that hangs in C, and a decoder process per worker would copy every image once more.
    """
    future = run_in_thread(work)
    wait([future], seconds)
    if not future.done():
        raise BadRow("timeout", f"{what} took more than {seconds:g} seconds")
    return future.result()


def run_in_thread(work: Callable[[], T]) -> Future[T]:
    """The future result of `work`, which starts at once in a daemon thread."""
    future: Future[T] = Future()
    queue = _idle_threads.pop() if _idle_threads else _start_thread()
    queue.put((work, future))
    return future


def _start_thread() -> TaskQueue:
    queue: TaskQueue = SimpleQueue()

    def serve() -> None:
        while True:
            work, future = queue.get()
            result = None
            error = None
            try:
                result = work()
            except BaseException as raised:  # noqa: BLE001 - raised again by future.result()
                error = raised
            # Idle before the result is set: the waiting caller may need this thread at once.
            _idle_threads.append(queue)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            # Otherwise the last image would stay in memory until the next one.
            del work, future, result, error

    threading.Thread(target=serve, daemon=True, name="media").start()
    return queue
