"""The processes of a job: who am I, who else is there, on which device, and small agreements between us.

A single process needs no process group: every call here is then free. Host-side agreements go over gloo, so they
never wait for the GPU.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from mvp_engine import PARENT
from mvp_engine.errors import UserError

_FIRST_FAILURE = "first_failure"


@dataclass
class World:
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    host_group: dist.ProcessGroup | None = None  # gloo, for the main thread's agreements
    store: PrefixStore | None = None
    watch: _Watch | None = None
    meshes: list[DeviceMesh] = field(default_factory=list)

    @classmethod
    def join(cls, device: str = "auto", timeout: float = 600.0) -> World:
        """Join the job that torchrun's environment variables describe, or be alone."""
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
            world.watch = _Watch(world.rank)
        if size > 1:
            # NCCL refuses two ranks on one GPU; gloo carries CUDA tensors too.
            own_gpu = world.device.type == "cuda" and local_size <= torch.cuda.device_count()
            # torchrun may keep its store over a restart: the dead workers' addresses must not be found in it.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            world.store = PrefixStore(f"mvp_engine/{attempt}", next(rendezvous("env://"))[0])
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if own_gpu else "gloo",
                store=world.store,
                rank=world.rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
                device_id=world.device if own_gpu else None,
            )
            world.host_group = world.new_host_group()
            here = _node()
            siblings = [pid for node, pid in world.all_gather((here, os.getpid())) if node == here]
            if world.watch:
                world.watch.siblings = siblings
        return world

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The `value` of one rank, on every rank."""
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
        """For each flag: is it true on any rank?"""
        if self.size == 1:
            return list(flags)
        box = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self.host_group)
        return [bool(flag) for flag in box.tolist()]

    def broadcast_from_rank0_(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite the tensors with those of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def barrier(self) -> None:
        self.any(False)

    def new_host_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks for the use of one thread. Every rank must call this at the same place."""
        return dist.new_group(backend="gloo") if self.size > 1 else None

    def new_mesh(self, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
        """The ranks as a grid, with process groups along its dimensions that end with this world."""
        self.meshes.append(init_device_mesh(self.device.type, shape, mesh_dim_names=names))
        return self.meshes[-1]

    def close(self) -> None:
        if self.watch:
            self.watch.end()  # this rank is past its last collective, so the others may end as they like
        if self.size > 1 and dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()
            self._forget_groups()

    def _forget_groups(self) -> None:
        """A process group keeps sockets and busy threads until nobody holds it, and DTensor's caches hold meshes."""
        for mesh in self.meshes:
            getattr(mesh, "_pg_registry", {}).clear()
        # A later world would find the meshes of this one in there, with groups that ended.
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()

    def failed_first(self) -> int:
        """Called by a rank that fails: which rank was the first to fail? Later ones are only its echo."""
        if self.store is None:
            return self.rank
        try:
            return int(self.store.compare_set(_FIRST_FAILURE, "", str(self.rank)))
        except (RuntimeError, ValueError):  # the store went down with its host: nothing left to ask
            return self.rank


class _Watch:
    """Ends this process when torchrun or another rank of this machine is gone.

    A collective with a dead rank would never return, and a job whose launcher was killed should not go on unseen. The
    thread knows nothing of the World: the last holder of a process group must not be a thread that ends with Python.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.siblings: list[int] = []  # the processes of this machine's ranks
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mvp-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            gone = [pid for pid in self.siblings if not _alive(pid)]
            # When a rank is gone, most often the broken collective raises by itself, with a better message.
            if not self._ended.wait(4.0 if gone else 0.5) and (gone or os.getppid() != PARENT):
                who = f"process {gone[0]}" if gone else "the launcher"
                print(
                    f"[rank {self.rank}] {who} of this job died; leaving",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)


def _node() -> str:
    return os.environ.get("GROUP_RANK", "0") + os.uname().nodename


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _pick_device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("device=cuda, but torch sees no GPU here. Set device=auto or device=cpu.")
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        # Packs differ in size: memory in fixed segments would break up, by a fifth of a GPU in our benchmarks.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
