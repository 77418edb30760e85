"""The checks of `mvp doctor` that import torch: GPUs, kernels, media, the size of checkpoints, one all-reduce.

    python -m mvp_engine.tools.doctor_checks checks FD JSON             # one JSON line per finding, to the descriptor
    python -m mvp_engine.tools.doctor_checks all-reduce FILE [NODES]    # rank 0 writes the result; starts the ranks

Kernels run once each, against plain PyTorch. What needs more than torch is imported by its check.

Legend: T tokens of all sequences, H query heads, K key/value heads, d head size, D hidden size, V vocabulary.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.distributed import World
from mvp_engine.errors import UserError
from mvp_engine.log.metrics import peak_of
from mvp_engine.ops import cudnn_attention, flash_attention, fp8, nf4
from mvp_engine.ops.attention import reference_attention
from mvp_engine.ops.attn_spec import Attention, AttnSpec
from mvp_engine.ops.linear_cross_entropy import linear_loss
from mvp_engine.tools.doctor import (
    GIB,
    MODULE,
    Finding,
    Request,
    check_disk,
    ok,
    problem,
    warning,
)
from mvp_engine.tools.store_speed import check_stores

TOLERANCE = 2e-2  # relative error of bf16 kernels
COMPILER_FIX = "install a C compiler and Python's headers (apt install gcc python3-dev); without: model.compile=null"
FP8_FIX = "leave model.fp8 off"


def main(argv: list[str] | None = None) -> int:
    command, *words = sys.argv[1:] if argv is None else argv
    if command == "all-reduce":
        return all_reduce(*words)
    names, request = json.loads(words[1])
    with os.fdopen(int(words[0]), "w", buffering=1) as out:
        for item in run_checks(names, Request(**request)):
            out.write(
                json.dumps(item if isinstance(item, str) else dataclasses.asdict(item)) + "\n"
            )
    return 0


class Check(NamedTuple):
    run: Callable[[], Finding | list[Finding] | None]
    needs_gpu: bool = False
    failure: str = "the check failed"  # if it raises
    fix: str = "reinstall the package that the message names"


def checks_of(request: Request) -> dict[str, Check]:
    return {
        "driver": Check(check_driver),
        "cuDNN": Check(check_cudnn, True),
        "GPUs": Check(check_gpus, True),
        "attention": Check(partial(check_attention, request)),
        "loss": Check(check_loss, False, "the fused cross-entropy fails", COMPILER_FIX),
        "torch.compile": Check(check_compile, True, "fails", COMPILER_FIX),
        "FP8": Check(check_fp8, True, "fails", FP8_FIX),
        "NF4": Check(check_nf4, True, "fails", "leave model.quantize out"),
        "mixers": Check(check_mixers, True, "a kernel fails", "pip install -U fla-core"),
        **{kind: Check(partial(check_media, kind)) for kind in MEDIA},
        "disk": Check(partial(check_free_space, request)),
        "stores": Check(lambda: check_stores(_composed(request))),
    }


def run_checks(names: list[str], request: Request) -> Iterator[Finding | str]:
    """The name of each check (str) before it runs, so that a reader knows which one ended the process."""
    checks = checks_of(request)
    for name in names:
        yield name
        check = checks[name]
        if check.needs_gpu and not torch.cuda.is_available():
            continue
        try:
            result = check.run()
        except UserError as error:  # of the config's model
            fix = "correct the config, or run mvp doctor without one"
            result = problem(name, str(error), fix)
        except Exception as error:  # noqa: BLE001 - one broken check must not end the others
            result = problem(name, f"{check.failure}: {_summary(error)}", check.fix)
        yield from result if isinstance(result, list) else filter(None, [result])


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"[:300]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _relative_error(values: Tensor, expected: Tensor) -> float:
    with torch.no_grad():
        return float((values.float() - expected).norm() / expected.norm())


# ---- GPUs: whether driver, torch and cuDNN fit together, and what each GPU is and computes ------------

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
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if torch.version.hip:
        return ok("driver", f"torch is built for ROCm {torch.version.hip}", hip=torch.version.hip)
    if built is None and (driver or supported):
        text = "there is an NVIDIA driver, but torch is built without CUDA"
        return problem("driver", text, INSTALL_TORCH, **facts)
    if torch.cuda.is_available():
        text = f"NVIDIA driver {driver or '(version unknown)'}, up to CUDA {supported}; torch is built for CUDA {built}"
        return ok("driver", text, **facts)
    if built is None or (supported is None and not Path("/dev/nvidia0").exists()):
        return ok("driver", f"no NVIDIA driver: {NO_GPU}", **facts)
    if supported is None:
        text = "there are GPU devices, but libcuda.so.1 does not load"
        return problem("driver", text, "in a container: docker run --gpus all", **facts)
    if visible.strip() in ("", "-1"):
        text = f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs: {NO_GPU}"
        return warning("driver", text, "unset CUDA_VISIBLE_DEVICES", **facts)
    if float(supported) < int(float(built)):
        text = f"the driver {driver} supports CUDA up to {supported}, but torch is built for CUDA {built}"
        fix = f"update the driver, or {INSTALL_TORCH.replace('that fits', f'for CUDA {supported}')}"
        return problem("driver", text, fix, **facts)
    why = "torch.cuda.is_available() is false"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        why = _first_line(error)
    fix = "see nvidia-smi; after a driver update, reboot. CUDA_VISIBLE_DEVICES must name GPUs that exist"
    return problem("driver", f"torch sees no GPU: {why}", fix, **facts)


def driver_version() -> str | None:
    """The version of the NVIDIA driver; None without one."""
    file = Path("/proc/driver/nvidia/version")
    text = file.read_text() if file.is_file() else ""
    if version := re.search(r"Kernel Module\D*?(\d+\.\d+[.\d]*)", text):
        return version[1]
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
    if torch.version.hip:
        return None
    fix = "remove other cuDNN folders from LD_LIBRARY_PATH, and reinstall torch with its own nvidia-cudnn package"
    try:
        loaded = torch.backends.cudnn.version()
    except RuntimeError as error:
        return problem("cuDNN", _first_line(error), fix)
    if loaded is None:
        return problem("cuDNN", "torch found no cuDNN", fix)
    text = f"torch loads cuDNN {_cudnn_name(loaded)}"
    if importlib.util.find_spec("cudnn") is None:
        return ok("cuDNN", text, torch=loaded)
    import cudnn

    frontend = cudnn.backend_version()
    if frontend != loaded:
        text += f", but nvidia-cudnn-frontend loads {_cudnn_name(frontend)}"
        return problem("cuDNN", text, fix, torch=loaded, frontend=frontend)
    text += f", and nvidia-cudnn-frontend {cudnn.__version__} the same"
    return ok("cuDNN", text, torch=loaded, frontend=frontend)


def _cudnn_name(number: int) -> str:
    """9.20.0 of 92000."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def check_gpus() -> list[Finding]:
    return [_check_gpu(index) for index in range(torch.cuda.device_count())]


