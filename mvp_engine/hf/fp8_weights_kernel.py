"""Triton kernels that quantize a weight by rows and by columns at once: two reads of it, for what is kept for a step.

Legend: N outputs, K inputs (or the reverse). What the values and scales are is in `mvp_engine.ops.fp8`. The matrices of
stacked experts are the third axis of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mvp_engine.ops.fp8 import LARGEST, SMALLEST, Fp8Weight

TILE = 64  # rows and columns per program
WARPS = 4


def quantize_both(copies: Sequence[Fp8Weight], weights: Sequence[Tensor]) -> None:
    """Write the float8 values and scales of the weights into the copies."""
    sizes = [weight[..., 0].numel() + weight[..., 0, :].numel() for weight in weights]
    amax = torch.zeros(sum(sizes), device=weights[0].device)  # cleared for all weights at once
    for copy, weight, amax_of in zip(copies, weights, amax.split(sizes), strict=True):
        rows, columns = weight.shape[-2:]
        matrices = math.prod(weight.shape[:-2])
        grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE), matrices)
        shape = (weight.contiguous(), amax_of, rows, columns)
        _largest[grid](*shape, TILE=TILE, num_warps=WARPS)
        _quantize[grid](
            *shape,
            *copy[1:],
            SMALLEST=SMALLEST,
            INVERSE=1 / LARGEST,
            TILE=TILE,
            num_warps=WARPS,
        )


@triton.jit
def _tile(weight, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (n < rows)[:, None] & (k < columns)[None, :]
    start = tl.program_id(2).to(tl.int64) * rows * columns
    place = start + n.to(tl.int64)[:, None] * columns + k[None, :]
    return n, k, inside, place, tl.load(weight + place, inside, 0.0).to(tl.float32)


@triton.jit
def _largest(weight, amax, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest absolute values of rows, and behind them those of columns."""
    n, k, _, _, values = _tile(weight, rows, columns, TILE)
    amax += tl.program_id(2) * (rows + columns)
    tl.atomic_max(amax + n, tl.max(tl.abs(values), 1), n < rows, sem="relaxed")
    tl.atomic_max(amax + rows + k, tl.max(tl.abs(values), 0), k < columns, sem="relaxed")


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]
    weight,
    amax,
    rows,
    columns,
    values_NK,
    scale_N,
    values_KN,
    scale_K,
    SMALLEST: tl.constexpr,
    INVERSE: tl.constexpr,  # of the largest float8
    TILE: tl.constexpr,
):
    n, k, inside, place, values = _tile(weight, rows, columns, TILE)
    matrix = tl.program_id(2)
    amax += matrix * (rows + columns)
    scale_N += matrix * rows
    scale_K += matrix * columns
    values_KN += matrix.to(tl.int64) * rows * columns
    of_rows = tl.maximum(tl.load(amax + n, n < rows, 0.0), SMALLEST)
    of_columns = tl.maximum(tl.load(amax + rows + k, k < columns, 0.0), SMALLEST)
    of_rows *= INVERSE
    of_columns *= INVERSE
    tl.store(scale_N + n, of_rows, (n < rows) & (tl.program_id(1) == 0))
    tl.store(scale_K + k, of_columns, (k < columns) & (tl.program_id(0) == 0))
    zeros = tl.zeros([TILE, TILE], tl.float32)
    # Division as PyTorch rounds it. No value is larger than float8's largest by more than a bit that float8 has not.
    by_row = tl.div_rn(values, of_rows[:, None] + zeros)
    tl.store(values_NK + place, by_row.to(values_NK.dtype.element_ty), inside)
    by_column = tl.div_rn(values, of_columns[None, :] + zeros)
    transposed = k.to(tl.int64)[:, None] * rows + n[None, :]
    its_inside = (k < columns)[:, None] & (n < rows)[None, :]
    tl.store(values_KN + transposed, tl.trans(by_column).to(values_KN.dtype.element_ty), its_inside)
