"""Optimizer states in memory of the host, pinned where there is a GPU.

Pinned memory is registered with CUDA after it is allocated: torch's own pinned allocations have sizes of powers of two,
which would need up to twice the memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.errors import UserError

GIB = 2**30


def host_zeros_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros on the host with the shape and the placements of a tensor."""
    zeros = _pinned_zeros if torch.cuda.is_available() else torch.zeros
    host = zeros(local_tensor(tensor.detach()).shape, dtype=dtype)
    if not isinstance(tensor, DTensor):
        return host
    # Of a mesh of GPUs, with a local tensor on the host: `DTensor.from_local` would move it to the GPU.
    sharded = torch.empty_like(tensor.detach(), dtype=dtype, device="cpu")
    assert isinstance(sharded, DTensor)
    sharded._local_tensor = host
    return sharded


def host_copy(value: Tensor) -> Tensor:
    """A state on the host: itself if it is there already, in memory that `host_zeros_like` has allocated."""
    local = local_tensor(value)
    is_pinned = local.is_pinned() or not torch.cuda.is_available()
    if local.device.type == "cpu" and is_pinned:
        return value
    copy = host_zeros_like(value, value.dtype)
    local_tensor(copy).copy_(local)
    return copy


def _pinned_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    size = prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    # Whole pages, of this tensor alone: a page cannot be registered twice.
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to register
    array = np.frombuffer(pages, dtype=np.uint8)
    address = array.ctypes.data
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, size, 0))
    if code != 0:
        raise UserError(
            f"optim.offload: {size / GIB:.2f} GiB of host memory cannot be pinned (CUDA error {code}). "
            "Free host memory, set optim.state_dtype=bfloat16 or int8, or leave optim.offload out"
        )
    # The tensor holds the array, and the array the pages: they are freed after this.
    finalizer = weakref.finalize(array, runtime.cudaHostUnregister, address)
    finalizer.atexit = False
    return torch.from_numpy(array).view(dtype).view(tuple(shape))


# ---- How much fits ------------------------------------------------------------------------------------------------


def check_host_memory(size: int) -> None:
    """Raise for states of this rank that do not fit into the memory of this machine, before its first step.

    The other ranks of the machine need about as much.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = ranks * size
    available = available_host_memory()
    if available is not None and needed > available:
        raise UserError(
            f"optim.offload keeps {needed / GIB:.1f} GiB of optimizer states in the memory of this machine, for "
            f"{ranks} of its ranks, and {available / GIB:.1f} GiB are available. Set optim.state_dtype=bfloat16 or "
            "int8, shard the model (parallel.shard), or leave optim.offload out"
        )


def available_host_memory() -> int | None:
    """Bytes that the machine, or this container, has left; None where that is not known."""
    found: list[int] = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    for cgroup in CGROUPS:
        if (left := cgroup.available()) is not None:
            found.append(left)
    return min(found, default=None)


@dataclass(frozen=True)
class Cgroup:
    """The files of a container's memory limit, in one of the two versions of cgroups."""

    folder: Path
    limit: str
    used: str
    cached: str  # names in memory.stat; file cache is used memory that can be freed, except for shared memory
    shared: str

    def available(self) -> int | None:
        limit = self.folder / self.limit
        if not limit.is_file() or (text := limit.read_text().strip()) == "max":
            return None
        used = int((self.folder / self.used).read_text())
        lines = (self.folder / "memory.stat").read_text().splitlines()
        sizes = {name: int(size) for name, size in map(str.split, lines)}
        return int(text) - used + sizes[self.cached] - sizes[self.shared]


CGROUPS = (
    Cgroup(Path("/sys/fs/cgroup"), "memory.max", "memory.current", "file", "shmem"),
    Cgroup(
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_cache",
        "total_shmem",
    ),
)
