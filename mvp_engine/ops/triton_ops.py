"""Operators whose kernels are in `triton_kernels.py`: attention of short sequences, gated rows of experts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mvp_engine.ops.precision import HAS_TRITON, is_half_on_gpu

# Attention of many short sequences of one length, such as the codes of each frame in a code predictor.
#
# Legend: N sequences, L tokens of each, H query heads, K key/value heads, d head size.
#
# A flash kernel gives each sequence and head a tile of 64 to 128 tokens, and backward float32 queries of the same size:
# for 16 tokens most of both is empty. Here several sequences share a tile, with a block-diagonal mask; since a tile
# holds all keys of its queries, backward needs nothing but the inputs, and no atomic additions.

LONGEST_SHORT = 32  # tokens of a sequence; longer ones fill tiles of flash kernels


def short_attention_is_supported(q_NHLd: Tensor, k_NKLd: Tensor, v_NKLd: Tensor) -> bool:
    """Half precision on a GPU, head sizes that are powers of 2."""
    if not HAS_TRITON or not is_half_on_gpu(q_NHLd):
        return False
    size = q_NHLd.shape[-1]
    same = q_NHLd.shape[2] == k_NKLd.shape[2] and v_NKLd.shape == k_NKLd.shape
    return same and k_NKLd.shape[2] <= LONGEST_SHORT and size in (16, 32, 64, 128, 256)


def short_attention(
    q_NHLd: Tensor, k_NKLd: Tensor, v_NKLd: Tensor, *, scale: float | None = None, causal: bool
) -> Tensor:
    """(N, L, H, d), contiguous."""
    return _short_forward(q_NHLd, k_NKLd, v_NKLd, scale or 1 / math.sqrt(q_NHLd.shape[-1]), causal)


@torch.library.custom_op("mvp::short_attention", mutates_args=())
def _short_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    from mvp_engine.ops import triton_kernels

    return triton_kernels.short_attention(_rows(q), _rows(k), _rows(v), scale, causal)


@torch.library.custom_op("mvp::short_attention_backward", mutates_args=())
def _short_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from mvp_engine.ops import triton_kernels

    return triton_kernels.short_attention_backward(
        _rows(d_out), _rows(q), _rows(k), _rows(v), scale, causal
    )


@_short_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    sequences, heads, length, size = q.shape
    return q.new_empty(sequences, length, heads, size)


@_short_backward.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _rows(x: Tensor) -> Tensor:
    """The kernel reads whole rows of a head; all other strides are free."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _save_short(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _short_gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    return (*_short_backward(d_out, *ctx.saved_tensors, *ctx.options), None, None)


_short_forward.register_autograd(_short_gradients, setup_context=_save_short)


# SwiGLU of rows that are sorted by expert, each row times the routing weight of its token.
#
# Legend: N rows, F intermediate size.
#
# Inductor computes the gradient of the concatenated halves (gate and up) twice, 0.48 ms for 147k rows of 384 on an
# H200, which is 3.4 times their memory traffic. Here one Triton kernel writes both halves, and sums the gradient of
# weights.


def gated_rows_is_supported(gate_up_N2F: Tensor) -> bool:
    """Half precision on a GPU."""
    return HAS_TRITON and is_half_on_gpu(gate_up_N2F)


def gated_rows(gate_up_N2F: Tensor, weight_N: Tensor) -> Tensor:
    """(N, F): silu(gate) * up * weight, computed in float32, in the dtype of the rows."""
    return _gated_forward(gate_up_N2F, weight_N)


@torch.library.custom_op("mvp::gated_rows", mutates_args=())
def _gated_forward(gate_up: Tensor, weight: Tensor) -> Tensor:
    from mvp_engine.ops import triton_kernels

    return triton_kernels.gated_rows(gate_up.contiguous(), weight.contiguous())


@torch.library.custom_op("mvp::gated_rows_backward", mutates_args=())
def _gated_backward(d_out: Tensor, gate_up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    from mvp_engine.ops import triton_kernels

    return triton_kernels.gated_rows_backward(
        d_out.contiguous(), gate_up.contiguous(), weight.contiguous()
    )


@_gated_forward.register_fake
def _(gate_up: Tensor, weight: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@_gated_backward.register_fake
def _(d_out: Tensor, gate_up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty(gate_up.shape), weight.new_empty(weight.shape)


def _save_gated(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gated_gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
    return _gated_backward(d_out, *ctx.saved_tensors)


_gated_forward.register_autograd(_gated_gradients, setup_context=_save_gated)
