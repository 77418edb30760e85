"""FP8 linear layers: GEMMs in float8, which Hopper computes at twice the bf16 rate, for some loss of precision.

Legend: T tokens, P tokens with padding, K inputs, N outputs, R rows.

Scaling is row-wise: each row of a matrix has a scale that maps its largest value to between 224 and 448, the largest
float8 one, so an outlier costs precision in one token or one output, not in all. Scales are powers of two, so that what
is quantized by rows can be transposed, then with one scale. Outputs and gradients of inputs are
FP8 GEMMs. Gradients of weights, sums over all tokens, are bf16 GEMMs, or FP8 GEMMs of transposed operands
(`model.fp8=all`). Weights and optimizer states stay float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.errors import UserError
from mvp_engine.ops.precision import autocast_dtype

LARGEST = 448.0  # of float8_e4m3fn
SMALLEST = 1e-12  # largest value of a row, so that rows of zeros have a scale
MULTIPLE = 16  # FP8 GEMMs need sizes that are multiples of this


def use(layers: Iterable[nn.Module], weight_gradients: bool = False) -> None:
    """Convert linear layers to FP8 under bf16 autocast."""
    for layer in layers:
        layer.__class__ = Fp8Linear  # the same layer with the same parameters
        layer.fp8_weight_gradient = weight_gradients  # type: ignore[assignment]


def check(device: torch.device) -> None:
    """Raise an error for GPUs without FP8 GEMMs."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"model.fp8: {name} does not support FP8 GEMMs, which need Ada, Hopper or newer. Remove model.fp8"
        )


def fits(layer: nn.Module) -> bool:
    """A plain linear layer (not an adapter's) of sizes that FP8 GEMMs support."""
    if type(layer) is not nn.Linear:
        return False
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0


class Fp8Weight(NamedTuple):
    """A weight that is quantized already, for forwards without gradients."""

    values: Tensor  # (N, K); of experts (E, N, K)
    scale: Tensor  # (N, 1)


def quantized_name(name: str) -> str:
    """The attribute of a module with the FP8 values of its parameter; None: its forward quantizes."""
    return f"{name}_quantized"


class Fp8Linear(nn.Linear):
    """A linear layer that runs in FP8 under bf16 autocast, and as nn.Linear otherwise."""

    fp8_weight_gradient: bool = False
    weight_quantized: Fp8Weight | None = None  # the weight: `hf/experts/fp8_layers.py`

    def forward(self, x: Tensor) -> Tensor:
        if autocast_dtype(x) != torch.bfloat16:
            return super().forward(x)
        x_TK = x.bfloat16().reshape(-1, self.in_features)
        if self.weight_quantized is None:
            out_TN = _Fp8Matmul.apply(x_TK, self.fp8_weight_gradient, self.weight)
        else:
            out_TN = _matmul_transposed(*quantize(x_TK), *self.weight_quantized)
        out = out_TN.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.bfloat16()


