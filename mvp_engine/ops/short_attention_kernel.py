"""Triton kernels of `short_attention`: one program per tile of sequences and key/value head, forward and backward.

Legend: N sequences, L tokens of each, H query heads, K key/value heads, G = H / K, d head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # tokens of a program: as many whole sequences as fit
WARPS_FORWARD = 4
WARPS_BACKWARD = 8


def forward(q_NHLd: Tensor, k_NKLd: Tensor, v_NKLd: Tensor, scale: float, causal: bool) -> Tensor:
    """(N, L, H, d)"""
    sequences, heads, length, size = q_NHLd.shape
    out_NLHd = q_NHLd.new_empty(sequences, length, heads, size)
    out_NHLd = out_NLHd.transpose(1, 2)
    _short_attention_forward[_grid(q_NHLd, k_NKLd)](
        q_NHLd, k_NKLd, v_NKLd, out_NHLd, *_strides(q_NHLd, k_NKLd, v_NKLd, out_NHLd), sequences, scale,
        **_sizes(q_NHLd, k_NKLd, causal), num_warps=WARPS_FORWARD, num_stages=1,
    )  # fmt: skip
    return out_NLHd


def backward(
    d_out_NLHd: Tensor, q_NHLd: Tensor, k_NKLd: Tensor, v_NKLd: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    d_out_NHLd = d_out_NLHd.transpose(1, 2)
    inputs = (d_out_NHLd, q_NHLd, k_NKLd, v_NKLd)
    gradients = tuple(x.new_empty(x.shape) for x in inputs[1:])
    _short_attention_backward[_grid(q_NHLd, k_NKLd)](
        *inputs, *gradients, *_strides(*inputs, *gradients), len(q_NHLd), scale,
        **_sizes(q_NHLd, k_NKLd, causal), num_warps=WARPS_BACKWARD, num_stages=1,
    )  # fmt: skip
    d_q_NHLd, d_k_NKLd, d_v_NKLd = gradients
    return d_q_NHLd, d_k_NKLd, d_v_NKLd


def _grid(q_NHLd: Tensor, k_NKLd: Tensor) -> tuple[int, int]:
    sequences, _, length, _ = q_NHLd.shape
    return triton.cdiv(sequences, TILE // length), k_NKLd.shape[1]


def _strides(*tensors: Tensor) -> list[int]:
    return [x.stride(dim) for x in tensors for dim in range(3)]


def _sizes(q_NHLd: Tensor, k_NKLd: Tensor, causal: bool) -> dict[str, int | bool]:
    _, heads, length, size = q_NHLd.shape
    # float32 is for tests: tensor cores would round it to TF32.
    exact = q_NHLd.dtype == torch.float32
    group = heads // k_NKLd.shape[1]
    return {"L": length, "G": group, "D": size, "CAUSAL": causal, "TILE": TILE, "EXACT": exact}


@triton.jit
def _places(sequences, L: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each row of this program's tile: its sequence, its token, whether there is one."""
    row = tl.arange(0, TILE)
    per_tile: tl.constexpr = TILE // L
    sequence = tl.program_id(0).to(tl.int64) * per_tile + row // L
    inside = (row < per_tile * L) & (sequence < sequences)
    return sequence, row % L, inside


@triton.jit
def _allowed(L: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """(TILE, TILE): queries see the keys of their sequence; rows outside of the data see those of theirs, too."""
    query = tl.arange(0, TILE)[:, None]
    key = tl.arange(0, TILE)[None, :]
    same = query // L == key // L
    return same & (query >= key) if CAUSAL else same


@triton.jit
def _rows(x, sequence, token, head, stride_n, stride_h, stride_l, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """(TILE, D): pointers to the rows of a head."""
    at = sequence * stride_n + head * stride_h + token * stride_l
    return x + at[:, None] + tl.arange(0, D)[None, :]


@triton.jit
def _probs(q, k, allowed, scale, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(allowed, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def _short_attention_forward(  # type: ignore[no-untyped-def]
    q, k, v, out,
    q_n, q_h, q_l, k_n, k_h, k_l, v_n, v_h, v_l, out_n, out_h, out_l,
    sequences, scale,
    L: tl.constexpr, G: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, TILE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    kv_head = tl.program_id(1)
    sequence, token, inside = _places(sequences, L, TILE)
    allowed = _allowed(L, TILE, CAUSAL)
    rows = inside[:, None]
    keys = tl.load(_rows(k, sequence, token, kv_head, k_n, k_h, k_l, D), rows, 0.0)
    values = tl.load(_rows(v, sequence, token, kv_head, v_n, v_h, v_l, D), rows, 0.0)
    for i in range(G):
        head = kv_head * G + i
        queries = tl.load(_rows(q, sequence, token, head, q_n, q_h, q_l, D), rows, 0.0)
        probs = _probs(queries, keys, allowed, scale, PRECISION)
        found = tl.dot(probs.to(values.dtype), values, input_precision=PRECISION)
        place = _rows(out, sequence, token, head, out_n, out_h, out_l, D)
        tl.store(place, found.to(out.dtype.element_ty), rows)


@triton.jit
def _short_attention_backward(  # type: ignore[no-untyped-def]
    d_out, q, k, v, d_q, d_k, d_v,
    d_out_n, d_out_h, d_out_l, q_n, q_h, q_l, k_n, k_h, k_l, v_n, v_h, v_l,
    d_q_n, d_q_h, d_q_l, d_k_n, d_k_h, d_k_l, d_v_n, d_v_h, d_v_l,
    sequences, scale,
    L: tl.constexpr, G: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, TILE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    kv_head = tl.program_id(1)
    sequence, token, inside = _places(sequences, L, TILE)
    allowed = _allowed(L, TILE, CAUSAL)
    rows = inside[:, None]
    keys = tl.load(_rows(k, sequence, token, kv_head, k_n, k_h, k_l, D), rows, 0.0)
    values = tl.load(_rows(v, sequence, token, kv_head, v_n, v_h, v_l, D), rows, 0.0)
    d_keys = tl.zeros((TILE, D), tl.float32)
    d_values = tl.zeros((TILE, D), tl.float32)
    for i in range(G):
        head = kv_head * G + i
        queries = tl.load(_rows(q, sequence, token, head, q_n, q_h, q_l, D), rows, 0.0)
        d_found = tl.load(
            _rows(d_out, sequence, token, head, d_out_n, d_out_h, d_out_l, D), rows, 0.0
        )
        probs = _probs(queries, keys, allowed, scale, PRECISION)
        d_values = tl.dot(
            tl.trans(probs.to(values.dtype)), d_found, d_values, input_precision=PRECISION
        )
        d_probs = tl.dot(d_found, tl.trans(values), input_precision=PRECISION)
        d_scores = probs * (d_probs - tl.sum(probs * d_probs, 1)[:, None]) * scale
        d_scores = d_scores.to(values.dtype)
        d_keys = tl.dot(tl.trans(d_scores), queries, d_keys, input_precision=PRECISION)
        d_queries = tl.dot(d_scores, keys, input_precision=PRECISION)
        place = _rows(d_q, sequence, token, head, d_q_n, d_q_h, d_q_l, D)
        tl.store(place, d_queries.to(d_q.dtype.element_ty), rows)
    place = _rows(d_k, sequence, token, kv_head, d_k_n, d_k_h, d_k_l, D)
    tl.store(place, d_keys.to(d_k.dtype.element_ty), rows)
    place = _rows(d_v, sequence, token, kv_head, d_v_n, d_v_h, d_v_l, D)
    tl.store(place, d_values.to(d_v.dtype.element_ty), rows)
