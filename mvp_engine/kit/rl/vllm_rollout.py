"""Rollouts by vLLM servers over HTTP. Weights are sent by vLLM's weight-transfer API.

vLLM is installed in another Python environment than the trainer. With each completion a server returns the version of
the weights that it used. A server that was restarted, or that got weights from another trainer, returns another version
than ours: it then gets our weights again, and the completion is generated again.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import mimetypes
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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mvp_engine.errors import UserError
from mvp_engine.kit.rl.rollout import Buckets, Sample, Sampling
from mvp_engine.kit.rl.server_rollout import (
    BAN,
    LOGGER,
    PROBE,
    Server,
    ServerGone,
    ServerRefused,
    ServerRollout,
    request_seed,
)
from mvp_engine.kit.rl.vllm_plugin import BACKEND

if TYPE_CHECKING:
    from mvp_engine.kit.rl.prompts import Prompt

GENERATE = "/inference/v1/generate"  # from token ids to token ids
MEDIA_TYPES = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs "
    '--weight-transfer-config \'{"backend": "%s"}\''
)


class VLLMRollout(ServerRollout):
    """A `Rollout` of vLLM servers. `folder`: where sync=file writes weights; the servers must see the same files."""

    def __init__(
        self, urls: list[str], *, sync: str = "file", folder: str | Path, **options: Any
    ) -> None:
        super().__init__(urls, **options)
        self.transfer: Transfer = transfer_of(sync, folder)
        # Another trainer, or this run before a resume, may have sent weights with the same number: the random name
        # makes versions differ.
        self.name = f"mvp-{uuid.uuid4().hex[:12]}"
        self.version: int | None = None
        self._joined: set[Server] = set()  # servers that `transfer` is connected to

    @property
    def label(self) -> str:
        """The version of the weights, as it is sent to servers."""
        return f"{self.name}-{self.version}"

    def sync(self, weights: Buckets | None, version: int) -> None:
        """Send weights to all servers. A server that does not answer gets them when it is back."""
        if weights is None:
            raise ValueError("a vLLM server has no weights of the trainer: sync needs them")
        self.transfer.keep(weights, version)
        self.version = version
        self.ready()

    def prepare(self, server: Server) -> None:
        """Send the current weights to a server, unless it has them already."""
        if self.version is None:
            raise RuntimeError(
                "sync comes before generate: the servers have no weights of this run"
            )
        try:
            server_version = server.get("/weight_info")["weight_version"]
            if server_version != self.label:
                self._send(server, server_version)
        except ServerRefused as error:
            raise self._refused(server, error) from None

    def close(self) -> None:
        self.transfer.close()

    def complete(self, server: Server, index: int, prompt: Prompt, how: Sampling) -> list[Sample]:
        parameters = {
            "temperature": how.temperature,
            "max_tokens": how.max_new_tokens,
            "n": how.samples,
            "seed": request_seed(how.seed, prompt),
            "stop_token_ids": list(how.stop),
            "ignore_eos": True,  # only `stop` ends a completion
            "logit_bias": {str(token): BAN for token in self.banned} or None,
        }
        answer = self._generate(server, prompt, parameters)
        self.check_prompt(server, prompt, answer.get("prompt_token_ids"))
        choices = self.choices(server, answer, how)
        return [self._sample(server, index, choice, how) for choice in choices]

    def biased_log_prob(self, server: Server, prompt: Prompt, token: int) -> float:
        parameters = {"temperature": 1.0, "max_tokens": 1, "logit_bias": {str(token): PROBE}}
        answer = self._generate(server, prompt, parameters)
        return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])

    def _generate(self, server: Server, prompt: Prompt, parameters: dict[str, Any]) -> Any:
        # A server's own defaults, such as top_k of the model's generation config, must not apply.
        fixed = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 0, "detokenize": False}
        body = {
            "token_ids": prompt.text_ids,
            "sampling_params": {**fixed, **parameters},
            "return_token_ids": True,  # the prompt with expanded media
        }
        if prompt.media:
            body["content_parts"] = [_content_part(item, prompt.where) for item in prompt.media]
        try:
            return server.post(GENERATE, body)
        except ServerRefused as error:
            raise self._refused(server, error) from None

    def _sample(self, server: Server, index: int, choice: Any, sampling: Sampling) -> Sample:
        versions = {span["version"] for span in choice.get("weight_versions") or []}
        if versions != {self.label}:
            raise ServerGone(
                f"{server.url} generated with other weights ({', '.join(sorted(versions))}), not with {self.label}"
            )
        content = (choice.get("logprobs") or {}).get("content") or []
        assert self.version is not None
        return self.sample(
            server,
            index,
            choice["token_ids"],
            [token["logprob"] for token in content],
            choice["finish_reason"],
            self.version,
            sampling,
        )

    def _send(self, server: Server, server_version: str) -> None:
        if server in self._joined and not server_version.startswith(self.name):
            LOGGER.warning(
                "rollout server %s has other weights (version %s): it was restarted, or another trainer uses it. "
                "Version %s is sent again",
                server.url,
                server_version,
                self.version,
            )
            self._joined.discard(server)
        if server not in self._joined:
            self.transfer.join(server)
        # A server is paused already if its trainer was killed in an update. The requests that wait in it would never
        # finish, so they are aborted.
        is_paused = server.get("/is_paused")["is_paused"]
        server.post(f"/pause?mode={'abort' if is_paused else 'wait'}")
        # If this trainer is killed in the update, half of the new weights must not have the old version.
        server.post("/update_weight_version", {"new_version": f"{self.name}-incomplete"})
        try:
            self._start_update(server)
            self.transfer.send(server)
            server.post("/finish_weight_update", {"weight_version": self.label})
        except BaseException:
            self._joined.discard(server)
            raise
        server.post("/resume")
        self._joined.add(server)

    def _start_update(self, server: Server) -> None:
        try:
            server.post("/start_weight_update")
        except ServerRefused:  # an update is active, whose trainer was killed: end it
            server.post("/finish_weight_update")
            server.post("/start_weight_update")

    def _refused(self, server: Server, error: ServerRefused) -> UserError:
        start = START % self.transfer.backend
        hint = f" {self.transfer.hint}" if self.transfer.hint else ""
        fix = "" if error.status == 400 else f". Start the server as: {start}{hint}"
        return UserError(f"generation.urls: {error}{fix}")


def _content_part(item: dict[str, Any], where: str) -> dict[str, str]:
    kind = item["type"]
    media_type: str | None = MEDIA_TYPES.get(kind)
    if "path" in item:
        data = Path(item["path"]).read_bytes()
        media_type = mimetypes.guess_type(item["path"])[0] or media_type
    elif "bytes" in item:
        data = item["bytes"]
    else:
        data = None
    if data is None or media_type is None:
        raise UserError(
            f"{where}: generation.backend=vllm sends media as files, and this {kind} is none: set "
            "generation.backend=packed"
        )
    encoded = base64.b64encode(data).decode()
    return {"type": f"{kind}_url", "url": f"data:{media_type};base64,{encoded}"}


# Sending weights to vLLM servers through its weight-transfer API: by files, CUDA IPC or NCCL.
#
# A transfer keeps the weights of the last version, so that a server that was restarted can get them again: FileTransfer
# on disk, the others in host memory. The receiving code is part of vLLM; for files it is `vllm_plugin.py`.

JOIN_SECONDS = 120.0  # a limit for joining a communicator, and for one broadcast


class Transfer(ABC):
    """A way to send weights. `keep` stores those of a version; `send` sends them to one server, any number of times."""

    backend: str  # the name in vLLM's --weight-transfer-config
    hint = ""  # a further requirement of servers, for error messages

    @abstractmethod
    def keep(self, weights: Buckets, version: int) -> None: ...

    def join(self, server: Server) -> None:
        """Connect to a server, before its first update and after it was restarted."""
        server.post("/init_weight_transfer_engine", {"init_info": {}})

    @abstractmethod
    def send(self, server: Server) -> None:
        """Send the weights, after the server has started an update and before it finishes the update."""

    @abstractmethod
    def close(self) -> None:
        """Free the weights that are kept."""


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

        # Versions of this run, or of one that was killed. They are removed when the new files are complete.
        old_folders = list(self.folder.glob("version-*"))
        target = self.folder / f"version-{version}-{uuid.uuid4().hex[:8]}"
        target.mkdir(parents=True)
        files: list[Path] = []
        for bucket in weights:
            file = target / f"{len(files):05d}.safetensors"
            # Cloned, since safetensors refuses tensors that share memory.
            save_file({name: tensor.contiguous().clone() for name, tensor in bucket}, file)
            files.append(file)
        self.files = files
        for folder in old_folders:
            shutil.rmtree(folder, ignore_errors=True)

    def send(self, server: Server) -> None:
        for file in self.files:
            server.post("/update_weights", {"update_info": {"path": str(file)}})

    def close(self) -> None:
        if self.files:
            shutil.rmtree(self.files[0].parent, ignore_errors=True)
            with suppress(OSError):  # it is not empty: someone else wrote into it
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
        """Copies a bucket into `memory` if that has the right size, else into new memory."""
        # The receiver views a slice of the bytes as the tensor's dtype, so its offset must be a multiple of the
        # element size: tensors with the largest elements come first.
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
    """The base of transfers from GPU to GPU. It keeps packed buckets in pinned host memory."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UserError(
                f"generation.sync={self.backend} needs a GPU in the controller's process: set generation.sync=file"
            )
        self.buckets: list[Packed] = []

    def keep(self, weights: Buckets, version: int) -> None:
        old_buckets = self.buckets
        self.buckets = []
        for index, bucket in enumerate(weights):
            memory = old_buckets[index].data if index < len(old_buckets) else None
            self.buckets.append(Packed.of(bucket, memory))
        torch.cuda.synchronize()  # wait for the copies to the host

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
            gpu_uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
            handles[gpu_uuid] = reduce_tensor(buffer)[1]
        pickled = base64.b64encode(pickle.dumps(handles)).decode()
        for bucket in self.buckets:
            for buffer in buffers:
                buffer[: bucket.data.numel()].copy_(bucket.data, non_blocking=True)
            for buffer in buffers:
                torch.cuda.synchronize(buffer.device)
            # The server answers when all workers have copied the bucket: then the buffers can hold the next one.
            info = {**bucket.info, "tensor_sizes": bucket.sizes, "ipc_handles_pickled": pickled}
            server.post("/update_weights", {"update_info": info})
        del buffers
        torch.cuda.ipc_collect()


