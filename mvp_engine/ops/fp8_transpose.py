"""Transposed FP8 matrices: the other operand order, from values that are quantized by rows.

Legend: R rows, C columns, P rows with padding.

Gradients of weights sum over tokens, and those of inputs over outputs; FP8 GEMMs want what they sum over innermost in
memory, with one scale along it. The scales of rows are powers of two, so a value moves to the largest scale of its
matrix by its exponent. That is exact down to float8's smallest normal number, 2^-6 (the largest value of the matrix is
between 224 and 448), and rounds to multiples of 2^-9 below. This reads one byte per value and writes one; to quantize
the columns of bf16 values would read four, two of them for the largest, and write one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def transpose(values: Tensor, scale: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """(..., C, P) of (..., R, C) with zeros behind the rows, and the one scale of each matrix, (..., 1, 1)."""
    tiny = torch.finfo(scale.dtype).tiny  # no rows have no largest scale
    largest = F.pad(scale, (0, 0, 0, 1), value=tiny).amax(-2, keepdim=True)
    return _transpose(values, scale, largest, padded), largest


@torch.library.custom_op("mvp::transpose_fp8", mutates_args=())
def _transpose(values: Tensor, scale: Tensor, largest: Tensor, padded: int) -> Tensor:
    if values.is_cuda:
        from mvp_engine.ops import fp8_transpose_kernel as kernel

        return kernel.transpose(values, scale, largest, padded)
    moved = (values.float() * (scale / largest)).mT
    return F.pad(moved, (0, padded - values.shape[-2])).to(values.dtype).contiguous()


@_transpose.register_fake
def _(values: Tensor, scale: Tensor, largest: Tensor, padded: int) -> Tensor:
    return values.new_empty(*values.shape[:-2], values.shape[-1], padded)
