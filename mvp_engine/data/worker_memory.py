"""Memory of DataLoader workers: malloc settings, and shared memory that the worker frees instead of the reader."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info


def keep_memory(_: int) -> None:
    """In a worker: what it frees it needs again soon, in the same sizes. Where malloc can be told (glibc), it keeps
    that instead of giving it back, and the system need not clear the same pages for every batch."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in (
            (_MMAP_FROM, 32 << 20),
            (_KEEP, 512 << 20),
            (_ARENAS, 1),
        ):  # the first allows no more
            mallopt(option, value)


_KEEP, _MMAP_FROM, _ARENAS = -1, -3, -8  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX


class Kept:
    """Calls a function; a worker keeps the last of what it gave a while. So the reader, who has it in shared memory,
    need not give that memory back, which takes 25 ms for 130 MB, and Python stands still meanwhile: the worker does."""

    LAST = 3  # two that torch asks a worker for ahead, and one that is on its way to the GPU

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.given: deque[Any] = deque(maxlen=self.LAST)

    def __call__(self, value: Any) -> Any:
        result = self.function(value)
        if get_worker_info():
            self.given.append(result)
        return result
