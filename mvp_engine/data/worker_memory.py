"""Memory of DataLoader workers: malloc settings, and shared memory that the worker frees instead of the reader."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

# Options of glibc's mallopt.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


def keep_freed_memory(_: int) -> None:
    """Configure malloc in a worker to keep what it frees: it needs the same sizes again soon.

    Otherwise the kernel clears the same pages for every batch. Does nothing where libc is not glibc.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc allows
        mallopt(M_TRIM_THRESHOLD, 512 << 20)
        mallopt(M_ARENA_MAX, 1)


class KeepLastBatches:
    """Calls a function; in a worker it keeps references to the last results.

    The reader maps a result in shared memory. If it held the last reference it would free that memory, which takes
    25 ms for 130 MB with the GIL held. So the worker frees it instead.
    """

    LAST = 3  # two batches that torch prefetches from a worker, and one that is being copied to the GPU

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.results: deque[Any] = deque(maxlen=self.LAST)

    def __call__(self, value: Any) -> Any:
        result = self.function(value)
        if get_worker_info():
            self.results.append(result)
        return result