def _check_gpu(index: int) -> Finding:
    name = f"GPU {index}"
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    free, total = torch.cuda.mem_get_info(index)
    text = f"{properties.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, compute capability "
    text += f"{capability[0]}.{capability[1]}"
    facts: dict[str, Any] = {"gpu": properties.name, "capability": list(capability)}
    facts |= {"free_gib": round(free / GIB, 2), "total_gib": round(total / GIB, 2)}
    dtype = torch.bfloat16 if capability >= (8, 0) or torch.version.hip else torch.float16
    try:
        flops = _matmul_flops(index, dtype)
    except RuntimeError as error:
        built = ", ".join(torch.cuda.get_arch_list())
        fix = f"{INSTALL_TORCH}: this one has kernels for {built}. Or free the GPU: nvidia-smi lists its processes"
        return problem(name, f"{text}: a matmul fails: {_first_line(error)}", fix, **facts)
    facts["matmul_tflops"] = round(flops / 1e12, 1)
    text += f"; {str(dtype).removeprefix('torch.')} matmul at {flops / 1e12:,.0f} TFLOP/s"
    peak = peak_of(properties.name)
    if peak:
        text += f", {flops / peak:.0%} of its peak"
    if dtype == torch.float16:
        fix = "set train.precision=fp16"
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
    with torch.cuda.device(index):
        ones = torch.ones(SIZE, SIZE, device="cuda", dtype=dtype)
        result = ones @ ones
        if not bool((result == SIZE).all()):
            raise RuntimeError("wrong values: the GPU or its driver is broken")
        seconds = _seconds(lambda: torch.mm(ones, ones, out=result), 20)
    return 2.0 * SIZE**3 / seconds


