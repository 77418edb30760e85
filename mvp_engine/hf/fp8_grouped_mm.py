"""The linear layers of stacked experts in FP8 (`model.fp8`): outputs and gradients of inputs are FP8 grouped GEMMs.

Legend: N rows, sorted by expert; E experts; I inputs, O outputs.

Scaling is row-wise, as in `ops/fp8.py`: each row has a scale, and each output of each expert. The gradient of inputs
sums over outputs, so matrices are quantized again for it, with a scale for each input. The gradients of weights stay
bf16 grouped GEMMs. Groups may end at any row: only the sizes of matrices have to be multiples of 16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mvp_engine.hf.grouped_mm import opaque_grouped_mm
from mvp_engine.ops.fp8 import quantize

# torch has FP8 grouped GEMMs with row-wise scales for these alone, Hopper and the first Blackwell.
CAPABILITIES = ((9, 0), (10, 0))


def is_supported(device: torch.device) -> bool:
    """Other devices than GPUs compute the same values without FP8 GEMMs."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in CAPABILITIES


def fp8_grouped_linear(
    x_NI: Tensor, weight: Tensor, ends_E: Tensor, is_transposed: bool = False
) -> Tensor:
    """Each row times the matrix of its expert, (N, O) in bf16. `is_transposed`: matrices are (in, out)."""
    weight_EOI = weight.mT if is_transposed else weight
    return _Fp8GroupedLinear.apply(x_NI.bfloat16().contiguous(), weight_EOI, ends_E)


class _Fp8GroupedLinear(torch.autograd.Function):
    """It saves the weights as they are: FP8 copies exist only during a GEMM."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        # Only the gradient of the weight needs the input: frozen experts do not keep it.
        saved_NI = x_NI if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(saved_NI, weight_EOI, ends_E)
        return _grouped_mm_transposed(x_NI, weight_EOI, ends_E)

    @staticmethod
    def backward(ctx: Any, d_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_NI, weight_EOI, ends_E = ctx.saved_tensors
        d_NO = d_NO.bfloat16().contiguous()
        d_x_NI = None
        if ctx.needs_input_grad[0]:
            d_x_NI = _grouped_mm_transposed(d_NO, weight_EOI.mT, ends_E)
        d_weight_EOI = None
        if ctx.needs_input_grad[1]:
            d_weight_EOI = _weight_grad(d_NO, x_NI, weight_EOI, ends_E).to(weight_EOI.dtype)
        return d_x_NI, d_weight_EOI, None


def _grouped_mm_transposed(a_NI: Tensor, b_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Each row of `a` times the transposed matrix of its expert in FP8, with bf16 output."""
    a_fp8, a_scale_N1 = quantize(a_NI)
    b_fp8, b_scale_EO1 = quantize(b_EOI)
    b_fp8 = b_fp8.contiguous()  # transposed as bytes, not as the weights that they are made of
    return _fp8_grouped_mm(a_fp8, b_fp8, a_scale_N1.squeeze(-1), b_scale_EO1.squeeze(-1), ends_E)


def _weight_grad(d_NO: Tensor, x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """In the memory layout of the weight, so that adding it to a gradient needs no copy."""
    if weight_EOI.stride(-1) == 1:
        return _grouped_outer(d_NO, x_NI, ends_E)
    return _grouped_outer(x_NI, d_NO, ends_E).mT


# Operators of their own, with operands in row-major order. Inductor would choose the order in memory of a transposed
# operand itself, and torch's grouped GEMMs refuse one with the rows innermost unless their number is a multiple of 16.


@torch.library.custom_op("mvp::fp8_grouped_mm", mutates_args=())
def _fp8_grouped_mm(
    a_NI: Tensor, b_EOI: Tensor, a_scale_N: Tensor, b_scale_EO: Tensor, ends_E: Tensor
) -> Tensor:
    if not a_NI.is_cuda:
        # The same values on a CPU, which has no FP8 GEMM.
        matrices_EIO = (b_EOI.float() * b_scale_EO[..., None]).mT
        return (
            opaque_grouped_mm(a_NI.float(), matrices_EIO, ends_E) * a_scale_N[:, None]
        ).bfloat16()
    if not len(a_NI):
        return a_NI.new_empty(0, b_EOI.shape[1], dtype=torch.bfloat16)
    return torch._scaled_grouped_mm(
        a_NI,
        b_EOI.mT,
        a_scale_N,
        b_scale_EO,
        offs=ends_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


@torch.library.custom_op("mvp::grouped_outer", mutates_args=())
def _grouped_outer(a_NR: Tensor, b_NC: Tensor, ends_E: Tensor) -> Tensor:
    """(E, R, C): for each expert, `a.T @ b` over its rows; zeros if it has none."""
    return torch.nn.functional.grouped_mm(a_NR.t(), b_NC, offs=ends_E)


@_fp8_grouped_mm.register_fake
def _(a_NI: Tensor, b_EOI: Tensor, a_scale_N: Tensor, b_scale_EO: Tensor, ends_E: Tensor) -> Tensor:
    # `len` would fix the number of rows.
    return a_NI.new_empty(a_NI.shape[0], b_EOI.shape[1], dtype=torch.bfloat16)


@_grouped_outer.register_fake
def _(a_NR: Tensor, b_NC: Tensor, ends_E: Tensor) -> Tensor:
    return a_NR.new_empty(ends_E.shape[0], a_NR.shape[1], b_NC.shape[1])
