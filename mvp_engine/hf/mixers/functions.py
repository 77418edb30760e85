"""The functions inside of mixers that pass something from token to token, with sequence boundaries.

Legend: T tokens, C channels, W taps of a convolution, H heads, G groups, P head size, N state size.

transformers writes every mixer of a kind with the same few functions, under the same names in all of its files, and
calls a kernel or plain torch in them. `REPLACEMENTS` has one entry per such name: it takes the boundaries, calls a
variable-length kernel where one is installed, and otherwise runs transformers' torch function by sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mvp_engine.hf.mixers.kernels import Kernel, kernel_for
from mvp_engine.hf.mixers.per_sequence import Packing, run_by_sequence

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
# Names in the files of transformers' models -> what computes them, and the function with boundaries.
REPLACEMENTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "causal_conv1d_fn": ("short convolution", short_convolution),
    "torch_chunk_gated_delta_rule": ("gated delta rule", delta_rule("gated delta rule")),
    "chunk_kimi_delta_attention": ("Kimi delta attention", delta_rule("Kimi delta attention")),
    "mamba2_chunk_scan": ("Mamba 2 scan", mamba2_scan),
}
# Functions over tokens without a variable-length kernel: mixers that call them run by sequence as a whole.
_BY_SEQUENCE = {"mamba_selective_scan"}


def operations_of(mixer: Any) -> tuple[str, ...] | None:
    """What a mixer computes by functions of `REPLACEMENTS` only; None if it must run by sequence as a whole."""
    forward = inspect.unwrap(type(mixer).forward)
    names = {*forward.__code__.co_names}
    used = [name for name in REPLACEMENTS if name in names and name in forward.__globals__]
    if not used or names & _BY_SEQUENCE:
        return None
    return tuple(REPLACEMENTS[name][0] for name in used)


def has_kernel(function: Any) -> bool:
    """Whether this is a torch function that transformers replaces by a kernel where one is installed."""
    code = getattr(function, "__code__", None)
    is_wrapper = code is not None and "hub_kernels" in code.co_filename
    return is_wrapper and hasattr(function, "__wrapped__")
