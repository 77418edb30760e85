"""Memory of DataLoader workers: malloc settings, small tensors without shared memory, and shared memory that the worker
frees instead of the reader. And their time: the row of each batch that took longest."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import get_worker_info

# Options of glibc's mallopt.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
SMALL_BYTES = 2**20  # of a tensor that is copied through the pipe of a worker


def start_worker(end_with_rank: Callable[[], None], _: int) -> None:
    """What a worker does first. `end_with_rank`: see `end_with_this_process`."""
    end_with_rank()
    keep_freed_memory()
    ForkingPickler.register(Tensor, _reduce)


def keep_freed_memory() -> None:
    """Configure malloc in a worker to keep what it frees: it needs the same sizes again soon.

    Otherwise the kernel clears the same pages for every batch. Does nothing where libc is not glibc.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc allows
        mallopt(M_TRIM_THRESHOLD, 512 << 20)
        mallopt(M_ARENA_MAX, 1)


def _reduce(tensor: Tensor) -> tuple[Any, ...]:
    """Pickle a small tensor by value.

    Shared memory costs the reader half a millisecond for each tensor, in which it asks the worker for a file.
    """
    is_dense = (
        tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_complex()
    )
    is_small = is_dense and tensor.is_contiguous() and tensor.nbytes <= SMALL_BYTES
    if not is_small or tensor.requires_grad:
        return reduce_tensor(tensor)
    data = bytearray(tensor.flatten().view(torch.uint8).numpy())
    return _rebuild, (data, tensor.dtype, tensor.shape)


def _rebuild(data: bytearray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shape)


class SlowRow(NamedTuple):
    """The row of a batch that took longest to load."""

    row: Any  # a sample's index, where it is in its file, or collate_fn
    row_seconds: float
    batch_seconds: float  # of all rows together
    worker: int | None  # None: the training process


class RowTimer(threading.local):
    """Times the rows that this thread loads, one after another, until their batch is complete."""

    def __init__(self) -> None:
        self._row: Any = None  # the one that is being loaded
        self._began = 0.0
        self._seconds = 0.0  # of the rows before it
        self._slowest: tuple[Any, float] = (None, -1.0)

    def begin(self, row: Any) -> None:
        """The row before it, if any, is loaded."""
        now = time.perf_counter()
        if self._row is not None:
            seconds = now - self._began
            self._seconds += seconds
            if seconds > self._slowest[1]:
                self._slowest = self._row, seconds
        self._row = row
        self._began = now

    def end(self) -> SlowRow:
        """The batch is complete: its slowest row."""
        self.begin(None)
        row, seconds = self._slowest
        info = get_worker_info()
        found = SlowRow(row, seconds, self._seconds, info.id if info else None)
        self._seconds = 0.0
        self._slowest = (None, -1.0)
        return found


ROW_TIMER = RowTimer()


class LoadedBatch(NamedTuple):
    """What a DataLoader yields: a batch, and which row it took longest to load."""

    batch: Any
    slow_row: SlowRow


class KeepLastBatches:
    """Calls a function that makes a batch; in a worker it keeps references to the last results.

    The reader maps a result in shared memory. If it held the last reference it would free that memory, which takes
    25 ms for 130 MB with the GIL held. So the worker frees it instead.
    """

    LAST = 3  # two batches that torch prefetches from a worker, and one that is being copied to the GPU

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.results: deque[Any] = deque(maxlen=self.LAST)

    def __call__(self, value: Any) -> LoadedBatch:
        ROW_TIMER.begin("collate_fn")
        result = self.function(value)
        if get_worker_info():
            self.results.append(result)
        return LoadedBatch(result, ROW_TIMER.end())
