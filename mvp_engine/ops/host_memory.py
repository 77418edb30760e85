"""Memory of the host: how much is left, and pinned memory, which copies to and from a GPU need to run in parallel.

Pinned memory is registered with CUDA after it is allocated: torch's own pinned allocations have sizes of powers of two,
which would need up to twice the memory.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mvp_engine.errors import UserError

GIB = 2**30


def pinned_zeros(shape: Sequence[int], dtype: torch.dtype, key: str, fix: str) -> Tensor:
    """Zeros on the host, pinned; `key` and `fix` are for the error where that fails."""
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
            f"{key}: {size / GIB:.2f} GiB of host memory cannot be pinned (CUDA error {code}). {fix}"
        )
    # The tensor holds the array, and the array the pages: they are freed after this.
    finalizer = weakref.finalize(array, _unregister, address, torch.cuda.current_device())
    finalizer.atexit = False
    return torch.from_numpy(array).view(dtype).view(tuple(shape))


def _unregister(address: int, device: int) -> None:
    # Garbage collection may run this in a thread whose current device is another one.
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # a copy may still read or write it
        torch.cuda.cudart().cudaHostUnregister(address)


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
