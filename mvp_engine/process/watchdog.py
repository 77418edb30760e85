"""Processes that end with others: a rank with its launcher and the other ranks, a worker with what started it.

Broken pipes: output of a process after its reader has exited, as in `mvp profile CONFIG | head`.

A training must not end because its reader does: later output is discarded, while the work, its files and
its exit code stay the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from mvp_engine import PARENT


class _Pipe(io.FileIO):
    """A file descriptor that becomes /dev/null at the first broken pipe."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self.fileno())  # child processes inherit it too
            os.close(devnull)
            return super().write(data)


def ignore_broken_pipes() -> None:
    """Replace this process's stdout and stderr by streams that never raise BrokenPipeError."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue  # closed, or replaced by the caller
        stream.flush()
        pipe = _Pipe(stream.fileno(), "wb", closefd=False)
        unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
        wrapped = io.TextIOWrapper(
            pipe if unbuffered else io.BufferedWriter(pipe),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, wrapped)


# Keys of the store: the rank that failed first, a space, and why; its exit code, once it has said why.
FIRST_FAILURE = "first_failure"
SAID_WHY = "said_why"

# Options of Linux's prctl.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_POLL_SECONDS = 0.5


class RankWatchdog:
    """A collective with a dead rank would never return, and a job must not continue unseen after its launcher was
    killed. The thread holds no reference to the World: a process group must not be destroyed by a thread at exit.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.siblings: list[int] = []  # the processes of this machine's ranks
        # With several nodes, on one rank of each: where failures are recorded.
        self.store: Any = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mvp-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            who = self._dead()
            # After a rank died, the broken collective usually raises by itself, with a better message.
            if not self._ended.wait(4.0 if who else 0.5) and (who or os.getppid() != PARENT):
                who = who or "the launcher"
                self._record_failure(who)
                print(
                    f"[rank {self.rank}] {who} of this job died; leaving",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)

    def _dead(self) -> str | None:
        for pid in self.siblings:
            if not _alive(pid):
                return f"process {pid}"
        try:
            if self.store is not None and self.store.check([FIRST_FAILURE]):
                return "a rank on another node"
        except RuntimeError:  # its host is node 0
            return "node 0"
        return None

    def has_dead_rank(self, seconds: float = 0.5) -> bool:
        """Whether a rank of this machine has died. Its connections are closed a moment before it has."""
        deadline = time.monotonic() + seconds
        while all(_alive(pid) for pid in self.siblings):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _record_failure(self, who: str) -> None:
        if self.store is not None:
            with contextlib.suppress(RuntimeError):
                record_death(self.store, self.rank, f"{who} died", 1)


def record_death(store: Any, rank: int, why: str, code: int) -> None:
    """Record a rank that ends without a message of its own, unless another one has failed before."""
    failure = f"{rank} {why}"
    if store.compare_set(FIRST_FAILURE, "", failure).decode() == failure:
        store.set(SAID_WHY, str(code))


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent to read its exit code does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except ProcessLookupError:
        return False
    except OSError:  # of another user, or no Linux
        return True
    return not state.startswith(("Z", "X"))


# ---- Workers ------------------------------------------------------------------------------------------------------


def end_with_this_process(
    thread_lasts: bool = False, number: int = signal.SIGKILL
) -> Callable[[], None]:
    """What a worker calls first, to get the signal `number` when this process ends, also by kill -9.

    A worker that writes to a full pipe or hangs in C code would not notice. It is called in the thread that starts the
    worker: the kernel sends the signal when that thread ends. `thread_lasts`: it lives as long as this process, as the
    main thread does. For other threads, and with a fork server, the worker looks for this
    process itself.
    """
    lasts = thread_lasts or threading.current_thread() is threading.main_thread()
    return functools.partial(_end_with, os.getpid(), lasts, number)


