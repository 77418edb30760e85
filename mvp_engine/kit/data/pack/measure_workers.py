"""Worker processes that measure rows: each dies with the process that started it, and inherits none of its locks."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from mvp_engine.process.watchdog import end_with_this_process

Chunk = list[int]


def map_chunks(
    measure: Callable[[Chunk], Any], chunks: list[Chunk], workers: int
) -> Generator[tuple[Chunk, Any], None, None]:
    """Each chunk with its result, as they are finished; in this process where workers are not worth their start."""
    if not workers or len(chunks) < 2:
        for chunk in chunks:
            yield chunk, measure(chunk)
        return
    pool = MeasureWorkers(measure, chunks, workers)
    try:
        yield from pool.results()
    finally:
        pool.kill()


class MeasureWorkers:
    """Processes that are forked here and now; their results may be taken by another thread."""

    def __init__(self, measure: Callable[[Any], Any], chunks: Sequence[Any], workers: int) -> None:
        self._left = iter(chunks)
        self._busy: dict[Any, Any] = {}
        self._processes: list[Any] = []
        context = multiprocessing.get_context("fork")
        try:
            for _ in range(min(workers, len(chunks))):
                ours, theirs = context.Pipe()
                arguments = (measure, theirs, end_with_this_process())
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                self._processes.append(process)
                theirs.close()
                _give(ours, next(self._left, None), self._busy)
        except BaseException:
            self.kill()
            raise

    def results(self) -> Iterator[tuple[Any, Any]]:
        """Each chunk with its result, as they are finished."""
        while self._busy:
            for connection in wait(list(self._busy)):
                chunk = self._busy.pop(connection)
                found = _receive(connection, chunk)
                _give(connection, next(self._left, None), self._busy)
                yield chunk, found

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


class WorkerDied(Exception):
    """A worker process ended without a result; `rows` are those that it was measuring."""

    def __init__(self, rows: Chunk) -> None:
        super().__init__(rows)
        self.rows = rows


def _give(connection: Any, chunk: Chunk | None, busy: dict[Any, Chunk]) -> None:
    if chunk is not None:
        busy[connection] = chunk
        try:
            connection.send(chunk)
        except BrokenPipeError:
            raise WorkerDied(chunk) from None


def _receive(connection: Any, chunk: Chunk) -> Any:
    try:
        found = connection.recv()
    except (EOFError, ConnectionResetError):
        raise WorkerDied(chunk) from None
    if isinstance(found, BaseException):
        raise found
    return found


def _work(
    measure: Callable[[Chunk], Any], connection: Connection, end_with_parent: Callable[[], None]
) -> None:
    end_with_parent()
    # The parent stops its workers itself. A handler inherited from it would report a Ctrl-C to it once more.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A forked process has none of torch's threads, and would wait for them in the first parallel operation.
    torch.set_num_threads(1)
    while True:
        chunk = connection.recv()
        try:
            found = measure(chunk)
        except Exception as error:  # noqa: BLE001 - raised again by the parent
            error.add_note(traceback.format_exc())
            found = error
        connection.send(found)
