"""Triton kernels of `gated_rows`: one program for a tile of whole rows, forward and backward.

Legend: N rows, F intermediate size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 8  # of a program
BLOCK = 256  # columns at a time


def forward(gate_up_N2F: Tensor, weight_N: Tensor) -> Tensor:
    rows, size = len(gate_up_N2F), gate_up_N2F.shape[1] // 2
    out_NF = gate_up_N2F.new_empty(rows, size)
    if rows:
        _gated_rows_forward[_grid(rows)](
            gate_up_N2F, weight_N, out_NF, rows, **_sizes(size), num_warps=4
        )
    return out_NF


def backward(d_out_NF: Tensor, gate_up_N2F: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
    rows, size = d_out_NF.shape
    d_gate_up_N2F = gate_up_N2F.new_empty(gate_up_N2F.shape)
    d_weight_N = weight_N.new_empty(weight_N.shape)
    if rows:
        _gated_rows_backward[_grid(rows)](
            d_out_NF, gate_up_N2F, weight_N, d_gate_up_N2F, d_weight_N, rows, **_sizes(size), num_warps=4
        )  # fmt: skip
    return d_gate_up_N2F, d_weight_N


def _grid(rows: int) -> tuple[int]:
    return (triton.cdiv(rows, ROWS),)


def _sizes(size: int) -> dict[str, int]:
    return {"F": size, "ROWS": ROWS, "BLOCK": min(BLOCK, triton.next_power_of_2(size))}


@triton.jit
def _gated_rows_forward(  # type: ignore[no-untyped-def]
    gate_up, weight, out, rows, F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    scale = tl.load(weight + row, row < rows, 0.0).to(tl.float32)[:, None]
    for start in range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < F)[None, :]
        place = gate_up + row[:, None] * (2 * F) + column[None, :]
        gate = tl.load(place, inside, 0.0).to(tl.float32)
        up = tl.load(place + F, inside, 0.0).to(tl.float32)
        gated = gate * tl.sigmoid(gate) * up * scale
        to = out + row[:, None] * F + column[None, :]
        tl.store(to, gated.to(out.dtype.element_ty), inside)


@triton.jit
def _gated_rows_backward(  # type: ignore[no-untyped-def]
    d_out, gate_up, weight, d_gate_up, d_weight, rows, F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    scale = tl.load(weight + row, row < rows, 0.0).to(tl.float32)[:, None]
    of_weight = tl.zeros((ROWS,), tl.float32)
    for start in range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < F)[None, :]
        at = row[:, None] * (2 * F) + column[None, :]
        gate = tl.load(gate_up + at, inside, 0.0).to(tl.float32)
        up = tl.load(gate_up + at + F, inside, 0.0).to(tl.float32)
        upstream = tl.load(d_out + row[:, None] * F + column[None, :], inside, 0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        of_weight += tl.sum(upstream * silu * up, 1)
        upstream = upstream * scale
        d_gate = upstream * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(d_gate_up + at, d_gate.to(d_gate_up.dtype.element_ty), inside)
        tl.store(d_gate_up + at + F, (upstream * silu).to(d_gate_up.dtype.element_ty), inside)
    tl.store(d_weight + row, of_weight.to(d_weight.dtype.element_ty), row < rows)