class NCCLTransfer(DeviceTransfer):
    """Weights broadcast by the controller's GPU to all workers of a server, which must run on other GPUs."""

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
            "packed_buffer_size_bytes": 2
            ** 62,  # larger than any bucket, so that each is one broadcast
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
    """Run a function in a daemon thread: a call may hang in NCCL when a server is gone, and must not block the exit."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _both(server: Server, request: Future[Any], nccl_call: Future[Any]) -> None:
    """Wait for a request to a server and for the NCCL call here that belongs to it.

    If both fail, the error of the request is raised, since it is the cause of the other.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    while not (request.done() and nccl_call.done()):
        if request.done() and request.exception() is not None:
            break
        if time.monotonic() > deadline:
            raise ServerGone(f"{server.url}: no NCCL connection for {JOIN_SECONDS:g} s")
        time.sleep(0.001)
    request.result()
    nccl_call.result()


def transfer_of(sync: str, folder: str | Path) -> Transfer:
    """Returns the transfer for the value `sync` of the config key `generation.sync`."""
    match sync:
        case "file":
            return FileTransfer(folder)
        case "ipc":
            return IPCTransfer()
        case "nccl":
            return NCCLTransfer()
    raise UserError(f"generation.sync={sync}: vLLM servers get weights by file, ipc or nccl")


