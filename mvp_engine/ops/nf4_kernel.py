"""Triton kernel that dequantizes NF4 weights: it reads 4.5 bits and writes one number per weight, nothing else.

Legend: N outputs, K inputs, B bytes of a row. The layout of the bytes is in `mvp_engine.ops.nf4`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CODES = 1024  # bytes of codes per program, two weights each
WARPS = 4


def dequantize(stored_NB: Tensor, levels: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    rows, row_bytes = stored_NB.shape
    out_NK = stored_NB.new_empty(rows, in_features, dtype=dtype)
    code_bytes = in_features // 2
    grid = (rows, triton.cdiv(code_bytes, CODES))
    scales = stored_NB.view(torch.float32)  # the same memory
    _dequantize[grid](
        stored_NB, scales, levels, out_NK, row_bytes, code_bytes, CODES=CODES, num_warps=WARPS
    )
    return out_NK


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
    stored, scales, levels, out, row_bytes, code_bytes, CODES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CODES + tl.arange(0, CODES)
    inside = at < code_bytes
    codes = tl.load(stored + row * row_bytes + at, inside, 0).to(tl.int32)
    # A block is 32 bytes of codes; its scale is 4 bytes, after the codes of the row.
    scale = tl.load(scales + (row * row_bytes + code_bytes) // 4 + at // 32, inside, 0.0)
    first = tl.load(levels + (codes >> 4)) * scale
    second = tl.load(levels + (codes & 15)) * scale
    both = tl.interleave(first, second)
    column = tl.program_id(1) * CODES * 2 + tl.arange(0, 2 * CODES)
    place = out + row * code_bytes * 2 + column
    tl.store(place, both.to(out.dtype.element_ty), column < code_bytes * 2)