class _Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, fp8_weight_gradient: bool, weight_NK: Tensor) -> Tensor:
        """The weight is quantized here, and once more in backward, unless it was gathered in FP8."""
        ctx.fp8_weight_gradient = fp8_weight_gradient
        low_TK, scale_T1 = quantize(x_TK)
        # Only the gradient of the weight needs the input: frozen layers do not keep it.
        inputs = (low_TK, scale_T1) if fp8_weight_gradient else (x_TK,)
        ctx.save_for_backward(weight_NK, *(inputs if ctx.needs_input_grad[2] else ()))
        return _matmul_transposed(low_TK, scale_T1, *quantize(weight_NK))

    @staticmethod
    def backward(ctx: Any, d_TN: Tensor) -> tuple[Tensor | None, ...]:
        weight_NK, *inputs = ctx.saved_tensors
        d_TN = d_TN.bfloat16()
        low_TN, scale_T1 = quantize(d_TN)
        d_x_TK = None
        if ctx.needs_input_grad[0]:
            weight_KN, scale_11 = transpose(*quantize(weight_NK), len(weight_NK))
            d_x_TK = _matmul_transposed(low_TN, scale_T1, weight_KN, scale_11)
        d_weight_NK = None
        if ctx.needs_input_grad[2]:
            if ctx.fp8_weight_gradient:
                # More than the tokens, always: GEMMs need a row to sum, and a branch would be another graph.
                padded = (d_TN.shape[0] // MULTIPLE + 1) * MULTIPLE
                x_KP = transpose(inputs[0], inputs[1], padded)
                both = (*transpose(low_TN, scale_T1, padded), *x_KP)
                d_weight_NK = _matmul_transposed(*both, fast=False)
            else:
                d_weight_NK = d_TN.t() @ inputs[0]
        # In bf16; autograd casts the gradient to the dtype of the weight.
        return d_x_TK, None, d_weight_NK


def _matmul_transposed(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, fast: bool = True
) -> Tensor:
    """`a @ b.T` of FP8 values, with bf16 output.

    `fast` sums with fewer bits, and `a` has a scale for each row. GEMMs over many tokens sum with all bits, and each
    operand has one scale: with a scale for each row, cuBLAS would be no faster than in bf16.
    """
    if not a.is_cuda:
        # The same values on a CPU, which has no FP8 GEMM.
        with torch.autocast("cpu", enabled=False):
            return (a.float() @ b.float().t() * a_scale * b_scale.t()).bfloat16()
    if fast:
        b_scale = b_scale.expand(len(b), 1).contiguous()
    return torch._scaled_mm(
        a, b.t(), a_scale, b_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The float8 values in row-major order, which FP8 GEMMs need, and the scale of each row, (..., R, 1)."""
    if hasattr(rows, "quantized"):  # before it was gathered: `hf/experts/fp8_layers.py`
        return rows.quantized
    wanted = rows.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST) * (1 / LARGEST)
    # The next power of two, by the bits of a float32: below its 8 of exponent are 23.
    scale_R1 = ((wanted.view(torch.int32) + (2**23 - 1)) & -(2**23)).view(torch.float32)
    return (rows.float() * scale_R1.reciprocal()).to(torch.float8_e4m3fn).contiguous(), scale_R1


# Transposed FP8 matrices: the other operand order, from values that are quantized by rows.
#
# Legend: R rows, C columns, P rows with padding.
#
# FP8 GEMMs want what they sum over innermost in memory, with one scale along it. The scales of rows are powers of two:
# a value moves to the largest scale of its matrix by its exponent. That is exact down to float8's smallest normal
# number, 2^-6 (the largest value of the matrix is between 224 and 448), and rounds to multiples of 2^-9 below. This
# reads one byte per value and writes one; to quantize columns of bf16 values would read four, two for the largest.


def transpose(values: Tensor, scale: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """(..., C, P) of (..., R, C) with zeros behind the rows, and the one scale of each matrix, (..., 1, 1)."""
    tiny = torch.finfo(scale.dtype).tiny  # no rows have no largest scale
    largest = F.pad(scale, (0, 0, 0, 1), value=tiny).amax(-2, keepdim=True)
    return _transpose(values, scale, largest, padded), largest


@torch.library.custom_op("mvp::transpose_fp8", mutates_args=())
def _transpose(values: Tensor, scale: Tensor, largest: Tensor, padded: int) -> Tensor:
    if values.is_cuda:
        from mvp_engine.ops import triton_kernels

        return triton_kernels.transpose_fp8(values, scale, largest, padded)
    moved = (values.float() * (scale / largest)).mT
    return F.pad(moved, (0, padded - values.shape[-2])).to(values.dtype).contiguous()


@_transpose.register_fake
def _(values: Tensor, scale: Tensor, largest: Tensor, padded: int) -> Tensor:
    return values.new_empty(*values.shape[:-2], values.shape[-1], padded)
