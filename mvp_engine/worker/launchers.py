"""Where the processes of a group are: in this process (`local`), or in processes that it starts (`spawn`).

Actors of a Ray cluster are in `ray_launcher`. A process hosts workers by name, so several groups can share it.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, NamedTuple, Protocol

import torch.distributed as dist

from mvp_engine.errors import UserError, reason_of
from mvp_engine.process.watchdog import end_with_this_process
from mvp_engine.worker import wire
from mvp_engine.worker.errors import WorkerDied, WorkerError
from mvp_engine.worker.host import Place, WorkerHost, devices_of_node, shown


class Call(NamedTuple):
    """A call on the worker `name` of a process."""

    name: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Rank(Protocol):
    """A process that hosts workers."""

    def submit(self, name: str, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of worker `name` there; calls run in the order of their submission.

        The result is a WorkerError if the call raised there, and a WorkerDied if the process died.
        """

    def kill(self) -> None: ...


class Launcher(Protocol):
    def start(self, ranks: int, device: str, timeout: float) -> list[Rank]:
        """Start the processes of a job. `timeout`: of its collectives, in seconds."""

    def close(self) -> None:
        """End all processes, also after errors. `start` may be called again."""


# ---- This process -----------------------------------------------------------------------------------------------


class LocalRank:
    def __init__(self, device: str) -> None:
        self.host = WorkerHost(Place(0, 1, device), in_controller=True)

    def submit(self, name: str, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(self.host.call(name, method, *args, **kwargs))
        except WorkerError as error:
            future.set_exception(error)
        return future

    def kill(self) -> None:
        self.host.workers.clear()


class LocalLauncher:
    def __init__(self) -> None:
        self.ranks: list[LocalRank] = []

    def start(self, ranks: int, device: str, timeout: float) -> list[Rank]:
        if ranks != 1:
            raise UserError(f"a local group has one rank, not {ranks}: set workers.where=spawn")
        self.ranks = [LocalRank(devices_of_node(device, 1)[0])]
        return [*self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()


# ---- Processes of this machine ----------------------------------------------------------------------------------


class SpawnRank:
    """A process, and a thread that sends it one call after the other and waits for the results."""

    def __init__(self, place: Place, process: BaseProcess, connection: Connection) -> None:
        self.place = place
        self.process = process
        self._connection = connection
        self._calls: queue.SimpleQueue[tuple[Future[Any], Call, wire.Message] | None]
        self._calls = queue.SimpleQueue()
        self._death: str | None = None
        threading.Thread(target=self._run, name=f"mvp-rank-{place.rank}", daemon=True).start()

    def submit(self, name: str, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        call = Call(name, method, args, kwargs)
        try:
            message = wire.dumps(call)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"the arguments of {method} cannot be sent to the ranks of group {name}: {error}. A loss is a frozen "
                "dataclass at the top of a module"
            ) from error
        self._calls.put((future, call._replace(args=(), kwargs={}), message))
        return future

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._calls.put(None)

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, call, message = entry
            try:
                if self._death is None:
                    future.set_result(self._call(message))
                    continue
            except WorkerError as error:
                future.set_exception(error)
                continue
            except (EOFError, OSError):
                self._death = self._how_it_ended()
            rank = self.place.rank
            text = f"rank {rank} of group {call.name} died in {shown(call.method)}: {self._death}"
            future.set_exception(WorkerDied(text, rank))

    def _call(self, message: wire.Message) -> Any:
        wire.send(self._connection, message)
        # The end of the pipe is not enough: a process that this one forked may hold it open.
        while not wait([self._connection, self.process.sentinel], timeout=1.0):
            pass
        if not self._connection.poll():
            raise EOFError
        error, result = wire.loads(wire.receive(self._connection))
        if error is not None:
            raise error
        return result

    def _how_it_ended(self) -> str:
        deadline = time.monotonic() + 5.0
        while (code := self.process.exitcode) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if code is None:
            return "its connection broke"
        if code == -signal.SIGKILL:
            return "signal SIGKILL (is the host out of memory?)"
        return (
            f"signal {signal.Signals(-code).name}"
            if code < 0
            else f"exit code {code}, see its output"
        )


class SpawnLauncher:
    # Ranks of all groups by device: groups with processes of their own get GPUs apart.
    users: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        self.ranks: list[SpawnRank] = []
        self.devices: list[str] = []
        self.store: Any = None  # the job's TCPStore

    def start(self, ranks: int, device: str, timeout: float) -> list[Rank]:
        devices = devices_of_node(device, ranks, self.users)
        self.devices = devices
        self.users.update(devices)
        host = "127.0.0.1"
        if ranks > 1:
            self.store = dist.TCPStore(  # type: ignore[attr-defined]
                host, 0, is_master=True, wait_for_workers=False
            )
        # Registered after multiprocessing's own handler, so called before: that one waits for processes.
        atexit.register(self.close)
        for rank in range(ranks):
            place = Place(
                rank,
                ranks,
                devices[rank],
                (host, self.store.port) if self.store else None,
                local_rank=rank,
                local_size=ranks,
                own_gpu=len(set(devices)) == ranks,
                watched=True,
                timeout=timeout,
            )
            ours, theirs = multiprocessing.Pipe()
            process = self._process(place, theirs)
            process.start()
            theirs.close()
            self.ranks.append(SpawnRank(place, process, ours))
        return [*self.ranks]

    def _process(self, place: Place, connection: Connection) -> BaseProcess:
        # A fork would copy the locks that threads of the controller hold.
        context = multiprocessing.get_context("spawn")
        return context.Process(target=_main, args=(end_with_this_process(), place, connection))

    def close(self) -> None:
        atexit.unregister(self.close)
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.kill()
        self.users.subtract(self.devices)
        self.devices = []
        self.ranks = []
        self.store = None


def _main(end_with_controller: Callable[[], None], place: Place, connection: Connection) -> None:
    end_with_controller()
    serve(place, connection)


def serve(place: Place, connection: Connection) -> None:
    """The main function of a spawned process: calls from the pipe, until it is closed or the controller dies."""
    faulthandler.enable()
    # Ctrl-C and a scheduler's SIGTERM reach all processes; the controller decides, and still needs its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    host = WorkerHost(place)
    while True:
        try:
            message = wire.receive(connection)
        except (EOFError, OSError):
            os._exit(0)  # the controller has ended
        wire.send(connection, reply(host, message))


def reply(host: WorkerHost, message: wire.Message) -> wire.Message:
    """The reply of a process to a call: (error, result)."""
    call = Call("?", "receive", (), {})
    try:
        call = wire.loads(message)
        return wire.dumps((None, host.call(call.name, call.method, *call.args, **call.kwargs)))
    except WorkerError as error:
        return wire.dumps((error, None))
    except Exception as error:  # noqa: BLE001 - what cannot be pickled, or loaded here
        reason = f"{reason_of(error)} (arguments and results must pickle)"
        remote = traceback.format_exc()
        failed = WorkerError(call.name, host.place.rank, call.method, reason, remote)
        return wire.dumps((failed, None))