def _seconds(run: Callable[[], object], times: int) -> float:
    """The time of one run, without the first ones."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


# ---- Kernels that a training uses on this machine, and why not a better one ---------------------------

LENGTHS = (1024, 512, 1536, 1024)  # tokens of the packed sequences
NOT_INSTALLED = "is not installed"


def check_attention(request: Request) -> Finding:
    """The fastest attention kernel for plain packed sequences of the config's head size."""
    if not torch.cuda.is_available():
        text = "the reference, one sequence at a time: the kernels for packed sequences need a GPU"
        return ok("attention", text, kernel="reference")
    inputs = _packed_inputs(_head_size(request) or 128)
    spec = _spec()
    reasons: dict[str, str] = {}
    for name, kernel in _KERNELS.items():
        reason = kernel.why_not(inputs[0], spec)
        if reason is None:
            break
        reasons[name] = reason
    finding = _try_attention(name, kernel, inputs, spec)  # the last kernel runs everywhere
    text = finding.text + "".join(f". Not {name}: {why}" for name, why in reasons.items())
    # A faster kernel that is only not installed is a warning.
    if finding.fix is None and any(why.endswith(NOT_INSTALLED) for why in reasons.values()):
        fix = "pip install 'mvp-engine[cuda]', for a faster kernel"
        return warning("attention", text, fix, **finding.facts)
    return dataclasses.replace(finding, text=text)


def _why_not_flash(q_HTd: Tensor, spec: AttnSpec) -> str | None:
    if not flash_attention.runs_on():
        return "it is used only on Hopper GPUs with CUDA 13"
    if not flash_attention.INSTALLED:
        return f"flash-attn-4 {flash_attention.VERSION} {NOT_INSTALLED}"
    if flash_attention.load() is None:
        return "flash-attn-4 cannot be imported"
    if not flash_attention.is_supported(q_HTd, spec):
        return f"it is not used for head size {q_HTd.shape[-1]}"
    return None


def _why_not_cudnn(q_HTd: Tensor, spec: AttnSpec) -> str | None:
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return "its kernels for packed sequences need Hopper or Blackwell"
    if not cudnn_attention.INSTALLED:
        return f"nvidia-cudnn-frontend {NOT_INSTALLED}"
    if not cudnn_attention.is_supported(q_HTd, spec):
        return f"it does not support head size {q_HTd.shape[-1]}"
    return None


def _torch_varlen(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec) -> Tensor:
    from mvp_engine.ops.torch_varlen import torch_varlen_attention

    return torch_varlen_attention(q, k, v, spec)


class _Kernel(NamedTuple):
    attention: Attention
    why_not: Callable[[Tensor, AttnSpec], str | None]
    fix: str  # if it fails


# In the order in which a training prefers them.
_KERNELS = {
    "FlashAttention 4": _Kernel(
        flash_attention.flash_attention,
        _why_not_flash,
        "uninstall flash-attn-4: cuDNN is used then",
    ),
    "cuDNN": _Kernel(
        cudnn_attention.cudnn_attention,
        _why_not_cudnn,
        "pip install -U nvidia-cudnn-frontend, or uninstall it: FlashAttention 2 is used then",
    ),
    "FlashAttention 2": _Kernel(
        _torch_varlen, lambda *_: None, "install a torch build for this GPU"
    ),
}


