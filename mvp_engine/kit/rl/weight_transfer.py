"""Sending weights to vLLM servers through its weight-transfer API: by files, CUDA IPC or NCCL.

A transfer holds what was sent last, so that a server that was restarted gets it again: files hold it on disk, the
others in host memory. The receiving ends are vLLM's own, and `vllm_plugin.py` for files.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import pickle
import shutil
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.errors import UserError
from mvp_engine.kit.rl.rollout import Buckets
from mvp_engine.kit.rl.server import Server, ServerGone
from mvp_engine.kit.rl.vllm_plugin import BACKEND

JOIN_SECONDS = 120.0  # for all workers of a server to join a communicator


class Transfer(ABC):
    """One way into servers. `keep` takes the weights of a version; `send` gives them to one server, again if asked."""

    backend: str  # of vLLM's --weight-transfer-config
    hint = ""  # what a server needs besides, in the error for one that refuses

    @abstractmethod
    def keep(self, weights: Buckets, version: int) -> None: ...

    def join(self, server: Server) -> None:
        """Called once for each process of a server, before the first update."""
        server.post("/init_weight_transfer_engine", {"init_info": {}})

    @abstractmethod
    def send(self, server: Server) -> None:
        """The updates of one server, between its start and its end of an update."""

    @abstractmethod
    def close(self) -> None:
        """Free what is kept."""


class FileTransfer(Transfer):
    """Weights in safetensors files, in a folder that trainer and servers share and that no other trainer uses.

    Only the last version is kept.
    """

    backend = BACKEND
    hint = "with this package in the server's environment (pip install --no-deps mvp-engine)"

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        self.files: list[Path] = []

    def keep(self, weights: Buckets, version: int) -> None:
        from safetensors.torch import save_file

        # Of this run, or of one that was killed; removed when the new files are complete.
        old = list(self.folder.glob("version-*"))
        target = self.folder / f"version-{version}-{uuid.uuid4().hex[:8]}"
        target.mkdir(parents=True)
        files: list[Path] = []
        for bucket in weights:
            file = target / f"{len(files):05d}.safetensors"
            # Copies: safetensors refuses tensors that share memory.
            save_file({name: tensor.contiguous().clone() for name, tensor in bucket}, file)
            files.append(file)
        self.files = files
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)

    def send(self, server: Server) -> None:
        for file in self.files:
            server.post("/update_weights", {"update_info": {"path": str(file)}})

    def close(self) -> None:
        if self.files:
            shutil.rmtree(self.files[0].parent, ignore_errors=True)
            with suppress(OSError):  # others wrote into it
                self.folder.rmdir()
        self.files = []


@dataclass
class Packed:
    """The tensors of one bucket as bytes, one after the other, in host memory."""

    info: dict[str, Any]  # names, dtype_names, shapes
    sizes: list[int]  # bytes of each tensor
    data: Tensor

    @classmethod
    def of(cls, bucket: list[tuple[str, Tensor]], memory: Tensor | None) -> Packed:
        """A copy of the bucket, in `memory` where that has its size."""
        # The receiver views slices of the bytes as their type: offsets must be multiples of its size.
        ordered = sorted(bucket, key=lambda pair: -pair[1].element_size())
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in ordered]
        if memory is None or memory.numel() != sum(sizes):
            memory = torch.empty(
                sum(sizes), dtype=torch.uint8, pin_memory=torch.cuda.is_available()
            )
        for part, (_, tensor) in zip(memory.split(sizes), ordered, strict=True):
            part.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8), non_blocking=True)
        info = {
            "names": [name for name, _ in ordered],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
            "shapes": [list(tensor.shape) for _, tensor in ordered],
        }
        return cls(info, sizes, memory)


class DeviceTransfer(Transfer):
    """What transfers from GPU to GPU share: packed buckets in pinned host memory."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UserError(
                f"rollout.sync={self.backend} needs a GPU in the controller's process: set rollout.sync=file"
            )
        self.buckets: list[Packed] = []

    def keep(self, weights: Buckets, version: int) -> None:
        old = self.buckets
        self.buckets = []
        for index, bucket in enumerate(weights):
            memory = old[index].data if index < len(old) else None
            self.buckets.append(Packed.of(bucket, memory))
        torch.cuda.synchronize()  # the copies to the host

    def close(self) -> None:
        self.buckets = []


