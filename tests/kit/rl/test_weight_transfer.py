"""Weights on their way into vLLM servers: packed buckets, the plugin inside a server, CUDA IPC and NCCL."""

from __future__ import annotations

import base64
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import user_error
from pydantic import ValidationError
from safetensors.torch import save_file

from mvp_engine.kit.rl import vllm_plugin
from mvp_engine.kit.rl.server_rollout import server_rollout
from mvp_engine.kit.rl.settings import GenerationSettings
from mvp_engine.kit.rl.sglang_rollout import SGLangRollout
from mvp_engine.kit.rl.vllm_rollout import (
    Communicator,
    IPCTransfer,
    NCCLTransfer,
    Packed,
    VLLMRollout,
    transfer_of,
)
from mvp_engine.worker.worker import checksum


def bucket():
    g = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(3, 5, generator=g).bfloat16(),
        torch.randn(7, generator=g),
        torch.randn(4, 2, generator=g).t(),
        torch.randint(9, (3,), generator=g, dtype=torch.int8),
        torch.randn((), generator=g),
    ]
    return [(f"tensor{index}", tensor) for index, tensor in enumerate(tensors)]


def unpacked(data, info, sizes):
    """As vLLM 0.32 unpacks: each slice of the bytes is viewed as its type, which needs aligned offsets."""
    found = {}
    for name, dtype, shape, part in zip(
        info["names"], info["dtype_names"], info["shapes"], data.split(sizes), strict=True
    ):
        found[name] = part.view(getattr(torch, dtype)).view(shape)
    return found


def test_packed_bucket_of_mixed_dtypes_is_unpacked_with_the_same_bits():
    packed = Packed.of(bucket(), None)
    found = unpacked(packed.data, packed.info, packed.sizes)
    assert all(torch.equal(found[name], tensor) for name, tensor in bucket())
    again = Packed.of([(name, tensor + 1) for name, tensor in bucket()], packed.data)
    assert again.data.data_ptr() == packed.data.data_ptr()  # memory is used again
    found = unpacked(again.data, again.info, again.sizes)
    assert all(torch.equal(found[name], tensor + 1) for name, tensor in bucket())


@pytest.fixture
def vllm(monkeypatch):
    """What the plugin imports of vLLM 0.32, with its calls in order."""
    calls: list[str] = []
    registered: dict[str, Any] = {}

    class WeightTransferEngine:
        def __class_getitem__(cls, _):
            return cls

        def __init__(self, model):
            self.model = model
            self.model_config = None
            self.device = torch.device("cpu")

        def parse_update_info(self, update):
            return self.update_info_cls(**update)  # type: ignore[attr-defined]

    class Factory:
        _registry = registered

        @classmethod
        def register_engine(cls, name, engine):
            if name in registered:
                raise ValueError(name)
            registered[name] = engine

    class ParallelLMHead(torch.nn.Module):
        quant_method = SimpleNamespace(
            process_weights_after_loading=lambda module: calls.append("pack head")
        )

    base = "vllm.distributed.weight_transfer"
    contents: dict[str, dict[str, Any]] = {
        f"{base}.factory": {"WeightTransferEngineFactory": Factory},
        f"{base}.base": {
            "WeightTransferEngine": WeightTransferEngine,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.model_executor.layers.vocab_parallel_embedding": {"ParallelLMHead": ParallelLMHead},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: calls.append("start"),
            "finalize_layerwise_reload": lambda model, config: calls.append("finish"),
        },
    }
    for name, values in contents.items():
        parts = name.split(".")
        for length in range(1, len(parts)):
            monkeypatch.setitem(
                sys.modules, ".".join(parts[:length]), ModuleType(parts[length - 1])
            )
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(calls=calls, registered=registered, ParallelLMHead=ParallelLMHead)


def test_vllm_plugin_loads_a_file_and_packs_a_tied_head_again(vllm, tmp_path):
    vllm_plugin.register()
    vllm_plugin.register()  # vLLM may load a plugin twice
    loaded: dict[str, torch.Tensor] = {}
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), vllm.ParallelLMHead())
    model.load_weights = loaded.update  # type: ignore[assignment]
    engine = vllm.registered["mvp_file"](model)
    file = tmp_path / "weights.safetensors"
    save_file({"a": torch.arange(3.0)}, file)
    engine.init_transfer_engine(engine.init_info_cls())
    engine.start_weight_update()
    engine.update_weights({"path": str(file)})
    engine.finish_weight_update()
    assert vllm.calls == ["start", "finish", "pack head"]
    assert torch.equal(loaded["a"], torch.arange(3.0))


