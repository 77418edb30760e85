"""What a start prepares in the background: the CUDA context, and the processes that compile kernels."""

import ctypes
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from mvp_engine.kit.model import start_compile_workers
from mvp_engine.tools.launcher import DRIVER, created_meanwhile


def fake_driver(monkeypatch, init_code=0):
    """Put a stand-in in the place of NVIDIA's driver library; returns the calls that it gets."""
    calls = []

    def init(flags):
        time.sleep(0.05)  # while the imports are running
        calls.append("init")
        return init_code

    def device_get(device, index):
        calls.append(f"device {index}")
        return 0

    driver = SimpleNamespace(cuInit=init, cuDeviceGet=device_get)
    driver.cuDevicePrimaryCtxRetain = lambda context, device: calls.append("retain")
    monkeypatch.setattr(ctypes, "CDLL", {DRIVER: driver}.__getitem__)
    return calls


@pytest.mark.parametrize("fails", [False, True])
def test_cuda_context_is_created_when_the_imports_end_or_fail(fails, monkeypatch):
    calls = fake_driver(monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "3")
    try:
        with created_meanwhile("auto"):
            assert "retain" not in calls
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert calls == ["init", "device 3", "retain"]
    assert "mvp-cuda-context" not in [thread.name for thread in threading.enumerate()]


def test_cuda_context_without_a_gpu_or_on_cpu_is_left_to_torch(
    monkeypatch,
):
    calls = fake_driver(monkeypatch, init_code=100)  # CUDA_ERROR_NO_DEVICE
    with created_meanwhile("cpu"):
        pass
    assert calls == []
    with created_meanwhile("cuda"):
        pass
    assert calls == ["init"]


@pytest.mark.parametrize(
    "device, setting, started",
    [
        ("cuda", "inductor", True),
        ("cuda", {"llm": "auto", "vision": None}, True),
        ("cuda", "aot_eager", False),
        ("cuda", None, False),
        ("cpu", "inductor", False),
    ],
)
def test_compile_workers_start_for_inductor_on_a_gpu(device, setting, started, monkeypatch):
    from torch._inductor.async_compile import AsyncCompile

    calls = []
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: calls.append("started"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    model = SimpleNamespace(compile=setting)
    start_compile_workers(torch.device(device), model)
    assert bool(calls) == started
