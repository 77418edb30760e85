"""Kernels for mixers: which of the optional packages are installed, and what each of them is for.

flash-linear-attention needs Triton only, so it runs wherever torch does on a GPU; `fla-core` is the part of it that has
the kernels. `causal-conv1d` and `mamba-ssm` are compiled against one torch and CUDA; where installed they are used for
what they are faster at.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mvp_engine.hf.mixers.kinds import OPERATIONS
from mvp_engine.hf.mixers.per_sequence import Packing, run_by_sequence
from mvp_engine.hf.model.attention import names_in_forward

INSTALL = "pip install 'mvp-engine[linear]'"


class Kernel(NamedTuple):
    package: str  # the distribution that has it
    module: str
    function: str
    has_decay_per_channel: bool = False  # where the mixer has one per head


FLA = "fla-core"


# What a mixer computes -> kernels that restart at sequence boundaries, best first.
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "short convolution": (
        Kernel("causal-conv1d", "causal_conv1d", "causal_conv1d_fn"),
        Kernel(FLA, "fla.modules.causal_conv1d", "causal_conv1d"),
    ),
    "gated delta rule": (
        Kernel(FLA, "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        Kernel(FLA, "fla.ops.kda", "chunk_kda", has_decay_per_channel=True),
    ),
    "Kimi delta attention": (Kernel(FLA, "fla.ops.kda", "chunk_kda"),),
    "Mamba 2 scan": (
        Kernel("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
        Kernel(FLA, "fla.ops.simple_gla", "chunk_simple_gla"),
        Kernel(FLA, "fla.ops.gla", "chunk_gla", has_decay_per_channel=True),
    ),
}


class Loaded(NamedTuple):
    kernel: Kernel
    call: Callable[..., Any]  # ignores keyword arguments that the installed version does not know


@functools.cache
def load(operation: str) -> Loaded | None:
    """The best installed kernel for an operation of `KERNELS`; None without one."""
    for kernel in KERNELS[operation]:
        if kernel.function in _MISCOMPILED and _is_miscompiled():
            continue
        try:
            function = getattr(importlib.import_module(kernel.module), kernel.function)
        except (ImportError, OSError, AttributeError, RuntimeError):
            continue  # not installed, or built for another torch: then the next one
        return Loaded(kernel, _with_known_arguments(function))
    return None


# Kernels of flash-linear-attention whose backward raises where Triton would compile it wrongly. Those with a decay per
# channel compute the same by other code.
_MISCOMPILED = {"chunk_gated_delta_rule", "chunk_simple_gla"}
_FIX = "Triton 3.7.1 (torch 2.12) or newer has faster ones"


def _is_miscompiled() -> bool:
    """On Hopper, from Triton 3.4 to 3.7.0."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    release = tuple(int(part) for part in re.findall(r"\d+", _version("triton"))[:3])
    return (3, 4) <= release < (3, 7, 1)


def _with_known_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    known = inspect.signature(inspect.unwrap(function)).parameters

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name in known}
        return function(*args, **given)

    return call


_reference_only = False


@contextmanager
def reference_only() -> Iterator[None]:
    """Without kernels, to compare them with."""
    global _reference_only
    before, _reference_only = _reference_only, True
    try:
        yield
    finally:
        _reference_only = before


def kernel_for(operation: str, tensor: Tensor) -> Loaded | None:
    """The kernel for tensors like this one. All kernels are for GPUs."""
    return load(operation) if tensor.is_cuda and not _reference_only else None


def describe(operation: str, device: torch.device) -> str:
    """What computes an operation on this device, and what would be faster."""
    if device.type != "cuda":
        return "torch (reference)"
    loaded = load(operation)
    if loaded is not None:
        kernel = loaded.kernel
        slower = f" (one decay per channel: {_FIX})" if kernel.has_decay_per_channel else ""
        return f"{kernel.package} {_version(kernel.package)}{slower}"
    return f"torch (reference, slow): {INSTALL}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # on PYTHONPATH, without metadata
        return ""


# The functions inside of mixers that pass something from token to token, with sequence boundaries.
#
# Legend: T tokens, C channels, W taps of a convolution, H heads, G groups, P head size, N state size.
#
# transformers writes every mixer of a kind with the same few functions, under the same names in all of its files, and
# calls a kernel or plain torch in them. `WITH_BOUNDARIES` has one for each: it takes the boundaries, calls a
# variable-length kernel where one is installed, and otherwise runs transformers' torch function by sequence.

SMALLEST_HEAD = 16  # Triton multiplies matrices of at least this size


