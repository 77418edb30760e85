"""World: the processes of a job, their device, and small host collectives between them.

A single process needs no process group: every call here then costs nothing. Host collectives run on gloo, so they
never wait for the GPU.

Errors under collectives: an error on one rank is raised on every rank of the group.

Without this, the ranks that did not fail would wait in their next collective until its time-out.

HangWatch: names the rank that a step, or a call of a worker group, waits for, with its stack.

A rank that hangs in a loader, a lock or an endless loop makes all others wait in their next collective, and their
time-out says nothing about it. A thread of each rank notices a step that takes too long, and writes where its main
thread is to the store; nothing is written before, so a step costs no communication. The lowest rank prints them all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from mvp_engine.errors import ELASTIC, JOB_ID, UserError, count, reason_of
from mvp_engine.process.watchdog import FIRST_FAILURE, SAID_WHY, RankWatchdog


@contextlib.contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None) -> Iterator[None]:
    """A context: an exception inside it on one rank is raised on all ranks of `group`."""
    own: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, when the others know
        own = error
    message = own if own is None or isinstance(own, UserError) else f"{type(own).__name__}: {own}"
    errors = [message] * (group.size() if group else 1)
    if group:
        dist.all_gather_object(errors, message, group=group)
    for rank, failure in enumerate(errors):
        if isinstance(failure, UserError):
            raise failure
        if failure:
            raise RuntimeError(f"rank {rank}: {failure}") from own


_JOINED: Counter[str] = Counter()  # worlds that this process was part of, by where their ranks met
REPORT_SECONDS = 30.0  # that the other ranks wait until the one that failed first has said why


@dataclass
class World:
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    host_group: dist.ProcessGroup | None = None  # gloo, for host collectives of the main thread
    store: PrefixStore | None = None
    watch: RankWatchdog | None = None
    meshes: list[DeviceMesh] = field(default_factory=list)
    owns_group: bool = True  # False: the default process group was there before

    @classmethod
    def join(cls, device: str = "auto", timeout: float = 600.0) -> World:
        """Join the process group of this process, else the job of torchrun's environment variables, else run alone."""
        if dist.is_available() and dist.is_initialized():
            return cls._inside(device)
        size = int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
        world = cls(
            int(os.environ.get("RANK", "0")),
            size,
            local_rank,
            local_size,
            _pick_device(device, local_rank),
        )
        if "TORCHELASTIC_RUN_ID" in os.environ:
            world.watch = RankWatchdog(world.rank)
        if ELASTIC in os.environ:
            _set_job_id()
        if size > 1:
            own_gpu = local_size <= torch.cuda.device_count() or "SLURM_GPUS_PER_TASK" in os.environ
            # torchrun may keep its store over a restart: the dead workers' addresses must not be found in it.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            prefix = f"mvp_engine/{attempt}"
            if ELASTIC in os.environ:
                prefix += f"/{size}"  # a node that joins restarts the ranks under the same count
            meeting = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}/{prefix}"
            if number := _JOINED[meeting]:  # a later run of the same processes
                prefix += f"/run{number}"
            _JOINED[meeting] += 1
            store = PrefixStore(prefix, next(rendezvous("env://"))[0])
            world._connect(store, own_gpu, timeout)
        return world

    @classmethod
    def _inside(cls, device: str) -> World:
        """All ranks of the default process group, which stays its owner's to destroy."""
        size = dist.get_world_size()
        place = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        world = cls(dist.get_rank(), size, place, local_size, _pick_device(device, place))
        backends = dist.get_backend_config()
        if world.device.type not in backends or "cpu" not in backends:
            raise UserError(
                f"the process group of this process has the backends {backends}, and a training on "
                f"{world.device.type} exchanges tensors on it and on the CPU: start it with "
                "init_process_group('cpu:gloo,cuda:nccl')"
            )
        world.owns_group = False
        if size > 1:
            default = torch.distributed.distributed_c10d._get_default_store()
            number = default.add(f"mvp_engine/joined/{world.rank}", 1)
            world.store = PrefixStore(f"mvp_engine/inside/{number}", default)
            world.host_group = world.new_host_group()
        return world

    @classmethod
    def at(
        cls,
        rank: int,
        size: int,
        store: Store | None,
        device: torch.device | str,
        *,
        local_rank: int = 0,
        local_size: int = 1,
        own_gpu: bool = True,
        watch: RankWatchdog | None = None,
        timeout: float = 600.0,
    ) -> World:
        """Join a job at an explicit place, whatever the environment variables are. A single process needs no store.

        `own_gpu`: no other rank computes on this rank's GPU.
        """
        world = cls(rank, size, local_rank, local_size, torch.device(device), watch=watch)
        if world.device.type == "cuda":
            _expandable_segments()
            torch.cuda.set_device(world.device)
        if size > 1:
            assert store is not None, "several ranks need a store"
            world._connect(PrefixStore("mvp_engine", store), own_gpu, timeout)
        return world

    def _connect(self, store: PrefixStore, own_gpu: bool, timeout: float) -> None:
        # NCCL refuses two ranks on one GPU; gloo carries CUDA tensors too.
        own_gpu = own_gpu and self.device.type == "cuda"
        self.store = store
        # A gloo group connects two ranks when they first exchange something, instead of all pairs at once: of 1,024
        # ranks each would hold 1,023 sockets for every group, and uses about 12.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if own_gpu else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout),
            device_id=self.device if own_gpu else None,
        )
        self.host_group = self.new_host_group()
        here = _node()
        siblings = [pid for node, pid in self.all_gather((here, os.getpid())) if node == here]
        if self.watch:
            self.watch.siblings = siblings
            if self.local_size < self.size and self.local_rank == 0:
                self.watch.store = store

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Broadcast the `value` of one rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self.host_group)
        return box[0]

    def all_gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def any(self, *flags: bool) -> list[bool]:
        """For each flag: is it true on any rank? One small host all-reduce."""
        reduced = self.all_reduce([float(flag) for flag in flags], torch.maximum)
        return [bool(value) for value in reduced]

    def all_reduce(
        self, values: list[float], reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> list[float]:
        """Reduce a few numbers over all ranks, by pairs of ranks: log2(size) messages in a row for each.

        gloo's own all-reduce is a ring, with 2 * (size - 1) messages in a row: on 1,024 ranks tens of milliseconds,
        in every step.
        """
        box = torch.tensor(values, dtype=torch.float64)
        paired = 1 << (self.size.bit_length() - 1)  # ranks of the pairs: a power of two
        partner = self.rank ^ paired
        if self.rank >= paired:  # the ranks beyond it hand their values to one that is in it
            dist.send(box, partner, group=self.host_group)
            dist.recv(box, partner, group=self.host_group)
            return box.tolist()
        if partner < self.size:
            box = reduce(box, self._received(box, partner))
        distance = 1
        while distance < paired:
            other = self.rank ^ distance
            sending = dist.isend(box, other, group=self.host_group)
            received = self._received(box, other)
            assert sending is not None
            sending.wait()
            # In the order of ranks, so that sums are equal on all of them.
            box = reduce(box, received) if self.rank < other else reduce(received, box)
            distance *= 2
        if partner < self.size:
            dist.send(box, partner, group=self.host_group)
        return box.tolist()

    def _received(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        box = torch.empty_like(like)
        dist.recv(box, rank, group=self.host_group)
        return box

    def broadcast_from_rank0_(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite the tensors with those of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def once_per_node(self, work: Callable[[], object], name: str) -> None:
        """Run `work` on one rank of each node while the other ranks wait, which has no time-out: for downloads.

        A user error of one node is raised on all ranks. `name` must be new.
        """
        if self.store is None:
            work()
            return
        # Nodes may have different numbers of ranks.
        workers = [rank for rank, local in enumerate(self.all_gather(self.local_rank)) if not local]
        if self.local_rank == 0:
            message = ""
            try:
                work()
            except UserError as error:
                message = str(error)
            self.store.set(f"{name}/{self.rank}", message)
        for rank in workers:
            # Not `wait`, which has a time-out and keeps signal handlers from running.
            while not self.store.check([f"{name}/{rank}"]):
                if self.has_failed():
                    raise RuntimeError(f"another rank failed while this one waited for {name}")
                time.sleep(0.1)
            if message := self.store.get(f"{name}/{rank}").decode():
                raise UserError(message)

    def barrier(self) -> None:
        self.any(False)

    def new_host_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks for the use of one thread. Every rank must call this at the same place."""
        return dist.new_group(backend="gloo") if self.size > 1 else None

    def new_mesh(self, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A device mesh over all ranks; its process groups are destroyed with this world."""
        self.meshes.append(init_device_mesh(self.device.type, shape, mesh_dim_names=names))
        return self.meshes[-1]

    def close(self) -> None:
        if self.watch:
            self.watch.end()  # this rank is past its last collective, so the others may exit
        if self.size > 1 and dist.is_initialized():
            self.barrier()
            if self.owns_group:
                dist.destroy_process_group()
            else:
                dist.destroy_process_group(self.host_group)
            self._forget_groups()

    def _forget_groups(self) -> None:
        """Drop references to process groups: they keep sockets and busy threads, and DTensor's caches hold meshes."""
        for mesh in self.meshes:
            getattr(mesh, "_pg_registry", {}).clear()
        # A later world would find meshes of this one there, with destroyed groups.
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()

    def has_failed(self) -> bool:
        """Whether a rank has failed."""
        try:
            return self.store is not None and self.store.check([FIRST_FAILURE])
        except RuntimeError:  # the store is gone with its host
            return True

    def failed_first(self, error: BaseException) -> tuple[int, str]:
        """Called by a rank that fails; returns the rank that failed first, and why. Later failures follow from it."""
        first = f"{self.rank} {reason_of(error)}"
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone with its host
                first = self.store.compare_set(FIRST_FAILURE, "", first).decode()
        rank, _, reason = first.partition(" ")
        return int(rank), reason

    def said_why(self, code: int) -> None:
        """Called by the rank that failed first, before it exits with this code and after it has said why."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):
                self.store.set(SAID_WHY, str(code))

    def wait_for_first(self, code: int) -> int:
        """Called by other ranks that fail: torchrun would end the first one if they exited before it has said why.

        Returns the exit code of the first one, else `code`.
        """
        deadline = time.monotonic() + REPORT_SECONDS
        with contextlib.suppress(RuntimeError):
            while self.store is not None and time.monotonic() < deadline:
                if self.store.check([SAID_WHY]):
                    return int(self.store.get(SAID_WHY))
                time.sleep(0.02)
        return code


def _set_job_id() -> None:
    """Let the first attempt of an elastic job choose its id, which lives as long as the meeting point on node 0."""
    host, _, port = os.environ[ELASTIC].rpartition(":")
    wait = timedelta(seconds=60)
    store = dist.TCPStore(host, int(port), is_master=False, timeout=wait)  # type: ignore[attr-defined]
    os.environ[JOB_ID] = store.compare_set(JOB_ID, "", uuid.uuid4().hex).decode()


def _node() -> str:
    return os.environ.get("GROUP_RANK", "0") + os.uname().nodename


def _pick_device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("device=cuda, but torch sees no GPU here. Set device=auto or device=cpu.")
    _expandable_segments()
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _expandable_segments() -> None:
    """Packs differ in size: fixed segments fragment, which cost a fifth of a GPU's memory in our benchmarks."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


LOGGER = logging.getLogger("mvp_engine")
FRAMES = 8  # the innermost ones of each rank are shown
# A rank whose innermost frames are of these files waits for other ranks.
COLLECTIVES = ("torch/distributed/", "mvp_engine/distributed/")


class HangWatch:
    """A context in which a step that takes longer than `seconds` is reported, once; None: no step is."""

    def __init__(self, seconds: float | None, world: World, level: int = logging.WARNING) -> None:
        """`level`: of the report in the log."""
        self.seconds = seconds
        self.world = world
        self._level = level
        self._at: float | None = None  # of the last beat
        self._step = 0
        self._what = "step"
        self._ended = threading.Event()
        self._main = threading.get_ident()

    def __enter__(self) -> HangWatch:
        self._main = threading.get_ident()
        if self.seconds is not None:
            threading.Thread(target=self._watch, name="mvp-hang", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def beat(self, step: int, what: str = "step") -> None:
        """A step begins, or a batch of an evaluation, or another numbered thing."""
        self._step = step
        self._what = what
        self._at = time.monotonic()

    def pause(self) -> None:
        """Nothing runs until the next beat."""
        self._at = None

    def _watch(self) -> None:
        assert self.seconds is not None
        reported: float | None = None
        while not self._ended.wait(min(1.0, self.seconds / 4)):
            began = self._at
            if began is None or time.monotonic() - began <= self.seconds:
                continue
            try:
                if began != reported:
                    self._report(self.seconds)
                reported = began
                self._answer()  # again and again, for ranks that are late after this one
            except RuntimeError as error:  # the store is gone with its host
                LOGGER.warning(
                    "%s %d hangs; the other ranks gave no answer: %s",
                    self._what,
                    self._step,
                    error,
                )
                return

    def _answer(self) -> dict[str, Any]:
        """Where this rank is now, written to the store."""
        own = {
            "time": time.time(),
            "step": self._step,
            "what": self._what,
            "stack": _stack(self._main),
        }
        if self.world.store is not None:
            self.world.store.set(_key(self.world.rank), json.dumps(own))
        return own

    def _report(self, seconds: float) -> None:
        found = {self.world.rank: self._answer()}
        # Other ranks began the step, and so are late, at other times.
        deadline = time.monotonic() + seconds / 2 + 2.0
        while len(found) < self.world.size and not self._ended.wait(0.2):
            self._answer()
            found = self._answers(seconds)
            if time.monotonic() > deadline:
                break
        if self.world.rank == min(found) and not self._ended.is_set():
            LOGGER.log(self._level, "%s", describe(found, self.world.size, seconds))

    def _answers(self, seconds: float) -> dict[int, dict[str, Any]]:
        """What the ranks that are late wrote in the last seconds, by rank."""
        store = self.world.store
        assert store is not None
        found = {}
        for rank in range(self.world.size):
            if store.check([_key(rank)]):
                answer = json.loads(store.get(_key(rank)))
                if answer["time"] > time.time() - seconds:
                    found[rank] = answer
        return found


def describe(found: dict[int, dict[str, Any]], size: int, seconds: float) -> str:
    """Which ranks did not arrive, where they are, and where the others wait for them."""
    waiting = [rank for rank, answer in found.items() if waits(answer["stack"])]
    missing = [rank for rank in found if rank not in waiting]
    silent = [rank for rank in range(size) if rank not in found]
    first = min(found.values(), key=lambda answer: answer["step"])
    lines = [f"{_place(first)} takes longer than {seconds:g} s, half of parallel.timeout"]
    if size > 1:
        if silent:
            lines[0] += f"; {_ranks(silent)} did not answer: stopped, or without a network"
        if missing:
            lines[0] += f"; {_ranks(missing)} did not arrive where the others wait"
        if not silent and not missing:
            lines[0] += "; all ranks wait in collectives, which differ"
    shown: dict[str, list[int]] = {}  # ranks by what they show
    for rank in [*missing, *waiting]:
        what = "in a collective" if rank in waiting else "at"
        stack = "".join(found[rank]["stack"])
        shown.setdefault(f"in {_place(found[rank])}, {what}:\n{stack}", []).append(rank)
    lines += [f"{_ranks(ranks)} {text.rstrip()}" for text, ranks in shown.items()]
    return "\n".join(lines)


def _place(answer: dict[str, Any]) -> str:
    return f"{answer['what']} {answer['step']}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    names = ", ".join(str(rank) for rank in ranks[:8])
    return f"{count(len(ranks), 'rank')} ({names}{', ...' if len(ranks) > 8 else ''})"


def waits(stack: list[str]) -> bool:
    """Whether the innermost frames are those of a collective."""
    return any(place in frame for frame in stack[-2:] for place in COLLECTIVES)


def _stack(thread: int) -> list[str]:
    """The innermost frames of a thread, as a traceback prints them."""
    frame = sys._current_frames().get(thread)
    return traceback.format_stack(frame)[-FRAMES:] if frame else []


def _key(rank: int) -> str:
    return f"hang/{rank}"