def _packed_inputs(head_size: int) -> list[Tensor]:
    """q (H, T, d), k and v (K, T, d) in bf16 on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    options: Any = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    shapes = [(heads, sum(LENGTHS), head_size) for heads in (16, 8, 8)]
    return [torch.randn(shape, **options).requires_grad_() for shape in shapes]


def _spec() -> AttnSpec:
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(device="cuda", dtype=torch.int32)
    return AttnSpec(offsets, max(LENGTHS))


def _try_attention(name: str, kernel: _Kernel, inputs: list[Tensor], spec: AttnSpec) -> Finding:
    """Run a kernel forward and backward, compare it with the reference, and time it."""

    def run(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        out = attention(q, k, v, spec)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]

    q, k, v = inputs
    expected = run(reference_attention, q.float(), k.float(), v.float())
    try:
        values = run(kernel.attention, q, k, v)
        milliseconds = 1e3 * _seconds(lambda: run(kernel.attention, q, k, v), 10)
    except Exception as error:  # noqa: BLE001 - any failure of a kernel is a finding
        return problem("attention", f"{name} fails: {_summary(error)}", kernel.fix, kernel=name)
    worst = max(map(_relative_error, values, expected))
    facts = {"kernel": name, "milliseconds": round(milliseconds, 3), "relative_error": worst}
    if not worst < TOLERANCE:
        text = f"{name} computes wrong values: relative error {worst:.1e}"
        return problem("attention", text, kernel.fix, **facts)
    text = f"{name}, {milliseconds:.2f} ms forward and backward of {sum(LENGTHS):,} tokens"
    return ok("attention", text, **facts)


def check_loss() -> Finding:
    """The fused linear cross-entropy, which uses Triton kernels on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    hidden_TD = torch.randn(512, 256, device=device, generator=generator, requires_grad=True)
    weight_VD = torch.randn(4096, 256, device=device, generator=generator) / 16
    labels_T = torch.randint(4096, (512,), device=device, generator=generator)
    expected = F.cross_entropy(hidden_TD @ weight_VD.t(), labels_T, reduction="sum")
    d_expected = torch.autograd.grad(expected, hidden_TD)[0]
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss, _ = linear_loss(hidden_TD, weight_VD, labels_T)
    relative = _relative_error(torch.autograd.grad(loss, hidden_TD)[0], d_expected)
    if not relative < TOLERANCE:
        text = f"the fused cross-entropy computes wrong values: relative error {relative:.1e}"
        return problem("loss", text, "install a tested version of torch", relative_error=relative)
    kernel = "Triton kernels" if device == "cuda" else "torch operators (no GPU)"
    return ok("loss", f"fused linear cross-entropy with {kernel}", kernel=kernel)


def check_compile() -> Finding:
    """torch.compile, which `model.compile=auto` uses on GPUs."""
    x = torch.arange(1000.0, device="cuda")
    start = time.perf_counter()
    compiled = torch.compile(lambda x: F.silu(x) * 2 + 1)
    if not torch.allclose(compiled(x), F.silu(x) * 2 + 1):
        return problem("torch.compile", "computes wrong values", "model.compile=null")
    seconds = time.perf_counter() - start
    return ok("torch.compile", f"inductor, first kernel in {seconds:.1f} s", seconds=seconds)


def check_fp8() -> Finding:
    """FP8 matmuls, which are off unless `model.fp8` is set."""
    from mvp_engine.hf.experts import grouped_mm

    if torch.cuda.get_device_capability() < (8, 9):
        return ok("FP8", "not supported by this GPU, which model.fp8 needs (Ada, Hopper or newer)")
    device = torch.device("cuda")
    has_experts = grouped_mm.is_supported(device)
    errors = fp8_errors(device, has_experts)
    wrong = next((kind for kind, error in errors.items() if not error < 0.1), None)
    if wrong:
        what, key = {
            "relative_error": ("values", "model.fp8"),
            "weight_gradient_error": ("weight gradients", "model.fp8=all"),
            "experts_error": ("values of stacked experts", "model.fp8"),
        }[wrong]
        text = f"wrong {what}: relative error {errors[wrong]:.1e}"
        return problem("FP8", text, f"leave {key} off")
    experts = (
        ", also of stacked experts" if has_experts else "; stacked experts stay in bf16 on this GPU"
    )
    text = f"supported: model.fp8=true, model.fp8=all{experts}"
    return ok("FP8", text, **errors)


def fp8_errors(device: torch.device, has_experts: bool) -> dict[str, float]:
    """Of a linear layer with a number of tokens that is no multiple of 16, and of stacked experts."""
    from mvp_engine.hf.experts.grouped_mm import fp8_grouped_linear

    layer = nn.Linear(256, 256, device=device)
    x = torch.randn(60, 256, device=device)
    d_out = torch.randn(60, 256, device=device)
    expected = layer(x)
    d_expected = torch.autograd.grad(expected, layer.weight, d_out)[0]
    fp8.use([layer], weight_gradients=True)
    with torch.autocast(device.type, torch.bfloat16):
        out = layer(x)
    d_weight = torch.autograd.grad(out, layer.weight, d_out.bfloat16())[0]
    errors = {"relative_error": _relative_error(out, expected)}
    errors["weight_gradient_error"] = _relative_error(d_weight, d_expected)
    if has_experts:  # groups that end at odd rows, one of them empty
        weight = torch.randn(3, 256, 256, device=device)
        ends = torch.tensor([7, 7, 60], device=device, dtype=torch.int32)
        expected = torch.cat([x[:7] @ weight[0].T, x[7:] @ weight[2].T])
        errors["experts_error"] = _relative_error(fp8_grouped_linear(x, weight, ends), expected)
    return errors


