"""WorkerHost: the workers of one process by name, and the calls on them. Every launcher runs one in each process."""

from __future__ import annotations

import gc
import logging
import traceback
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from mvp_engine.checkpoint import CorruptCheckpoint
from mvp_engine.distributed import World
from mvp_engine.distributed.world import HangWatch
from mvp_engine.errors import UserError, reason_of
from mvp_engine.imports import add_packages, added_packages
from mvp_engine.process.watchdog import RankWatchdog
from mvp_engine.worker.errors import WorkerCorruptCheckpoint, WorkerError, WorkerUserError
from mvp_engine.worker.spec import WorkerSpec
from mvp_engine.worker.worker import Worker

START = "__start__"  # builds a worker from its spec
STOP = "__stop__"  # drops a worker
COPY = "__copy__"  # loads the weights of another worker of the same processes


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
            if method == COPY:
                self._copy(name, *args)
                return None
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
            self.hang = HangWatch(spec.hang_seconds, self.world, logging.ERROR).__enter__()
        self.workers[name] = Worker(spec, self.world)

    def _copy(self, name: str, source: str, dtype: torch.dtype | None) -> None:
        worker = self.workers[name]
        worker.open_receiver()
        worker.copy_weights(self.workers[source], dtype)
        worker.close_receiver()

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
