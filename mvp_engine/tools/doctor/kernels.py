"""Kernels that a training will use on this machine, each run once against plain PyTorch, and why not a better one.

Legend: T tokens of all sequences, H query heads, K key/value heads, d head size, D hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.hf.experts import fp8_grouped_mm
from mvp_engine.hf.mixers import kernels as mixer_kernels
from mvp_engine.hf.mixers.check_kernels import mixer_error
from mvp_engine.hf.mixers.kernels import KERNELS
from mvp_engine.ops import cudnn_attention, flash_attention, fp8, nf4
from mvp_engine.ops.attention import AttnSpec
from mvp_engine.ops.attention_operator import Attention
from mvp_engine.ops.linear_cross_entropy import linear_loss
from mvp_engine.ops.reference_attention import reference_attention
from mvp_engine.tools.doctor.finding import Finding, ok, problem, warning

LENGTHS = (1024, 512, 1536, 1024)  # tokens of the packed sequences
TOLERANCE = 2e-2  # relative error of bf16 kernels
COMPILER_FIX = "install a C compiler and Python's headers (apt install gcc python3-dev); without: model.compile=null"
NOT_INSTALLED = "is not installed"


def check_attention(head_size: int = 128) -> Finding:
    """The fastest attention kernel for plain packed sequences of this head size."""
    if not torch.cuda.is_available():
        text = "the reference, one sequence at a time: the kernels for packed sequences need a GPU"
        return ok("attention", text, kernel="reference")
    inputs = _packed_inputs(head_size)
    spec = _spec()
    passed_over: dict[str, str] = {}
    for name, kernel in _KERNELS.items():
        why = kernel.why_not(inputs[0], spec)
        if why is None:
            return _with_reasons(_try_attention(name, kernel, inputs, spec), passed_over)
        passed_over[name] = why
    raise AssertionError("the last kernel runs everywhere")


def _with_reasons(finding: Finding, passed_over: dict[str, str]) -> Finding:
    """A faster kernel that is only not installed is a warning."""
    missing = [name for name, why in passed_over.items() if why.endswith(NOT_INSTALLED)]
    reasons = "".join(f". Not {name}: {why}" for name, why in passed_over.items())
    text = finding.text + reasons
    if finding.fix or not missing:
        return Finding("attention", finding.status, text, finding.fix, finding.facts)
    fix = "pip install 'mvp-engine[cuda]', for a faster kernel"
    return warning("attention", text, fix, **finding.facts)


def _capability() -> int:
    return torch.cuda.get_device_capability()[0]


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
    if _capability() not in (9, 10):
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
    tensors = []
    for heads in (16, 8, 8):
        shape = (heads, sum(LENGTHS), head_size)
        tensor = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        tensors.append(tensor.requires_grad_())
    return tensors


def _spec() -> AttnSpec:
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(device="cuda", dtype=torch.int32)
    return AttnSpec(offsets, max(LENGTHS))


def _try_attention(name: str, kernel: _Kernel, inputs: list[Tensor], spec: AttnSpec) -> Finding:
    """Run a kernel forward and backward, compare it with the reference, and time it."""
    q, k, v = inputs
    expected = _with_gradients(
        lambda: reference_attention(q.float(), k.float(), v.float(), spec), inputs
    )
    attend = partial(kernel.attention, q, k, v, spec)
    try:
        found = _with_gradients(attend, inputs)
        milliseconds = _milliseconds(lambda: _with_gradients(attend, inputs))
    except Exception as error:  # noqa: BLE001 - any failure of a kernel is a finding
        return problem("attention", f"{name} fails: {_summary(error)}", kernel.fix, kernel=name)
    pairs = zip(found, expected, strict=True)
    worst = max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)
    facts = {"kernel": name, "milliseconds": round(milliseconds, 3), "relative_error": worst}
    if not worst < TOLERANCE:
        text = f"{name} computes wrong values: relative error {worst:.1e}"
        return problem("attention", text, kernel.fix, **facts)
    text = f"{name}, {milliseconds:.2f} ms forward and backward of {sum(LENGTHS):,} tokens"
    return ok("attention", text, **facts)


def _with_gradients(compute: Callable[[], Tensor], inputs: list[Tensor]) -> list[Tensor]:
    out = compute()
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]


def _milliseconds(run: Callable[[], object]) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / 10


def check_loss() -> Finding:
    """The fused linear cross-entropy, which uses Triton kernels on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    hidden_TD = torch.randn(512, 256, device=device, generator=generator, requires_grad=True)
    weight_VD = torch.randn(4096, 256, device=device, generator=generator) / 16
    labels_T = torch.randint(4096, (512,), device=device, generator=generator)
    expected = F.cross_entropy(hidden_TD @ weight_VD.t(), labels_T, reduction="sum")
    d_expected = torch.autograd.grad(expected, hidden_TD)[0]
    try:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, _ = linear_loss(hidden_TD, weight_VD, labels_T)
        d_hidden = torch.autograd.grad(loss, hidden_TD)[0]
    except Exception as error:  # noqa: BLE001 - any failure of a kernel is a finding
        return problem("loss", f"the fused cross-entropy fails: {_summary(error)}", COMPILER_FIX)
    relative = float((d_hidden - d_expected).norm() / d_expected.norm())
    kernel = "Triton kernels" if device == "cuda" else "torch operators (no GPU)"
    if not relative < TOLERANCE:
        text = f"the fused cross-entropy computes wrong values: relative error {relative:.1e}"
        return problem("loss", text, "install a tested version of torch", relative_error=relative)
    return ok("loss", f"fused linear cross-entropy with {kernel}", kernel=kernel)