def check_nf4() -> Finding:
    """The kernel that dequantizes 4-bit weights, which are used with `model.quantize`."""
    stored = nf4.quantize(torch.randn(64, 256), torch.bfloat16)
    values = nf4.dequantize(stored.cuda(), 256, torch.bfloat16).cpu()
    if not torch.equal(values, nf4.dequantize(stored, 256, torch.bfloat16)):
        return problem("NF4", "wrong values", "leave model.quantize out")
    return ok("NF4", "supported: model.quantize={llm: nf4}, with LoRA")


def check_mixers() -> Finding:
    """Kernels of linear-attention and state-space layers, which few models have."""
    from mvp_engine.hf.mixers import kernels
    from mvp_engine.hf.mixers.kernels import mixer_error

    device = torch.device("cuda")
    used = {operation: kernels.describe(operation, device) for operation in kernels.KERNELS}
    listed = "; ".join(f"{operation}: {name}" for operation, name in used.items())
    if not all(map(kernels.load, used)):
        text = f"for models with linear attention or state-space layers. {listed}"
        return ok("mixers", text, kernels=used)
    errors = {operation: mixer_error(operation) for operation in used}
    worst = max(errors, key=lambda operation: errors[operation])
    if not errors[worst] < TOLERANCE:
        text = (
            f"{used[worst]} computes wrong values for {worst}: relative error {errors[worst]:.1e}"
        )
        return problem("mixers", text, "pip install -U fla-core", kernels=used)
    return ok("mixers", listed, relative_errors=errors, kernels=used)


# ---- One file of each kind of media, decoded by the readers of the data kit ---------------------------

FOLDER = Path(__file__).parent / "doctor_media"
MEDIA = {"image": "red.png", "video": "red_to_blue.mp4", "audio": "tone.flac"}
SAMPLING_RATE = 16_000  # the file has another one, so that it is resampled
TONE_HZ = 440


def check_media(kind: str, folder: Path = FOLDER) -> Finding:
    """Decode a file of the package, and compare it with what it shows."""
    from mvp_engine.kit.data.read.decoders import decode
    from mvp_engine.kit.data.read.probe import probe
    from mvp_engine.kit.data.read.row_types import BadRow, Limits, Part

    fix = "reinstall the decoders: pip install --force-reinstall pillow av soundfile soxr"
    part = Part(kind, MEDIA[kind])
    start = time.perf_counter()
    try:
        item = decode(part, probe(part, Limits(), folder), Limits(), folder, SAMPLING_RATE)
    except UserError as error:
        text, _, install = str(error).partition(": ")
        return warning(kind, f"{text}; rows with it cannot be read", install)
    except BadRow as error:
        return problem(kind, f"the file of the package cannot be decoded: {error}", fix)
    milliseconds = 1e3 * (time.perf_counter() - start)
    text, is_right = _CONTENTS[kind](item)
    if not is_right:
        return problem(kind, f"decoded wrong: {text}", fix)
    text += f", decoded in {milliseconds:.0f} ms"
    return ok(kind, text, milliseconds=round(milliseconds, 1))


def _image_contents(image: Any) -> tuple[str, bool]:
    red, _, blue = np.asarray(image).reshape(-1, 3).mean(0)
    return f"{image.width}x{image.height} pixels", bool(red > 200 and blue < 60)


def _video_contents(frames: np.ndarray) -> tuple[str, bool]:
    first, last = (frames[i].reshape(-1, 3).mean(0) for i in (0, -1))
    is_right = first[0] > 200 > 60 > first[2] and last[2] > 200 > 60 > last[0]
    return f"{len(frames)} frames of {frames.shape[2]}x{frames.shape[1]} (H.264)", bool(is_right)


def _audio_contents(waveform: np.ndarray) -> tuple[str, bool]:
    spectrum = np.abs(np.fft.rfft(waveform))
    hertz = float(spectrum.argmax()) * SAMPLING_RATE / len(waveform)
    text = f"{len(waveform) / SAMPLING_RATE:g} s at {SAMPLING_RATE:,} Hz, resampled"
    return text, abs(hertz - TONE_HZ) < 10


_CONTENTS = {"image": _image_contents, "video": _video_contents, "audio": _audio_contents}


# ---- The model of the config, on the meta device ------------------------------------------------------


def _composed(request: Request) -> Any:
    """The config, or None where none was given."""
    from mvp_engine.config import compose

    return compose(request.config, request.overrides).config if request.config else None


