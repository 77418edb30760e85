"""An NCCL communicator with processes that are not ranks of ours: vLLM's workers join by the same unique id.

torch's process groups would need a store and torch's own handshake at both ends. This is NCCL's C API, of the library
that torch has loaded.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

_UINT8 = 1  # ncclDataType_t
_FLOAT32 = 7
_SUM = 0  # ncclRedOp_t


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL("libnccl.so.2")
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), integer, _UniqueId, integer]
    library.ncclAllReduce.argtypes = [pointer, pointer, size, integer, integer, pointer, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, size, integer, integer, pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    library.ncclGetErrorString.argtypes = [integer]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _call(name: str, *args: Any) -> None:
    code = getattr(_library(), name)(*args)
    if code:
        raise RuntimeError(f"{name}: {_library().ncclGetErrorString(code).decode()}")


class Communicator:
    """This process as one rank of a communicator, on the current CUDA device."""

    def __init__(self, unique_id: bytes, rank: int, size: int) -> None:
        """Returns when all ranks have joined."""
        self.handle: ctypes.c_void_p | None = ctypes.c_void_p()
        one = _UniqueId.from_buffer_copy(unique_id)
        _call("ncclCommInitRank", ctypes.byref(self.handle), size, one, rank)
        # vLLM's workers begin with an all-reduce of one element.
        first = torch.zeros(1, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        address = first.data_ptr()
        _call("ncclAllReduce", address, address, 1, _FLOAT32, _SUM, self.handle, stream)
        torch.cuda.current_stream().synchronize()

    @staticmethod
    def new_id() -> bytes:
        one = _UniqueId()
        _call("ncclGetUniqueId", ctypes.byref(one))
        return bytes(one)

    def broadcast(self, data: Tensor, root: int = 0) -> None:
        """Bytes of one rank to all; returns when they are sent."""
        stream = torch.cuda.current_stream()
        address = data.data_ptr()
        size = data.numel()
        _call(
            "ncclBroadcast", address, address, size, _UINT8, root, self.handle, stream.cuda_stream
        )
        stream.synchronize()

    def abort(self) -> None:
        """End the communicator, also where a rank is gone and a broadcast waits for it."""
        if self.handle is not None:
            _call("ncclCommAbort", self.handle)
            self.handle = None
