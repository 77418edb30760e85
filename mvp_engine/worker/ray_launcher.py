"""Ranks in actors of a Ray cluster. No other module imports ray.

A placement group reserves one bundle per rank. Each actor gets an explicit place: rank, size, store and device, and
the ranks of a group are a process group of their own. Messages go through Ray's object store as numpy buffers, which
the receiver reads without a copy.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from mvp_engine.errors import UserError, count
from mvp_engine.worker import launchers, ray_guard
from mvp_engine.worker.launchers import Call, Place, Rank, WorkerDied, WorkerHost, reply, shown

try:
    import ray
    from ray import cloudpickle
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise UserError(
        "workers.where=ray needs the package ray: pip install 'mvp-engine[ray]'"
    ) from error

LOGGER = logging.getLogger("mvp_engine")

# Tensors of a message are views of Ray's object store. Each message has one reader, so it may write to them.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


class Home(NamedTuple):
    """Where Ray has put an actor."""

    node: str
    address: str
    pid: int
    gpus: tuple[str, ...]


class RankActor:
    """The process of a rank. Its methods run one after the other in the main thread."""

    def __init__(self, paths: list[str]) -> None:
        sys.path.extend(path for path in paths if path not in sys.path)
        self.host: WorkerHost | None = None
        self.store: Any = None

    def home(self) -> Home:
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        address = ray.util.get_node_ip_address()
        return Home(context.get_node_id(), address, os.getpid(), tuple(gpus))

    def open_store(self) -> tuple[str, int]:
        """Serve the job's TCPStore here: the controller may be outside of the cluster's network."""
        address = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            address, 0, is_master=True, wait_for_workers=False
        )
        return address, self.store.port

    def place(self, place: Place) -> None:
        self.host = WorkerHost(place)

    def call(self, message: launchers.Message) -> launchers.Message:
        assert self.host is not None
        return _numpy(reply(self.host, message))


class RayRank:
    def __init__(self, actor: Any, rank: int, home: Home) -> None:
        self.actor = actor
        self.rank = rank
        self.home = home

    def submit(self, name: str, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        message = _numpy(launchers.dumps(Call(name, method, args, kwargs), _Pickler))
        where = f"rank {self.rank} of group {name}"

        def done(answer: Future[launchers.Message]) -> None:
            try:
                error, result = launchers.loads(answer.result())
            except ray.exceptions.RayError as death:
                home = f"process {self.home.pid} on {self.home.address}"
                text = f"{where} died in {shown(method)}: {home}: {_reason(death)}"
                error = WorkerDied(text, self.rank)
            except BaseException as failure:  # noqa: BLE001 - a callback's exception is seen by nobody
                error = failure
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.actor.call.remote(message).future().add_done_callback(done)
        return future

    def kill(self) -> None:
        ray.kill(self.actor)


class RayLauncher:
    """Ranks as Ray actors, with `cpus` and, on GPUs, `gpus` of Ray's logical resources each.

    Uses the Ray instance that this process is connected to, else the cluster of `RAY_ADDRESS` or of this machine, else
    starts Ray on this machine until the last group is closed. `strategy` is that of the placement group. A cluster
    gets `wait` seconds to have the resources free.
    """

    users: set[RayLauncher] = set()  # noqa: RUF012 - of the Ray instance that was started here
    guard: Any = None  # the process that ends this instance if the controller is killed

    def __init__(
        self, cpus: float = 1, gpus: float = 1, strategy: str = "PACK", wait: float = 60.0
    ) -> None:
        self.cpus = cpus
        self.gpus = gpus
        self.strategy = strategy
        self.wait = wait
        self.actors: list[Any] = []
        self.bundles: PlacementGroup | None = None

    def start(self, ranks: int, device: str, timeout: float) -> list[Rank]:
        self._connect()
        on_gpus = self._on_gpus(device)
        self.bundles = self._reserve(ranks, on_gpus)
        actor_class = ray.remote(RankActor)
        for bundle in range(ranks):
            options = actor_class.options(
                num_cpus=self.cpus,
                num_gpus=self.gpus if on_gpus else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.bundles, bundle),
            )
            self.actors.append(options.remote(sys.path))
        where = f"Ray to start the processes of {count(ranks, 'rank')}"
        LOGGER.info(f"waiting for {where}, at most {timeout:g} s (parallel.timeout)")
        try:
            return self._place(on_gpus, timeout)
        except ray.exceptions.GetTimeoutError as error:
            late = f"the actors of {count(ranks, 'rank')} did not start within {timeout:g} seconds"
            raise WorkerDied(f"{late} (parallel.timeout)") from error
        except ray.exceptions.RayError as error:
            raise WorkerDied(f"an actor died at its start: {_reason(error)}") from error

    def _place(self, on_gpus: bool, timeout: float) -> list[Rank]:
        homes: list[Home] = ray.get([actor.home.remote() for actor in self.actors], timeout=timeout)
        pairs = by_node(list(zip(self.actors, homes, strict=True)))
        self.actors = [actor for actor, _ in pairs]
        homes = [home for _, home in pairs]
        store = ray.get(self.actors[0].open_store.remote(), timeout=timeout)
        device = "cuda:0" if on_gpus else "cpu"  # Ray shows an actor its own GPU only
        places = places_of(homes, device, store, timeout)
        placed = [
            actor.place.remote(place) for actor, place in zip(self.actors, places, strict=True)
        ]
        ray.get(placed, timeout=timeout)
        return [RayRank(actor, rank, home) for rank, (actor, home) in enumerate(pairs)]

    def close(self) -> None:
        if ray.is_initialized():
            for actor in self.actors:
                ray.kill(actor)
            if self.bundles is not None:
                remove_placement_group(self.bundles)
        self.actors = []
        self.bundles = None
        if self in self.users:
            self.users.remove(self)
            if not self.users:
                ray.shutdown()
                if RayLauncher.guard is not None:
                    RayLauncher.guard.kill()
                    RayLauncher.guard.wait()
                    RayLauncher.guard = None

    # ---- Ray and its resources ------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if ray.is_initialized():
            if self.users:
                self.users.add(self)
            return
        # 10 s are too short for a raylet on a busy machine.
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        LOGGER.info(
            "waiting for Ray: the cluster of RAY_ADDRESS or of this machine, else an instance that starts here, which "
            "takes minutes on a loaded machine"
        )
        with _own_signal_handlers():
            try:
                self._connect_or_start()
            except Exception as error:
                # Ray raises a bare Exception when its processes were not up in time.
                if type(error) is not Exception and not isinstance(error, RuntimeError | OSError):
                    raise
                raise UserError(
                    f"workers.where=ray: Ray did not start or connect: {_reason(error)} On a loaded machine it "
                    "starts too slowly: launch again, as a second start is faster, or run `ray start --head` before "
                    "the training, which then uses that instance. With RAY_ADDRESS, `ray status` must print the "
                    "cluster's nodes. Ray's own messages are in /tmp/ray/session_latest/logs"
                ) from error

    def _connect_or_start(self) -> None:
        try:
            # Ranks may be more than cores, as with other launchers: nobody else uses an instance of our own.
            cpus = max(os.cpu_count() or 1, 256)
            started: Any = ray.init(num_cpus=cpus, include_dashboard=False, logging_level="WARNING")
            self.users.add(self)
            RayLauncher.guard = ray_guard.start(started.address_info["session_dir"])
        except ValueError:  # a cluster has its own number of CPUs
            ray.init(logging_level="WARNING")

    def _on_gpus(self, device: str) -> bool:
        gpus = ray.cluster_resources().get("GPU", 0) if device != "cpu" else 0
        if device == "cuda" and not gpus:
            raise UserError("device=cuda, but the Ray cluster has no GPU: set device=auto or cpu")
        return gpus > 0

    def _reserve(self, ranks: int, on_gpus: bool) -> PlacementGroup:
        each = {"CPU": self.cpus, "GPU": self.gpus if on_gpus else 0}
        each = {name: amount for name, amount in each.items() if amount}
        bundles = placement_group([each] * ranks, self.strategy)
        seconds = 1.0 if self in self.users else self.wait
        LOGGER.info(
            f"waiting for resources of {count(ranks, 'rank')} in Ray, at most {seconds:g} s"
        )
        if not bundles.wait(seconds):
            remove_placement_group(bundles)
            free = ray.available_resources()
            wanted = " and ".join(f"{amount:g} {name}" for name, amount in each.items())
            have = " and ".join(f"{free.get(name, 0):g} {name}" for name in each)
            raise UserError(
                f"the Ray cluster has {have} free, and {count(ranks, 'rank')} need {wanted} each "
                f"(placement strategy {self.strategy}): start fewer ranks, or add nodes"
            )
        return bundles


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the handler of SIGTERM, which ray.init replaces: a training stops after its step and saves."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if before is not signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def by_node(actors: list[tuple[Any, Home]]) -> list[tuple[Any, Home]]:
    """Actors in the order of their ranks. Those of one node are adjacent: tensor and sequence parallel ranks are."""
    nodes = list(dict.fromkeys(home.node for _, home in actors))
    return sorted(actors, key=lambda pair: nodes.index(pair[1].node))


def places_of(
    homes: list[Home], device: str, store: tuple[str, int], timeout: float
) -> list[Place]:
    """The places of the ranks of a job."""
    own_gpu = len({(home.node, home.gpus) for home in homes}) == len(homes)
    places = []
    for rank, home in enumerate(homes):
        ranks_here = [other for other, one in enumerate(homes) if one.node == home.node]
        place = Place(
            rank,
            len(homes),
            device,
            store,
            local_rank=ranks_here.index(rank),
            local_size=len(ranks_here),
            own_gpu=own_gpu,
            timeout=timeout,
        )
        places.append(place)
    return places


class _Pickler(cloudpickle.CloudPickler):
    """Pickles by value what an actor cannot import: the classes of the controller's main module."""

    def reducer_override(self, value: Any) -> Any:
        found = launchers.reduce_tensor(value)
        return super().reducer_override(value) if found is NotImplemented else found


def _numpy(message: launchers.Message) -> launchers.Message:
    """Buffers as arrays, which Ray stores next to its own pickle instead of copying them into it."""
    body, buffers = message
    return body, [np.frombuffer(buffer, np.uint8) for buffer in buffers]


def _reason(error: Exception) -> str:
    """The last line of Ray's message, without its list of common causes."""
    last = str(error).strip().rpartition("\n")[2]
    return last.partition(" Some common causes")[0]
