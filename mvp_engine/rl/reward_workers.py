"""Processes that compute rewards: one that hangs or dies costs one reward, and is replaced.

They are forked from the controller, so that a reward may be a method of an engine, and start in milliseconds. Each has
a keeper, an idle process between it and the controller: when the worker or the controller ends, or when a reward takes
too long, the keeper is the root of all processes that the reward has started, also in sessions of their own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from mvp_engine.data import seed_everything
from mvp_engine.process.watchdog import adopt_orphans, end_with_this_process, kill_descendants

POLL_SECONDS = 0.2  # between two looks at whether workers are alive
Compute = Callable[[dict[str, Any], Any], Any]


@dataclass(frozen=True)
class Task:
    """One reward to compute."""

    index: int  # of its outcome
    seed: int  # of the random generators
    answer: Any


@dataclass(frozen=True)
class Outcome:
    """What a reward function returned, or why it failed."""

    value: Any = None
    error: str | None = None  # one line
    detail: str = ""  # the traceback


@dataclass
class Group:
    """Rewards of one row, which is sent once."""

    row: bytes  # pickled
    tasks: deque[Task] = field(default_factory=deque)


def run_task(compute: Compute, row: bytes, task: Task) -> Outcome:
    """The outcome of one reward in this process. Each has a row of its own to change, and its own random numbers."""
    seed_everything(task.seed, cuda=False)
    try:
        return Outcome(compute(pickle.loads(row), task.answer))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        frames = _user_frames(error)
        lines = traceback.format_exception(error.with_traceback(frames)) if frames else []
        return Outcome(error=f"{type(error).__name__}: {error}"[:500], detail="".join(lines))


def _user_frames(error: BaseException) -> Any:
    """The frames of the reward function; None for a result that is no number."""
    frames = error.__traceback__
    while frames and Path(frames.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        frames = frames.tb_next
    return frames


class RewardWorkers:
    """A fixed number of processes, each replaced when it fails."""

    def __init__(self, compute: Compute, count: int, timeout: float) -> None:
        self.compute = compute
        self.timeout = timeout
        # A keeper ends with the thread that forked it: this one lives as long as the workers are needed.
        self._starter = ThreadPoolExecutor(1, "mvp-reward-workers")
        self._workers: list[_Worker] = []
        # Before multiprocessing waits at the exit for processes that nobody has closed.
        multiprocessing.util.Finalize(self, _kill_all, (self._workers,), exitpriority=10)
        for _ in range(count):
            self._workers.append(self._start())

    def close(self) -> None:
        _kill_all(self._workers)
        self._workers.clear()
        self._starter.shutdown()

    def run(self, groups: Sequence[Group]) -> Iterator[tuple[int, Outcome]]:
        """The outcome of each task, as they are finished."""
        waiting = deque(groups)
        try:
            while waiting or any(worker.group for worker in self._workers):
                for worker in [one for one in self._workers if one.group is None]:
                    if waiting:
                        self._give(worker, waiting.popleft())
                yield from self._collect(waiting)
        finally:
            for worker in [one for one in self._workers if one.group is not None]:
                self._replace(worker)  # after an error: what it computes is not needed

    def _give(self, worker: _Worker, group: Group) -> None:
        if not worker.process.is_alive():  # killed while it was idle: no reward was lost
            worker = self._replace(worker)
        worker.group = group
        worker.deadline = time.monotonic() + self.timeout
        with contextlib.suppress(OSError):  # it died just now, which `_collect` finds
            worker.connection.send((group.row, list(group.tasks)))

    def _collect(self, waiting: deque[Group]) -> Iterator[tuple[int, Outcome]]:
        busy = [worker for worker in self._workers if worker.group is not None]
        first = min(worker.deadline for worker in busy) - time.monotonic()
        ready = wait([one.connection for one in busy], max(0.0, min(first, POLL_SECONDS)))
        for worker in busy:
            outcome = worker.outcome(worker.connection in ready, self.timeout)
            if outcome is None:
                continue
            assert worker.group is not None
            task = worker.group.tasks.popleft()
            worker.deadline = time.monotonic() + self.timeout
            rest = worker.group
            if worker.is_lost:
                self._replace(worker)
                if rest.tasks:
                    waiting.appendleft(rest)
            elif not rest.tasks:
                worker.group = None
            yield task.index, outcome

    def _start(self) -> _Worker:
        return self._starter.submit(_Worker, self.compute).result()

    def _replace(self, worker: _Worker) -> _Worker:
        worker.kill()
        new = self._start()
        self._workers[self._workers.index(worker)] = new
        return new


class _Worker:
    """One process, seen from the controller."""

    def __init__(self, compute: Compute) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        end = end_with_this_process(thread_lasts=True, number=signal.SIGTERM)
        self.process = context.Process(target=_keep, args=(compute, theirs, end))
        self.process.start()
        theirs.close()
        self.group: Group | None = None
        self.deadline = 0.0
        self.is_lost = False  # nothing more comes from it

    def outcome(self, is_ready: bool, timeout: float) -> Outcome | None:
        """The outcome of the first task of the group; None while it is being computed."""
        # A result may have come while the controller replaced another worker: it is no time-out.
        if is_ready or self.connection.poll():
            try:
                found: Outcome = self.connection.recv()
                return found
            except (EOFError, OSError, pickle.UnpicklingError):
                return self._death()
        if time.monotonic() > self.deadline:
            self.is_lost = True
            return Outcome(error=f"no result after {timeout:g} s (reward.timeout)")
        if not self.process.is_alive() and not self.connection.poll():
            return self._death()
        return None

    def _death(self) -> Outcome:
        self.is_lost = True
        self.process.join(10.0)  # its keeper kills what it has started
        code = self.process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = signal.Signals(-code).name
        return Outcome(error=f"its process died ({how})")

    def kill(self) -> None:
        pid = self.process.pid
        assert pid is not None
        kill_descendants(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # where there is no /proc
        self.process.kill()
        self.process.join()
        self.connection.close()


def _kill_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()


def _keep(
    compute: Compute, connection: Connection, end_with_controller: Callable[[], None]
) -> None:
    """The keeper of a worker: it ends like the worker, after everything that the worker has started."""
    os.setsid()
    adopt_orphans()
    # The parent stops its workers itself. A handler inherited from it would report a Ctrl-C to it once more.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    awaited = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    end_with_keeper = end_with_this_process()
    worker = os.fork()
    if worker == 0:
        end_with_keeper()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        _work(compute, connection)
    connection.close()
    end_with_controller()
    code = None
    while code is None and signal.sigwait(awaited) == signal.SIGCHLD:
        code = _reaped(worker)
    kill_descendants(os.getpid())
    if code is not None and code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code or 0)


def _reaped(worker: int) -> int | None:
    """The exit code of the worker if it has ended, after a look at all children that have."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _work(compute: Compute, connection: Connection) -> None:
    # A forked process has none of torch's threads, and would wait for them in the first parallel operation.
    torch.set_num_threads(1)
    while True:
        try:
            row, tasks = connection.recv()
        except EOFError:
            os._exit(0)
        for task in tasks:
            connection.send(run_task(compute, row, task))
