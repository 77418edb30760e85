"""The CUDA context of this process, created by a thread while the process imports torch: both take seconds."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

DRIVER = "libcuda.so.1"


@contextmanager
def created_meanwhile(device: str) -> Iterator[None]:
    """A context for imports, in which a thread creates the context that torch will use, unless `device` is cpu.

    The thread has ended when the context is left, also by an error: no fork and no exit of the process meets it.
    """
    if device == "cpu":
        yield
        return
    thread = threading.Thread(target=_create, name="mvp-cuda-context", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _create() -> None:
    """Retain the primary context of this rank's GPU; where it cannot be created, torch will say why."""
    try:
        driver = ctypes.CDLL(DRIVER)  # its calls release the GIL
    except OSError:
        return  # no GPU
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), local_rank):
        return
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