def check_compile() -> Finding | None:
    """torch.compile, which `model.compile=auto` uses on GPUs."""
    if not torch.cuda.is_available():
        return None
    x = torch.arange(1000.0, device="cuda")
    start = time.perf_counter()
    try:
        compiled = torch.compile(lambda x: F.silu(x) * 2 + 1)
        right = torch.allclose(compiled(x), F.silu(x) * 2 + 1)
    except Exception as error:  # noqa: BLE001 - any failure of the compiler is a finding
        return problem("torch.compile", f"fails: {_summary(error)}", COMPILER_FIX)
    if not right:
        return problem("torch.compile", "computes wrong values", "model.compile=null")
    seconds = time.perf_counter() - start
    return ok("torch.compile", f"inductor, first kernel in {seconds:.1f} s", seconds=seconds)


def check_fp8() -> Finding | None:
    """FP8 matmuls, which are off unless `model.fp8` is set."""
    if not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability() < (8, 9):
        return ok("FP8", "not supported by this GPU, which model.fp8 needs (Ada, Hopper or newer)")
    device = torch.device("cuda")
    found = _fp8_errors(device)
    if not found["relative_error"] < 0.1:
        text = f"wrong values: relative error {found['relative_error']:.1e}"
        return problem("FP8", text, "leave model.fp8 off")
    if not found["weight_gradient_error"] < 0.1:
        text = f"wrong weight gradients: relative error {found['weight_gradient_error']:.1e}"
        return problem("FP8", text, "leave model.fp8_weight_gradients off")
    text = "supported: model.fp8=true, model.fp8_weight_gradients=true"
    if not fp8_grouped_mm.is_supported(device):
        return ok("FP8", f"{text}; stacked experts stay in bf16 on this GPU", **found)
    try:
        found["experts_error"] = _fp8_experts_error(device)
    except Exception as error:  # noqa: BLE001 - any failure of torch's kernel is a finding
        return problem(
            "FP8", f"fails for stacked experts: {_summary(error)}", "leave model.fp8 off"
        )
    if not found["experts_error"] < 0.1:
        text = f"wrong values of stacked experts: relative error {found['experts_error']:.1e}"
        return problem("FP8", text, "leave model.fp8 off")
    return ok("FP8", f"{text}, also of stacked experts", **found)


def _fp8_errors(device: torch.device) -> dict[str, float]:
    """Of a linear layer with a number of tokens that is no multiple of 16."""
    layer = nn.Linear(256, 256, device=device)
    x = torch.randn(60, 256, device=device)
    d_out = torch.randn(60, 256, device=device)
    expected = layer(x)
    d_expected = torch.autograd.grad(expected, layer.weight, d_out)[0]
    fp8.use([layer], weight_gradients=True)
    with torch.autocast(device.type, torch.bfloat16):
        out = layer(x)
    d_found = torch.autograd.grad(out, layer.weight, d_out.bfloat16())[0]
    return {
        "relative_error": _relative_error(out, expected),
        "weight_gradient_error": _relative_error(d_found, d_expected),
    }


def _fp8_experts_error(device: torch.device) -> float:
    """Of groups that end at odd rows, one of them empty."""
    x = torch.randn(60, 256, device=device)
    weight = torch.randn(3, 256, 256, device=device)
    ends = torch.tensor([7, 7, 60], device=device, dtype=torch.int32)
    expected = torch.cat([x[:7] @ weight[0].T, x[7:] @ weight[2].T])
    return _relative_error(fp8_grouped_mm.fp8_grouped_linear(x, weight, ends), expected)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    with torch.no_grad():
        return float((found - expected).norm() / expected.norm())


def check_nf4() -> Finding | None:
    """The kernel that dequantizes 4-bit weights, which are used with `model.quantize`."""
    if not torch.cuda.is_available():
        return None
    stored = nf4.quantize(torch.randn(64, 256), torch.bfloat16)
    try:
        found = nf4.dequantize(stored.cuda(), 256, torch.bfloat16).cpu()
    except Exception as error:  # noqa: BLE001 - any failure of the compiler is a finding
        return problem("NF4", f"fails: {_summary(error)}", "leave model.quantize out")
    if not torch.equal(found, nf4.dequantize(stored, 256, torch.bfloat16)):
        return problem("NF4", "wrong values", "leave model.quantize out")
    return ok("NF4", "supported: model.quantize={llm: nf4}, with LoRA")


def _summary(error: BaseException) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {text}"[:300]


def check_mixers() -> Finding | None:
    """Kernels of linear-attention and state-space layers, which few models have; each is run once."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda")
    used = {operation: mixer_kernels.describe(operation, device) for operation in KERNELS}
    facts = {"kernels": used}
    missing = [operation for operation in KERNELS if mixer_kernels.load(operation) is None]
    listed = "; ".join(f"{operation}: {name}" for operation, name in used.items())
    if missing:
        text = f"for models with linear attention or state-space layers. {listed}"
        return ok("mixers", text, **facts)
    try:
        errors = {operation: mixer_error(operation) for operation in KERNELS}
    except Exception as error:  # noqa: BLE001 - any failure of a kernel is a finding
        text = f"a kernel fails: {_summary(error)}"
        return problem("mixers", text, "pip install -U fla-core", **facts)
    worst = max(errors, key=lambda operation: errors[operation])
    if not errors[worst] < TOLERANCE:
        text = (
            f"{used[worst]} computes wrong values for {worst}: relative error {errors[worst]:.1e}"
        )
        return problem("mixers", text, "pip install -U fla-core", **facts)
    return ok("mixers", listed, relative_errors=errors, **facts)