def short_convolution(
    packing: Packing,
    torch_function: Callable[..., Any],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """A causal convolution over the tokens of each channel, (1, C, T). Taps do not reach over a boundary."""
    loaded = (
        None if torch.compiler.is_compiling() else kernel_for("short convolution", hidden_states)
    )
    if loaded is None or activation not in (None, "silu", "swish"):
        return _convolve(packing, hidden_states, weight, bias, activation)
    weight = weight.to(hidden_states.dtype)
    bias = None if bias is None else bias.to(hidden_states.dtype)
    if loaded.kernel.package == "causal-conv1d":
        # It takes sequence numbers only for channels that lie next to each other.
        x_1CT = hidden_states.transpose(1, 2).contiguous().transpose(1, 2)
        return loaded.call(x_1CT, weight, bias, seq_idx=packing.sequence_ids, activation=activation)
    out_1TC, _state = loaded.call(
        hidden_states.transpose(1, 2).contiguous(),
        weight,
        bias,
        activation=activation,
        **packing.fla_boundaries(),
    )
    return out_1TC.transpose(1, 2)


def _convolve(
    packing: Packing, x_1CT: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """The sum over taps, in torch: torch.compile makes one kernel of it."""
    from transformers.activations import ACT2FN

    x_TC = x_1CT[0].T.to(weight.dtype)
    taps = weight.shape[-1]
    out_TC = x_TC * weight[:, -1]
    for back in range(1, min(taps, len(x_TC))):
        earlier_TC = F.pad(x_TC[:-back], (0, 0, back, 0))
        inside_T1 = (packing.steps >= back)[:, None]
        out_TC = out_TC + torch.where(inside_T1, earlier_TC, 0) * weight[:, taps - 1 - back]
    if bias is not None:
        out_TC = out_TC + bias
    if activation is not None:
        out_TC = ACT2FN[activation](out_TC)
    return out_TC.to(x_1CT.dtype).T[None]


def delta_rule(operation: str) -> Callable[..., Any]:
    """The gated delta rule of linear attention, with one decay per head or (Kimi) one per channel."""

    @torch.compiler.disable
    def run(
        packing: Packing,
        torch_function: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        options: dict[str, Any] = {
            "g": g,
            "beta": beta,
            "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        }
        loaded = kernel_for(operation, value)
        if loaded is not None and min(query.shape[-1], value.shape[-1]) >= SMALLEST_HEAD:
            dtype = value.dtype
            q, k = query.to(dtype), key.to(dtype)
            options["g"] = _decay(loaded.kernel, g, q)
            out, _state = loaded.call(q, k, value, **options, **packing.fla_boundaries())
            return out.to(dtype), None
        return run_by_sequence(torch_function, packing, (query, key, value), options)[0], None

    return run


@torch.compiler.disable
def mamba2_scan(
    packing: Packing,
    torch_function: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """The state-space scan of Mamba 2, (1, T, H, P)."""
    options: dict[str, Any] = {
        "D": D,
        "dt_bias": dt_bias,
        "dt_softplus": dt_softplus,
        "dt_limit": dt_limit,
    }
    loaded = kernel_for("Mamba 2 scan", hidden_states)
    if loaded is None or min(hidden_states.shape[-1], B.shape[-1]) < SMALLEST_HEAD:
        inputs = (hidden_states, dt, A, B, C, chunk_size)
        return run_by_sequence(torch_function, packing, inputs, options)
    if loaded.kernel.package == "mamba-ssm":
        ids = packing.sequence_ids
        return loaded.call(hidden_states, dt, A, B, C, chunk_size, **options, seq_idx=ids)
    # The same recurrence as linear attention with one decay per head: C asks, B is the key, x the value.
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt_1TH = dt.clamp(*dt_limit).float()
    x_1THP = hidden_states
    copies = x_1THP.shape[2] // B.shape[2]
    query = C.to(x_1THP.dtype).repeat_interleave(copies, dim=2)
    out_1THP, _state = loaded.call(
        query,
        B.to(x_1THP.dtype).repeat_interleave(copies, dim=2),
        (x_1THP * dt_1TH[..., None]).to(x_1THP.dtype),
        g=_decay(loaded.kernel, A.float() * dt_1TH, query),
        scale=1.0,
        **packing.fla_boundaries(),
    )
    if D is not None:
        out_1THP = out_1THP + D[:, None] * x_1THP
    return out_1THP.to(x_1THP.dtype)


def _decay(kernel: Kernel, g: Tensor, query: Tensor) -> Tensor:
    """Decays in the shape that a kernel takes: (1, T, H), or one per channel, (1, T, H, N)."""
    if kernel.has_decay_per_channel:
        return g[..., None].expand(*g.shape, query.shape[-1]).contiguous()
    return g


def not_fused(*_: Any, **__: Any) -> None:
    """No fused kernel: it would take the weights of linear layers past their adapters."""


# Functions that may return None: then the mixer calls its layers one by one.
FUSED = {"mamba2_split_conv1d_scan_combined", "mamba_inner_fn"}
# What a mixer computes -> the function with boundaries.
WITH_BOUNDARIES: dict[str, Callable[..., Any]] = {
    "short convolution": short_convolution,
    "gated delta rule": delta_rule("gated delta rule"),
    "Kimi delta attention": delta_rule("Kimi delta attention"),
    "Mamba 2 scan": mamba2_scan,
}


def replacements(mixer_class: type, call: Callable[..., Any]) -> dict[str, Any]:
    """Other values for the functions over tokens that the forward of a class calls: `call` gets them first.

    Its further arguments are the function with boundaries (or None), transformers' own and its plain torch code.
    """
    namespace = inspect.unwrap(mixer_class.forward).__globals__  # type: ignore[attr-defined]
    replaced: dict[str, Any] = {}
    for name in names_in_forward(mixer_class):
        original = namespace.get(name)
        function = WITH_BOUNDARIES.get(OPERATIONS.get(name, ""))
        if name in FUSED:
            replaced[name] = not_fused
        elif function is not None or has_kernel(original):
            replaced[name] = functools.partial(call, function, original, inspect.unwrap(original))
    return replaced


def has_kernel(function: Any) -> bool:
    """Whether this is a torch function that transformers replaces by a kernel where one is installed."""
    code = getattr(function, "__code__", None)
    is_wrapper = code is not None and "hub_kernels" in code.co_filename
    return is_wrapper and hasattr(function, "__wrapped__")


# How far the installed kernels of mixers are from torch, on packed sequences; for `mvp doctor`.

LENGTHS = [96, 5, 107, 31, 64, 17]


def mixer_error(operation: str, device: str = "cuda") -> float:
    """The relative error of a kernel in bf16 against torch in float32, forward and backward."""
    name = next(name for name, computed in OPERATIONS.items() if computed == operation)
    function = WITH_BOUNDARIES[operation]
    original = inspect.unwrap(_original(operation, name))
    packing = Packing(LENGTHS, torch.tensor([0, *LENGTHS], device=device).cumsum(0).int())
    args, kwargs = _inputs(operation, device)
    with reference_only():
        expected = _with_gradients(function, packing, original, args, kwargs)
    halves = args[:1] if operation in ("short convolution", "Mamba 2 scan") else args
    in_half = (*(value.bfloat16() for value in halves), *args[len(halves) :])
    found = _with_gradients(function, packing, original, in_half, kwargs)
    pairs = zip(found, expected, strict=True)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)


def _original(operation: str, name: str) -> Callable[..., Any]:
    """The function of transformers that the kernel replaces, from the first model that has it."""
    from transformers.models.kimi_linear import modeling_kimi_linear
    from transformers.models.mamba2 import modeling_mamba2
    from transformers.models.qwen3_5 import modeling_qwen3_5

    modules = (modeling_qwen3_5, modeling_kimi_linear, modeling_mamba2)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def _with_gradients(
    function: Callable[..., Any], packing: Packing, original: Any, args: Any, kwargs: Any
) -> list[Tensor]:
    first = args[0].clone().requires_grad_()
    out = function(packing, original, first, *args[1:], **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    (gradient,) = torch.autograd.grad(out.float().square().sum(), first)
    return [out.detach(), gradient]


def _inputs(operation: str, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random inputs in the layout of transformers' functions, with 2 heads of size 64."""
    generator = torch.Generator(device).manual_seed(0)
    tokens = sum(LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    if operation == "short convolution":
        return (normal(1, 128, tokens), normal(128, 4)), {"activation": "silu"}
    if operation == "Mamba 2 scan":
        groups = normal(1, tokens, 1, 64), normal(1, tokens, 1, 64)
        sizes = normal(1, tokens, 2), -normal(2).exp()
        return (normal(1, tokens, 2, 64), *sizes, *groups, 64), {"dt_softplus": True}
    decay = (1, tokens, 2) if operation == "gated delta rule" else (1, tokens, 2, 64)
    gates = {"g": -0.05 * normal(*decay).exp(), "beta": normal(1, tokens, 2).sigmoid()}
    heads = tuple(normal(1, tokens, 2, 64) for _ in range(3))
    return heads, {**gates, "use_qk_l2norm_in_kernel": True}
