"""SwiGLU of rows that are sorted by expert, each row times the routing weight of its token.

Legend: N rows, F intermediate size.

Inductor computes the gradient of the concatenated halves (gate and up) twice, 0.48 ms for 147k rows of 384 on an H200,
which is 3.4 times their memory traffic. Here one Triton kernel writes both halves, and sums the gradient of weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mvp_engine.ops.precision import HAS_TRITON, is_half_on_gpu


def is_supported(gate_up_N2F: Tensor) -> bool:
    """Half precision on a GPU."""
    return HAS_TRITON and is_half_on_gpu(gate_up_N2F)


def gated_rows(gate_up_N2F: Tensor, weight_N: Tensor) -> Tensor:
    """(N, F): silu(gate) * up * weight, computed in float32, in the dtype of the rows."""
    return _forward(gate_up_N2F, weight_N)


@torch.library.custom_op("mvp::gated_rows", mutates_args=())
def _forward(gate_up: Tensor, weight: Tensor) -> Tensor:
    from mvp_engine.ops import triton_kernels

    return triton_kernels.gated_rows(gate_up.contiguous(), weight.contiguous())


@torch.library.custom_op("mvp::gated_rows_backward", mutates_args=())
def _backward(d_out: Tensor, gate_up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    from mvp_engine.ops import triton_kernels

    return triton_kernels.gated_rows_backward(
        d_out.contiguous(), gate_up.contiguous(), weight.contiguous()
    )


@_forward.register_fake
def _(gate_up: Tensor, weight: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@_backward.register_fake
def _(d_out: Tensor, gate_up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty(gate_up.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(d_out, *ctx.saved_tensors)


_forward.register_autograd(_gradients, setup_context=_setup_context)