def test_vllm_plugin_imports_nothing_that_a_servers_environment_lacks():
    code = "import sys, mvp_engine.kit.rl.vllm_plugin; print(sorted(name.split('.')[0] for name in sys.modules))"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers", "hydra", "omegaconf", "numpy"} & set(eval(answer.stdout))


def test_server_rollout_of_config_has_its_backend_and_options(tmp_path):
    urls = ["http://one:8000", "http://two:8000"]
    rollout = server_rollout(
        GenerationSettings(backend="vllm", urls=urls),
        folder=tmp_path,
        wait_seconds=5,
        banned=[7, 3],
    )
    assert isinstance(rollout, VLLMRollout)
    assert [server.url for server in rollout.servers] == urls
    assert (rollout.banned, rollout.wait_seconds) == ([3, 7], 5)
    assert rollout.transfer.folder == tmp_path / "rollout_weights"  # type: ignore[attr-defined]
    shared = GenerationSettings(backend="vllm", urls=urls, sync="file:/shared")
    found = server_rollout(shared, folder=tmp_path, wait_seconds=5)
    assert found.transfer.folder == Path("/shared") / tmp_path.name  # type: ignore[attr-defined]
    adapters = GenerationSettings(backend="sglang", urls=urls, sync="adapter:/shared")
    other = server_rollout(adapters, folder=tmp_path, wait_seconds=5)
    assert isinstance(other, SGLangRollout)
    assert other.transfer.is_adapter
    assert other.transfer.folder == Path("/shared") / tmp_path.name  # type: ignore[attr-defined]


def test_rollout_settings_where_weights_do_not_reach_the_sampler_are_refused(tmp_path):
    with pytest.raises(ValidationError, match=r"openai is gone.*backend=vllm or sglang.*chat.url"):
        GenerationSettings.model_validate({"backend": "openai", "sync": "none"})
    with pytest.raises(ValidationError, match="sync"):
        GenerationSettings(backend="vllm", urls=["http://one"], sync="none")
    with user_error("generation.sync=ipc: SGLang servers get weights by file or adapter"):
        SGLangRollout(["http://one"], "ipc", tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("sync", ["ipc", "nccl"])
def test_transfer_between_gpus_without_a_gpu_is_refused(sync, tmp_path):
    with user_error(f"generation.sync={sync} needs a GPU"):
        transfer_of(sync, tmp_path)


def receive(requests, results):
    """A worker of a server: opens the buffer of each update as vLLM 0.32 does."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    while (info := requests.get()) is not None:
        handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
        args = list(handles[str(torch.cuda.get_device_properties(0).uuid)])
        args[6] = 0
        data = rebuild_cuda_tensor(*args)[: sum(info["tensor_sizes"])]
        found = unpacked(data, info, info["tensor_sizes"])
        results.put({name: checksum(tensor) for name, tensor in found.items()})


@pytest.mark.gpu
def test_ipc_transfer_another_process_reads_the_same_bits():
    context = multiprocessing.get_context("spawn")
    requests, results = context.Queue(), context.Queue()
    worker = context.Process(target=receive, args=(requests, results), daemon=True)
    worker.start()
    transfer = IPCTransfer()
    second = [(name, tensor + 1) for name, tensor in bucket()]
    transfer.keep([[(n, t.cuda()) for n, t in bucket()], second], 1)
    received: list[dict[str, str]] = []

    class Server:
        def post(self, path, body):
            assert path == "/update_weights"
            requests.put(body["update_info"])
            received.append(results.get(timeout=120))

    transfer.send(Server())  # type: ignore[arg-type]
    requests.put(None)
    worker.join(30)
    for sent, found in zip([bucket(), second], received, strict=True):
        assert found == {name: checksum(tensor) for name, tensor in sent}


@pytest.mark.gpu
def test_nccl_communicator_broadcasts_and_aborts():
    communicator = Communicator(Communicator.new_id(), 0, 1)  # two ranks need two GPUs
    data = torch.arange(256, dtype=torch.uint8, device="cuda")
    communicator.broadcast(data)
    assert data.tolist() == list(range(256))
    communicator.abort()
    assert NCCLTransfer().communicators == {}
