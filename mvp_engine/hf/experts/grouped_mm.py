"""Grouped GEMM of experts as an opaque operator, for compiled blocks in dtypes that torch's has no shape function for.

Legend: N rows, sorted by expert; E experts; I inputs, O outputs.

torch.compile knows torch's own in bf16 alone. The backward of transformers' fallback reads the ends of the groups on
the host, which fails to compile. torch then runs the code of the whole block uncompiled, also in blocks of another kind
that share it, and full activation checkpointing finds other tensors in the repeated forward than in the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mvp_engine.ops.fp8 import Fp8Weight, quantize, transpose


def needs_operator(weight: Tensor) -> bool:
    """Inside torch.compile, in a dtype that torch's own operator does not support there."""
    return torch.compiler.is_compiling() and weight.dtype != torch.bfloat16


@torch.library.custom_op("mvp::opaque_grouped_mm", mutates_args=())
def opaque_grouped_mm(x_NI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Each row times the matrix of its expert; `ends_E` is where the rows of each expert end."""
    out_NO = x_NI.new_zeros(len(x_NI), weight_EIO.shape[2])
    for expert, rows in _groups(ends_E):
        torch.mm(x_NI[rows], weight_EIO[expert], out=out_NO[rows])
    return out_NO


@torch.library.custom_op("mvp::opaque_grouped_mm_backward", mutates_args=())
def _backward(
    grad_NO: Tensor, x_NI: Tensor, weight_EIO: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    x_grad_NI = x_NI.new_zeros(x_NI.shape)
    weight_grad_EIO = weight_EIO.new_zeros(weight_EIO.shape)
    for expert, rows in _groups(ends_E):
        torch.mm(grad_NO[rows], weight_EIO[expert].T, out=x_grad_NI[rows])
        torch.mm(x_NI[rows].T, grad_NO[rows], out=weight_grad_EIO[expert])
    return x_grad_NI, weight_grad_EIO


def _groups(ends_E: Tensor) -> list[tuple[int, slice]]:
    """Each expert with rows, and its rows."""
    ends = ends_E.tolist()
    slices = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return [(expert, rows) for expert, rows in enumerate(slices) if rows.start < rows.stop]


@opaque_grouped_mm.register_fake
def _(x_NI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], weight_EIO.shape[2])  # `len` would fix the number of rows


@_backward.register_fake
def _(grad_NO: Tensor, x_NI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    return x_NI.new_empty(x_NI.shape), weight_EIO.new_empty(weight_EIO.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grads(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*_backward(grad_NO, *ctx.saved_tensors), None)


opaque_grouped_mm.register_autograd(_grads, setup_context=_save)


# The linear layers of stacked experts in FP8 (`model.fp8`): outputs and gradients of inputs are FP8 grouped GEMMs.
#
# Legend: N rows, sorted by expert; E experts; I inputs, O outputs.
#
# Scaling is row-wise, as in `ops/fp8.py`: each row has a scale, and each output of each expert. The gradient of inputs
# sums over outputs: the quantized matrices are transposed for it, with a scale for each expert. The gradients of
# weights stay bf16 grouped GEMMs. Groups may end at any row: only the sizes of matrices have to be multiples of 16.

# torch has FP8 grouped GEMMs with row-wise scales for these alone, Hopper and the first Blackwell.
CAPABILITIES = ((9, 0), (10, 0))


def is_supported(device: torch.device) -> bool:
    """Other devices than GPUs compute the same values without FP8 GEMMs."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in CAPABILITIES


def fp8_grouped_linear(
    x_NI: Tensor, weight: Tensor | Fp8Weight, ends_E: Tensor, is_transposed: bool = False
) -> Tensor:
    """Each row times the matrix of its expert, (N, O) in bf16. `is_transposed`: matrices are (in, out)."""
    rows_NI = x_NI.bfloat16().contiguous()
    if isinstance(weight, Fp8Weight):
        return _grouped_mm_transposed(rows_NI, *weight, ends_E)
    return _Fp8GroupedLinear.apply(rows_NI, weight, ends_E, is_transposed)


class _Fp8GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight: Tensor, ends_E: Tensor, is_transposed: bool
    ) -> Tensor:
        """The weight is quantized here, and once more in backward."""
        ctx.is_transposed = is_transposed
        # Only the gradient of the weight needs the input: frozen experts do not keep it.
        saved_NI = x_NI if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(saved_NI, weight, ends_E)
        return _grouped_mm_transposed(x_NI, *quantize_experts(weight, is_transposed), ends_E)

    @staticmethod
    def backward(ctx: Any, d_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight, ends_E = ctx.saved_tensors
        d_NO = d_NO.bfloat16().contiguous()
        d_x_NI = None
        if ctx.needs_input_grad[0]:
            by_input = quantize_experts(weight, not ctx.is_transposed)
            d_x_NI = _grouped_mm_transposed(d_NO, *by_input, ends_E)
        d_weight = None
        if ctx.needs_input_grad[1]:
            both = (x_NI, d_NO) if ctx.is_transposed else (d_NO, x_NI)
            d_weight = _grouped_outer(*both, ends_E)  # autograd casts it to the dtype of the weight
        return d_x_NI, d_weight, None, None


def quantize_experts(weight: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """The float8 values and scales of matrices by their rows, or by those of their transposed ones."""
    values, scale = quantize(weight)
    if not transposed:
        return values, scale
    values, scale_E11 = transpose(values, scale, weight.shape[-2])
    return values, scale_E11.expand(-1, weight.shape[-1], 1).contiguous()


def _grouped_mm_transposed(
    a_NI: Tensor, values_EOI: Tensor, scale_EO1: Tensor, ends_E: Tensor
) -> Tensor:
    """Each row of `a` times the transposed matrix of its expert in FP8, with bf16 output."""
    values_NI, scale_N1 = quantize(a_NI)
    scales = scale_N1.squeeze(-1), scale_EO1.squeeze(-1)
    return _fp8_grouped_mm(values_NI, values_EOI, *scales, ends_E)


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
    if not len(a_NR):  # a rank without rows: kernels get no empty tensors
        return a_NR.new_zeros(len(ends_E), a_NR.shape[1], b_NC.shape[1])
    return torch.nn.functional.grouped_mm(a_NR.t(), b_NC, offs=ends_E)


@_fp8_grouped_mm.register_fake
def _(a_NI: Tensor, b_EOI: Tensor, a_scale_N: Tensor, b_scale_EO: Tensor, ends_E: Tensor) -> Tensor:
    # `len` would fix the number of rows.
    return a_NI.new_empty(a_NI.shape[0], b_EOI.shape[1], dtype=torch.bfloat16)


@_grouped_outer.register_fake
def _(a_NR: Tensor, b_NC: Tensor, ends_E: Tensor) -> Tensor:
    return a_NR.new_empty(ends_E.shape[0], a_NR.shape[1], b_NC.shape[1])