def check_free_space(request: Request) -> Finding:
    config = _composed(request)
    folder = request.dir or (config.output_dir if config else "outputs")
    return check_disk(Path(folder), checkpoint_sizes(config) if config else None)


def _meta_model(config: Any, lora: Any = None) -> Any:
    from mvp_engine.kit import MLLMModelKit

    with torch.device("meta"):
        return MLLMModelKit(lora).build(config.model)


def _head_size(request: Request) -> int | None:
    """The head size of the text model; None for a model that only prepare_model() knows."""
    config = _composed(request)
    return None if config is None or config.model.type == "module" else head_size(config)


def head_size(config: Any) -> int:
    text = _meta_model(config).hf.config.get_text_config()
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def checkpoint_sizes(config: Any) -> tuple[int, int] | None:
    """Bytes of one checkpoint, and how many exist at a time; None for a model that only prepare_model() knows."""
    from mvp_engine.kit.optim.settings import STATE_BYTES
    from mvp_engine.model_engine.fsdp.parallelize import freeze

    if config.model.type == "module":
        return None
    lora = getattr(config, "lora", None)
    model = _meta_model(config, lora)
    freeze(model, config.model.freeze)
    params = list(model.parameters())
    trained = sum(p.numel() for p in params if p.requires_grad)
    trainable_only = config.checkpoint.trainable_only
    if trainable_only is None:
        trainable_only = lora is not None
    saved = trained if trainable_only else sum(p.numel() for p in params)
    states = STATE_BYTES[getattr(config.optim, "state_dtype", "float32")]
    if getattr(config.optim, "ema", None) is not None:
        states += 4.0
    return int(4 * saved + states * trained), _checkpoint_count(config)


def _checkpoint_count(config: Any) -> int:
    """Checkpoints that are kept, the best one, and one that is being written."""
    checkpoint = config.checkpoint
    steps = config.train.max_steps
    kept = checkpoint.keep_n
    if kept is None:
        has_interval = steps and isinstance(checkpoint.interval, int)
        kept = steps // checkpoint.interval if has_interval else 1
    if checkpoint.keep_every and steps:
        kept += steps // checkpoint.keep_every
    has_best = checkpoint.best_metric is not None and config.eval.steps is not None
    return int(kept) + has_best + 1


# ---- One all-reduce, started and connected as a training is: NCCL on GPUs, gloo on CPUs ---------------

ELEMENTS = {"cuda": 2**26, "cpu": 2**20}  # float32: 256 MiB and 4 MiB
JOIN_SECONDS = 60.0


def all_reduce(file: str, nodes: str | None = None) -> int:
    """One rank of the all-reduce; with `nodes`, the fields of Nodes as JSON, the process starts the ranks."""
    if nodes is not None:
        from mvp_engine.tools.launcher import run_module
        from mvp_engine.tools.nodes import Nodes

        return run_module(MODULE, Nodes(**json.loads(nodes)), ["all-reduce", file])
    world = World.join("auto", JOIN_SECONDS)
    if world.size == 1:
        # A world of one rank has no process group; this one shows that NCCL loads.
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    facts = _measure_all_reduce(world)
    if world.is_main:
        Path(file).write_text(json.dumps(facts))
    if world.size == 1:
        dist.destroy_process_group()
    world.close()
    return 0


def _measure_all_reduce(world: World) -> dict[str, object]:
    is_cuda = world.device.type == "cuda"
    tensor = torch.empty(ELEMENTS[world.device.type], device=world.device)
    expected = world.size * (world.size + 1) / 2
    for _ in range(2):  # the first one connects the ranks
        tensor.fill_(world.rank + 1)
        dist.all_reduce(tensor)
    right = bool((tensor == expected).all())
    world.barrier()
    start = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(tensor)
    if is_cuda:
        torch.cuda.synchronize()
    world.barrier()
    seconds = (time.perf_counter() - start) / 5
    backend = "gloo"
    if is_cuda and "nccl" in str(dist.get_backend_config()):
        backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    # What each rank sends and receives: the bus bandwidth, which does not depend on the number of ranks.
    sent = 2 * (world.size - 1) / world.size * tensor.numel() * tensor.element_size()
    hosts = sorted(set(world.all_gather(os.uname().nodename)))
    facts = {"ranks": world.size, "hosts": hosts, "backend": backend, "right": right}
    return {**facts, "bytes_per_s": sent / seconds}


if __name__ == "__main__":
    sys.exit(main())
