"""Triton kernel of `fp8_transpose`: one program for a tile. Legend: R rows, C columns, P rows with padding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 256  # of a tile
COLUMNS = 64
WARPS = 8


def transpose(values: Tensor, scale: Tensor, largest: Tensor, padded: int) -> Tensor:
    *stack, rows, columns = values.shape
    out = values.new_empty(*stack, columns, padded)
    if not out.numel():
        return out
    matrices = largest.numel()
    grid = (triton.cdiv(padded, ROWS), triton.cdiv(columns, COLUMNS), matrices)
    _transpose_fp8[grid](
        values.contiguous().view(torch.uint8),
        scale.contiguous(),
        largest,
        out.view(torch.uint8),
        rows,
        columns,
        padded,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    return out


@triton.jit
def _transpose_fp8(  # type: ignore[no-untyped-def]
    values, scale, largest, out, rows, columns, padded, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    matrix = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = values + matrix * rows * columns + r.to(tl.int64)[:, None] * columns + c[None, :]
    tile = tl.load(place, (r < rows)[:, None] & (c < columns)[None, :], 0)
    ratio = tl.load(scale + matrix * rows + r, r < rows, 0.0) / tl.load(largest + matrix)
    # Half precision holds every float8 value, and a ratio below its range leaves nothing of one.
    moved = tile.to(tl.float8e4nv, bitcast=True).to(tl.float16) * ratio.to(tl.float16)[:, None]
    low = moved.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    to = out + matrix * columns * padded + c.to(tl.int64)[:, None] * padded + r[None, :]
    tl.store(to, tl.trans(low), (c < columns)[:, None] & (r < padded)[None, :])
