"""GPUs: whether driver, torch and cuDNN fit together, and what each GPU is and computes."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

from mvp_engine.log.peaks import peak_of
from mvp_engine.tools.doctor.finding import Finding, ok, problem, warning

GIB = 2**30
NO_GPU = "trainings run on the CPU"
INSTALL_TORCH = "install a torch build that fits (the selector on pytorch.org prints the command)"
LOW_SHARE = 0.35  # of the peak FLOP/s; an idle GPU reaches 60 to 75 % in this matmul
SIZE = 8192  # of the matmul


def check_driver() -> Finding:
    """Why torch sees no GPU, or the pair of driver and torch."""
    driver = driver_version()
    supported = driver_cuda()
    built = torch.version.cuda
    facts = {"driver": driver, "driver_cuda": supported, "torch_cuda": built}
    if torch.version.hip:
        return ok("driver", f"torch is built for ROCm {torch.version.hip}", hip=torch.version.hip)
    if built is None:
        if driver is None and supported is None:
            return ok("driver", f"no NVIDIA driver: {NO_GPU}", **facts)
        text = "there is an NVIDIA driver, but torch is built without CUDA"
        return problem("driver", text, INSTALL_TORCH, **facts)
    if torch.cuda.is_available():
        text = f"NVIDIA driver {driver or '(version unknown)'}, up to CUDA {supported}; torch is built for CUDA {built}"
        return ok("driver", text, **facts)
    if supported is None:
        if not Path("/dev/nvidia0").exists():
            return ok("driver", f"no NVIDIA driver: {NO_GPU}", **facts)
        text = "there are GPU devices, but libcuda.so.1 does not load"
        return problem("driver", text, "in a container: docker run --gpus all", **facts)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        text = f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs: {NO_GPU}"
        return warning("driver", text, "unset CUDA_VISIBLE_DEVICES", **facts)
    if float(supported) < int(float(built)):
        text = f"the driver {driver} supports CUDA up to {supported}, but torch is built for CUDA {built}"
        fix = f"update the driver, or {INSTALL_TORCH.replace('that fits', f'for CUDA {supported}')}"
        return problem("driver", text, fix, **facts)
    fix = "see nvidia-smi; after a driver update, reboot. CUDA_VISIBLE_DEVICES must name GPUs that exist"
    return problem("driver", f"torch sees no GPU: {_why_no_gpu()}", fix, **facts)


def _why_no_gpu() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "torch.cuda.is_available() is false"


def driver_version() -> str | None:
    """The version of the NVIDIA driver; None without one."""
    file = Path("/proc/driver/nvidia/version")
    if file.is_file():
        found = re.search(r"Kernel Module\D*?(\d+\.\d+[.\d]*)", file.read_text())
        if found:
            return found[1]
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    lines = answer.stdout.split()
    return lines[0] if answer.returncode == 0 and lines else None


def driver_cuda() -> str | None:
    """The highest CUDA version that the driver supports, such as 13.0; None without a driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def check_cudnn() -> Finding | None:
    """The cuDNN that torch loads and the one that nvidia-cudnn-frontend loads must be the same."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    fix = "remove other cuDNN folders from LD_LIBRARY_PATH, and reinstall torch with its own nvidia-cudnn package"
    try:
        loaded = torch.backends.cudnn.version()
    except RuntimeError as error:
        return problem("cuDNN", str(error).splitlines()[0], fix)
    if loaded is None:
        return problem("cuDNN", "torch found no cuDNN", fix)
    text = f"torch loads cuDNN {_cudnn_name(loaded)}"
    facts = {"torch": loaded}
    if importlib.util.find_spec("cudnn") is not None:
        import cudnn

        frontend = cudnn.backend_version()
        facts["frontend"] = frontend
        if frontend != loaded:
            text += f", but nvidia-cudnn-frontend loads {_cudnn_name(frontend)}"
            return problem("cuDNN", text, fix, **facts)
        text += f", and nvidia-cudnn-frontend {cudnn.__version__} the same"
    return ok("cuDNN", text, **facts)


def _cudnn_name(number: int) -> str:
    """9.20.0 of 92000."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def check_gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        return []
    return [_check_gpu(index) for index in range(torch.cuda.device_count())]


def _check_gpu(index: int) -> Finding:
    name = f"GPU {index}"
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    free, total = torch.cuda.mem_get_info(index)
    memory = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    text = f"{properties.name}, {memory}, compute capability {capability[0]}.{capability[1]}"
    facts = {
        "gpu": properties.name,
        "free_gib": round(free / GIB, 2),
        "total_gib": round(total / GIB, 2),
        "capability": list(capability),
    }
    dtype = torch.bfloat16 if capability >= (8, 0) or torch.version.hip else torch.float16
    try:
        flops = _matmul_flops(index, dtype)
    except RuntimeError as error:
        built = ", ".join(torch.cuda.get_arch_list())
        fix = f"{INSTALL_TORCH}: this one has kernels for {built}. Or free the GPU: nvidia-smi lists its processes"
        return problem(name, f"{text}: a matmul fails: {_first_line(error)}", fix, **facts)
    peak = peak_of(properties.name)
    text += f"; {str(dtype).removeprefix('torch.')} matmul at {flops / 1e12:,.0f} TFLOP/s"
    facts["matmul_tflops"] = round(flops / 1e12, 1)
    if peak:
        text += f", {flops / peak:.0%} of its peak"
    if dtype == torch.float16:
        fix = "set loop.precision=fp16"
        return warning(name, f"{text}. It has no bf16 matmuls", fix, **facts)
    if total - free > max(0.1 * total, GIB):
        fix = "nvidia-smi lists the processes that use it"
        return warning(name, f"{text}. Other processes use its memory", fix, **facts)
    if peak and flops < LOW_SHARE * peak:
        fix = "nvidia-smi -q -d PERFORMANCE says whether heat or power throttles it, nvidia-smi who shares it"
        return warning(name, f"{text}. It is slow", fix, **facts)
    return ok(name, text, **facts)


def _matmul_flops(index: int, dtype: torch.dtype) -> float:
    """FLOP/s of a large matmul of ones; its result must be exact."""
    ones = torch.ones(SIZE, SIZE, device=f"cuda:{index}", dtype=dtype)
    for _ in range(5):
        result = ones @ ones
    if not bool((result == SIZE).all()):
        raise RuntimeError("wrong values: the GPU or its driver is broken")
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(index):
        start.record()
        for _ in range(20):
            torch.mm(ones, ones, out=result)
        end.record()
        end.synchronize()
    return 20 * 2.0 * SIZE**3 / (start.elapsed_time(end) / 1e3)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
