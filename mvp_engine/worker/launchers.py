"""Where the processes of a group are: in this process (`local`), or in processes that it starts (`spawn`).

Actors of a Ray cluster are in `ray_launcher`. A process hosts workers by name, so several groups can share it.

Messages between processes: pickles with the data of tensors next to them, which are copied once on each side.

torch's own pickling of tensors copies whole storages twice, or moves the sender's tensors into shared memory, where a
change on one side is seen on the other.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import io
import logging
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
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mvp_engine.checkpoint import CorruptCheckpoint
from mvp_engine.distributed import World
from mvp_engine.distributed.world import HangWatch
from mvp_engine.errors import UserError, reason_of
from mvp_engine.imports import add_packages, added_packages
from mvp_engine.process.watchdog import RankWatchdog, end_with_this_process
from mvp_engine.worker.worker import Worker, WorkerSpec


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


Message = tuple[bytes, list[Any]]  # a pickle, and the data of its tensors


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return reduce_tensor(value)


def reduce_tensor(value: Any) -> Any:
    """What `reducer_override` of a pickler returns for a tensor: its data as a buffer next to the pickle."""
    if type(value) is not Tensor and type(value) is not nn.Parameter:
        return NotImplemented
    data = value.detach().cpu().contiguous()
    raw: Any = data.reshape(-1).view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(raw), data.dtype, tuple(data.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def dumps(value: Any, pickler: Any = _Pickler) -> Message:
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    pickler(out, protocol=5, buffer_callback=buffers.append).dump(value)
    return out.getvalue(), buffers


def loads(message: Message) -> Any:
    body, buffers = message
    return pickle.loads(body, buffers=buffers)


def send(connection: Connection, message: Message) -> None:
    body, buffers = message
    raws = [memoryview(buffer) for buffer in buffers]
    connection.send_bytes(pickle.dumps([raw.nbytes for raw in raws]))
    connection.send_bytes(body)
    for raw in raws:
        if raw.nbytes:
            connection.send_bytes(raw)


def receive(connection: Connection) -> Message:
    sizes = pickle.loads(connection.recv_bytes())
    body = connection.recv_bytes()
    buffers = [bytearray(size) for size in sizes]
    for buffer in buffers:
        if buffer:
            connection.recv_bytes_into(buffer)
    return body, buffers


START = "__start__"  # builds a worker from its spec
STOP = "__stop__"  # drops a worker
RUN = "__run__"  # a function of all workers of the process


@dataclass(frozen=True)
class Place:
    """The place of a rank in a job: explicit, whatever the environment variables of its process are."""

    rank: int
    size: int
    device: str  # cpu, or cuda with the index of the GPU that this process sees
    store: tuple[str, int] | None = None  # host and port of the job's TCPStore
    local_rank: int = 0
    local_size: int = 1
    own_gpu: bool = True  # no other rank computes on the GPU
    watched: bool = False  # the parent process is the controller: end when it dies
    timeout: float = 600.0
    packages: dict[str, str] = field(default_factory=added_packages)  # of recipes, for their losses

    def join(self) -> World:
        """Join the process group of the job. All ranks of the job call it at the same time."""
        store = None
        if self.size > 1 and self.store is not None:
            store = dist.TCPStore(*self.store, is_master=False)  # type: ignore[attr-defined]
        return World.at(
            self.rank,
            self.size,
            store,
            self.device,
            local_rank=self.local_rank,
            local_size=self.local_size,
            own_gpu=self.own_gpu,
            watch=RankWatchdog(self.rank) if self.watched else None,
            timeout=self.timeout,
        )


class WorkerHost:
    def __init__(self, place: Place, *, in_controller: bool = False) -> None:
        """`in_controller`: the process is the controller's own, which watches its steps itself."""
        add_packages(place.packages)
        self.place = place
        self.workers: dict[str, Worker] = {}
        self.hang: HangWatch | None = None
        self._in_controller = in_controller
        self._calls = 0
        if place.rank:  # every rank would repeat a warning
            logging.getLogger("mvp_engine").setLevel(logging.ERROR)

    @cached_property
    def world(self) -> World:
        return self.place.join()

    def call(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a worker; an exception becomes a WorkerError."""
        self._calls += 1
        try:
            if self.hang is not None:
                self.hang.beat(self._calls, f"{shown(method)} of group {name}, call")
            if method == START:
                return self._start(name, *args)
            if method == STOP:
                self._stop(name)
                return None
            if method == RUN:
                return args[0](self.workers, name, *args[1:])
            return getattr(self.workers[name], method)(*args, **kwargs)
        except Exception as error:
            kind: type[WorkerError] = WorkerError
            if isinstance(error, UserError):
                is_corrupt = isinstance(error, CorruptCheckpoint)
                kind = WorkerCorruptCheckpoint if is_corrupt else WorkerUserError
            remote = traceback.format_exc() if kind is WorkerError else ""
            raise kind(name, self.place.rank, shown(method), reason_of(error), remote) from error
        finally:
            if self.hang is not None:
                self.hang.pause()

    def _start(self, name: str, spec: WorkerSpec) -> None:
        if self.hang is None and not self._in_controller:
            # An error, since ranks other than 0 log nothing else.
            self.hang = HangWatch(spec.parallel.hang_seconds, self.world, logging.ERROR).__enter__()
        self.workers[name] = Worker(spec, self.world)

    def _stop(self, name: str) -> None:
        self.workers.pop(name, None)
        gc.collect()  # models hold reference cycles
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()  # for the other groups on this GPU


def shown(method: str) -> str:
    """The name of a method in messages."""
    return method.strip("_")


def devices_of_node(device: str, ranks: int, users: Counter[str] | None = None) -> list[str]:
    """Devices of this machine for so many ranks, for a `device` of auto, cpu or cuda.

    `users` counts the ranks of other groups by device: those with fewest are taken.
    """
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise UserError("device=cuda, but torch sees no GPU here. Set device=auto or device=cpu.")
    known = [f"cuda:{gpu}" for gpu in range(gpus)] or ["cpu"]
    users = Counter(users)
    chosen = []
    for _ in range(ranks):
        chosen.append(min(known, key=users.__getitem__))
        users[chosen[-1]] += 1
    return chosen


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
        self._calls: queue.SimpleQueue[tuple[Future[Any], Call, Message] | None]
        self._calls = queue.SimpleQueue()
        self._death: str | None = None
        threading.Thread(target=self._run, name=f"mvp-rank-{place.rank}", daemon=True).start()

    def submit(self, name: str, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        call = Call(name, method, args, kwargs)
        try:
            message = dumps(call)
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

    def _call(self, message: Message) -> Any:
        send(self._connection, message)
        # The end of the pipe is not enough: a process that this one forked may hold it open.
        while not wait([self._connection, self.process.sentinel], timeout=1.0):
            pass
        if not self._connection.poll():
            raise EOFError
        error, result = loads(receive(self._connection))
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
            message = receive(connection)
        except (EOFError, OSError):
            os._exit(0)  # the controller has ended
        send(connection, reply(host, message))


def reply(host: WorkerHost, message: Message) -> Message:
    """The reply of a process to a call: (error, result)."""
    call = Call("?", "receive", (), {})
    try:
        call = loads(message)
        return dumps((None, host.call(call.name, call.method, *call.args, **call.kwargs)))
    except WorkerError as error:
        return dumps((error, None))
    except Exception as error:  # noqa: BLE001 - what cannot be pickled, or loaded here
        reason = f"{reason_of(error)} (arguments and results must pickle)"
        remote = traceback.format_exc()
        failed = WorkerError(call.name, host.place.rank, call.method, reason, remote)
        return dumps((failed, None))