class IPCTransfer(DeviceTransfer):
    """Weights in a buffer of the controller on each of its GPUs, which workers on the same GPUs open by CUDA IPC."""

    backend = "ipc"
    hint = "and the environment variable VLLM_ALLOW_INSECURE_SERIALIZATION=1"

    def join(self, server: Server) -> None:
        server.post("/init_weight_transfer_engine", {"init_info": {"packed": True}})

    def send(self, server: Server) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        largest = max(bucket.data.numel() for bucket in self.buckets)
        buffers = [
            torch.empty(largest, dtype=torch.uint8, device=f"cuda:{index}")
            for index in range(torch.cuda.device_count())
        ]
        handles = {}
        for buffer in buffers:
            uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
            handles[uuid] = reduce_tensor(buffer)[1]
        pickled = base64.b64encode(pickle.dumps(handles)).decode()
        for bucket in self.buckets:
            for buffer in buffers:
                buffer[: bucket.data.numel()].copy_(bucket.data, non_blocking=True)
            for buffer in buffers:
                torch.cuda.synchronize(buffer.device)
            # The answer comes when all workers have copied: the buffer is free again.
            info = {**bucket.info, "tensor_sizes": bucket.sizes, "ipc_handles_pickled": pickled}
            server.post("/update_weights", {"update_info": info})
        del buffers
        torch.cuda.ipc_collect()


class NCCLTransfer(DeviceTransfer):
    """Weights broadcast by the controller's GPU to all workers of a server. Their GPUs must be others."""

    backend = "nccl"

    def __init__(self) -> None:
        super().__init__()
        self.communicators: dict[Server, Communicator] = {}

    def join(self, server: Server) -> None:
        self._leave(server)
        size = 1 + int(server.get("/get_world_size")["world_size"])
        unique_id = Communicator.new_id()
        info = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": size,
            "packed": True,
            "packed_buffer_size_bytes": 2**62,  # each bucket is one broadcast
            "packed_num_buffers": 1,
        }
        request = _in_thread(server.post, "/init_weight_transfer_engine", {"init_info": info})
        joined = _in_thread(Communicator, unique_id, 0, size)
        _both(server, request, joined)
        self.communicators[server] = joined.result()

    def send(self, server: Server) -> None:
        communicator = self.communicators[server]
        for bucket in self.buckets:
            data = bucket.data.to("cuda", non_blocking=True)
            request = _in_thread(server.post, "/update_weights", {"update_info": bucket.info})
            sent = _in_thread(communicator.broadcast, data)
            try:
                _both(server, request, sent)
            except BaseException:
                self._leave(server)
                raise

    def _leave(self, server: Server) -> None:
        communicator = self.communicators.pop(server, None)
        if communicator is not None:
            communicator.abort()

    def close(self) -> None:
        for server in list(self.communicators):
            self._leave(server)
        super().close()


def _in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """The result of a call in a thread that nobody has to wait for: it may hang in NCCL with a server that is gone."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001 - whoever reads the result gets it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _both(server: Server, request: Future[Any], ours: Future[Any]) -> None:
    """Wait for the request and our side of it; the request's error comes first, since it is the reason."""
    until = time.monotonic() + JOIN_SECONDS
    while not (request.done() and ours.done()):
        if request.done() and request.exception() is not None:
            break
        if time.monotonic() > until:
            raise ServerGone(f"{server.url}: no NCCL connection for {JOIN_SECONDS:g} s")
        time.sleep(0.001)
    request.result()
    ours.result()


def transfer_of(sync: str, folder: str | Path) -> Transfer:
    """The transfer of `rollout.sync`."""
    match sync:
        case "file":
            return FileTransfer(folder)
        case "ipc":
            return IPCTransfer()
        case "nccl":
            return NCCLTransfer()
    raise UserError(f"rollout.sync={sync}: vLLM servers get weights by file, ipc or nccl")


# An NCCL communicator with processes that are not ranks of ours: vLLM's workers join by the same unique id.
#
# torch's process groups would need a store and torch's own handshake at both ends. This is NCCL's C API, of the library
# that torch has loaded.

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
