"""Rollouts by vLLM servers over HTTP. Weights come by vLLM's weight-transfer API, or as adapters.

vLLM is installed in another Python environment than the trainer. Requests that run while weights change continue with
the new ones; the server says which tokens were written by which.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import io
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mvp_engine.errors import UserError
from mvp_engine.kit.rl.rollout import Sampling
from mvp_engine.kit.rl.server_rollout import (
    LOGGER,
    AdapterFiles,
    Bias,
    Completed,
    Files,
    Server,
    ServerGone,
    ServerRefused,
    ServerRollout,
    Transfer,
    Weights,
    data_url,
)
from mvp_engine.kit.rl.vllm_plugin import BACKEND

if TYPE_CHECKING:
    from mvp_engine.kit.rl.prompts import Prompt

GENERATE = "/inference/v1/generate"  # from token ids to token ids


class VLLMRollout(ServerRollout):
    """A `Rollout` of vLLM servers. `folder`: where `sync` writes weights; the servers must see the same files."""

    adapter_routes = "/v1"
    transfer: VLLMTransfer | AdapterFiles

    def __init__(self, urls: list[str], sync: str, folder: str | Path, **options: Any) -> None:
        super().__init__(urls, transfer_of(sync, folder), **options)
        self._joined: set[Server] = set()  # servers that `transfer` is connected to

    def complete(
        self, server: Server, prompt: Prompt, how: Sampling, *, label: str, seed: int, bias: Bias
    ) -> Completed:
        body: dict[str, Any] = {
            "token_ids": prompt.text_ids,
            "return_token_ids": True,  # the prompt with expanded media
            "sampling_params": {
                **self.sampling_params(how, bias),
                "max_tokens": how.max_new_tokens,
                "seed": seed,
                "top_k": 0,
                "logprobs": 0,
                "detokenize": False,
            },
        }
        if prompt.media:
            body["content_parts"] = [
                {"type": f"{item['type']}_url", "url": data_url(item, prompt.where)}
                for item in prompt.media
            ]
        if self.transfer.is_adapter:
            body["model"] = label
        answer = server.post(GENERATE, body)
        choice = answer["choices"][0]
        tokens = choice["token_ids"]
        spans = choice.get("weight_versions") or []
        if self.transfer.is_adapter:
            spans = [{"version": label, "start": 0, "end": len(tokens)}]
        return Completed(
            tokens,
            [token["logprob"] for token in choice["logprobs"]["content"]],
            choice["finish_reason"],
            spans,
            answer.get("prompt_token_ids"),
            experts_of(choice.get("routed_experts")),
        )

    def server_version(self, server: Server) -> str:
        version: str = server.get("/weight_info")["weight_version"]
        if not self.transfer.is_adapter:
            return version
        if version.startswith("mvp-"):
            raise UserError(
                f"generation.sync=adapter: {server.url} has weights that another training sent, and adapters belong to "
                "the model's own: start the server again"
            )
        models = [one["id"] for one in server.get("/v1/models")["data"]]
        return self.label if self.label in models else version

    def send(self, server: Server, server_version: str) -> None:
        is_ours = server_version.startswith(self.name) or self.transfer.is_adapter
        if server in self._joined and not is_ours:
            LOGGER.warning(
                "rollout server %s has other weights (version %s): it was restarted, or another trainer uses it. "
                "%s is sent again",
                server.url,
                server_version,
                self.label,
            )
            self._joined.discard(server)
        is_paused = server.get("/is_paused")["is_paused"]  # it sleeps, or its trainer was killed
        if is_paused:
            server.post("/wake_up?tags=weights")
        if isinstance(self.transfer, VLLMTransfer):
            if server not in self._joined:
                self.transfer.join(server)
            # Requests of a trainer that was killed would never finish.
            server.post(f"/pause?mode={'abort' if is_paused else 'keep'}")
            self._update(server, self.transfer)
        else:
            self.send_adapter(server)
        if is_paused:
            server.post("/wake_up?tags=kv_cache")
        server.post("/resume")

    def _update(self, server: Server, transfer: VLLMTransfer) -> None:
        # If this trainer is killed in the update, half of the new weights must not have the old version.
        server.post("/update_weight_version", {"new_version": f"{self.name}-incomplete"})
        self._joined.discard(server)  # until it is done
        try:
            server.post("/start_weight_update")
        except ServerRefused:  # an update is active, whose trainer was killed: end it
            server.post("/finish_weight_update")
            server.post("/start_weight_update")
        transfer.send(server)
        server.post("/finish_weight_update", {"weight_version": self.label})
        self._joined.add(server)

    def rest(self, server: Server) -> None:
        config = server.get("/server_info?config_format=json")["vllm_config"]["model_config"]
        if config["enable_sleep_mode"]:
            server.post("/sleep?level=1")

    def refused(self, error: ServerRefused) -> UserError:
        if error.status == 400:
            return UserError(f"generation.urls: {error}")
        start = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs "
        if isinstance(self.transfer, VLLMTransfer):
            start += f'--weight-transfer-config \'{{"backend": "{self.transfer.backend}"}}\''
        else:
            start = f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 {start}--enable-lora --max-loras 2 --max-lora-rank RANK"
        hint = f" {self.transfer.hint}" if self.transfer.hint else ""
        return UserError(f"generation.urls: {error}. Start the server as: {start}{hint}")


def experts_of(encoded: str | None) -> Tensor | None:
    """The experts of each token, from the bytes of a .npy file as base64."""
    if encoded is None:
        return None
    return torch.from_numpy(np.load(io.BytesIO(base64.b64decode(encoded))).astype(np.int16))


# Sending weights to vLLM servers through its weight-transfer API: by files, CUDA IPC or NCCL.
#
# The receiving code is part of vLLM; for files it is `vllm_plugin.py`.

JOIN_SECONDS = 120.0  # a limit for joining a communicator, and for one broadcast


class VLLMTransfer(Transfer):
    backend: str  # the name in vLLM's --weight-transfer-config

    def join(self, server: Server) -> None:
        """Connect to a server, before its first update and after it was restarted."""
        server.post("/init_weight_transfer_engine", {"init_info": {}})

    def send(self, server: Server) -> None:
        """Send the weights, after the server has started an update and before it finishes the update."""
        raise NotImplementedError


class FileTransfer(Files, VLLMTransfer):
    backend = BACKEND
    hint = "with this package in the server's environment (pip install --no-deps mvp-engine)"

    def send(self, server: Server) -> None:
        for file in sorted(self.current.iterdir()):
            server.post("/update_weights", {"update_info": {"path": str(file)}})


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


class DeviceTransfer(VLLMTransfer):
    """The base of transfers from GPU to GPU. It keeps packed buckets in pinned host memory."""

    def __init__(self) -> None:
        super().__init__()
        if not torch.cuda.is_available():
            raise UserError(
                f"generation.sync={self.backend} needs a GPU in the controller's process: set generation.sync=file"
            )
        self.buckets: list[Packed] = []

    def keep(self, weights: Weights, version: int) -> None:
        assert not callable(weights)
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


def transfer_of(sync: str, folder: str | Path) -> VLLMTransfer | AdapterFiles:
    """Returns the transfer for the value `sync` of the config key `generation.sync`."""
    match sync:
        case "file":
            return FileTransfer(folder)
        case "adapter":
            return AdapterFiles(folder)
        case "ipc":
            return IPCTransfer()
        case "nccl":
            return NCCLTransfer()
    raise UserError(
        f"generation.sync={sync}: vLLM servers get weights by file, adapter, ipc or nccl"
    )


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