def _end_with(parent: int, thread_lasts: bool, number: int) -> None:
    # A process of a fork server is no child of the one that asked for it.
    if thread_lasts and os.getppid() == parent and _prctl(PR_SET_PDEATHSIG, number):
        if os.getppid() != parent:  # it ended meanwhile
            os.kill(os.getpid(), number)
        return
    threading.Thread(target=_watch_parent, args=(parent, number), daemon=True).start()


def _watch_parent(parent: int, number: int) -> None:
    while _alive(parent):
        time.sleep(PARENT_POLL_SECONDS)
    os.kill(os.getpid(), number)


def _prctl(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).prctl(option, value) == 0)
    except (AttributeError, OSError):  # only Linux has it
        return False


# ---- Process trees ------------------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends: it stays in this one's tree."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(root: int, but: Collection[int] = ()) -> None:
    """Kill -9 every process below `root`, also in sessions of their own; not the processes `but` and those below."""
    stopped: set[int] = set()
    while new := descendants(root, but) - stopped:
        _send(new, signal.SIGSTOP)  # so that they start no others
        stopped |= new
    _send(stopped, signal.SIGKILL)


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def descendants(root: int, but: Collection[int] = ()) -> set[int]:
    """The processes below `root`, without `but` and those below these; none where there is no /proc."""
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, parent = file.read_text().rpartition(") ")[2].split()[:2]
            if state not in "ZX":
                parents[int(file.parent.name)] = int(parent)
    found: set[int] = set()
    new = {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new and pid not in but}
        found |= new
    return found


# A zygote: a small process that forks workers, and kills all that a worker has started when the worker ends.


def end_zygote(zygote: Any, control: Connection) -> None:
    if not control.closed:
        with contextlib.suppress(OSError):
            control.send(("end", 0))
        control.close()
    zygote.join(10.0)
    if zygote.is_alive():
        kill_descendants(zygote.pid)
        zygote.kill()
        zygote.join()


def run_zygote(
    work: Callable[[Connection], None],
    controllers: Connection,
    control: Connection,
    end_with_controller: Callable[[], None],
) -> None:
    """The process that forks those of episodes. It ends after all that they have started."""
    controllers.close()
    os.setsid()
    adopt_orphans()
    gc.freeze()
    # The controller stops this process itself. A handler inherited from it would report a Ctrl-C to it once more.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    end_with_controller()
    workers: set[int] = set()
    while True:
        ready = wait([control, reader])
        if reader in ready:
            if signal.SIGTERM in os.read(reader, 4096):
                break
            try:
                _report_deaths(workers, control)
            except OSError:
                break
        if control in ready:
            try:
                command, pid = control.recv()
                if command == "fork":
                    _fork_worker(work, workers, control, (reader, writer))
                elif command == "end":
                    break
                elif pid in workers:
                    _kill_worker(pid)
            except (EOFError, OSError):
                break
    kill_descendants(os.getpid())
    os._exit(0)


def _fork_worker(
    work: Callable[[Connection], None],
    workers: set[int],
    control: Connection,
    pipe: tuple[int, int],
) -> None:
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    end_with_zygote = end_with_this_process()
    try:
        pid = os.fork()
    except OSError as error:
        control.send(("failed", 0, str(error)))
        return
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        end_with_zygote()
        os.setsid()
        adopt_orphans()
        for connection in (control, ours):
            connection.close()
        for end in pipe:
            os.close(end)
        try:
            work(theirs)
        finally:
            os._exit(1)
    workers.add(pid)
    theirs.close()
    control.send(("forked", pid, 0))
    reduction.send_handle(control, ours.fileno(), None)
    ours.close()


def _kill_worker(pid: int) -> None:
    kill_descendants(pid)
    for kill in (os.killpg, os.kill):  # the group, where there is no /proc
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _report_deaths(workers: set[int], control: Connection) -> None:
    """Report to the controller which processes of episodes have died, after what they have started."""
    died = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] in workers:
                died[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    if died:
        workers -= died.keys()
        kill_descendants(os.getpid(), but=workers)
    for pid, code in died.items():
        control.send(("died", pid, code))