# An NCCL communicator with vLLM's workers, which are not ranks of the trainer. They join it by the same unique id.
#
# A process group of torch would need a store, and torch's handshake at both ends. So this calls the C API of the NCCL
# library that torch has loaded.

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
        """Blocks until all ranks have joined."""
        self.handle: ctypes.c_void_p | None = ctypes.c_void_p()
        nccl_id = _UniqueId.from_buffer_copy(unique_id)
        _call("ncclCommInitRank", ctypes.byref(self.handle), size, nccl_id, rank)
        # vLLM's workers first all-reduce one element, so this rank must too.
        element = torch.zeros(1, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        address = element.data_ptr()
        _call("ncclAllReduce", address, address, 1, _FLOAT32, _SUM, self.handle, stream)
        torch.cuda.current_stream().synchronize()

    @staticmethod
    def new_id() -> bytes:
        nccl_id = _UniqueId()
        _call("ncclGetUniqueId", ctypes.byref(nccl_id))
        return bytes(nccl_id)

    def broadcast(self, data: Tensor, root: int = 0) -> None:
        """Broadcast the bytes of rank `root` to all ranks. Blocks until they are sent."""
        stream = torch.cuda.current_stream()
        address = data.data_ptr()
        size = data.numel()
        _call(
            "ncclBroadcast", address, address, size, _UINT8, root, self.handle, stream.cuda_stream
        )
        stream.synchronize()

    def abort(self) -> None:
        """End the communicator, even if a broadcast waits for a rank that is gone."""
        if self.handle is not None:
            _call("ncclCommAbort", self.handle)
            self.handle = None
