"""Triton kernels: short sequences, gated rows of experts, transposed FP8 matrices, NF4 weights, sampling of tokens.

Each section has the function that launches its kernels; the operators on top of the first two are in `triton_ops.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton kernels of `short_attention`: one program per tile of sequences and key/value head, forward and backward.
#
# Legend: N sequences, L tokens of each, H query heads, K key/value heads, G = H / K, d head size.

TILE = 64  # tokens of a program: as many whole sequences as fit
WARPS_FORWARD = 4
WARPS_BACKWARD = 8


def short_attention(
    q_NHLd: Tensor, k_NKLd: Tensor, v_NKLd: Tensor, scale: float, causal: bool
) -> Tensor:
    """(N, L, H, d)"""
    sequences, heads, length, size = q_NHLd.shape
    out_NLHd = q_NHLd.new_empty(sequences, length, heads, size)
    out_NHLd = out_NLHd.transpose(1, 2)
    _short_attention_forward[_short_grid(q_NHLd, k_NKLd)](
        q_NHLd, k_NKLd, v_NKLd, out_NHLd, *_strides(q_NHLd, k_NKLd, v_NKLd, out_NHLd), sequences, scale,
        **_short_sizes(q_NHLd, k_NKLd, causal), num_warps=WARPS_FORWARD, num_stages=1,
    )  # fmt: skip
    return out_NLHd


def short_attention_backward(
    d_out_NLHd: Tensor, q_NHLd: Tensor, k_NKLd: Tensor, v_NKLd: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    d_out_NHLd = d_out_NLHd.transpose(1, 2)
    inputs = (d_out_NHLd, q_NHLd, k_NKLd, v_NKLd)
    gradients = tuple(x.new_empty(x.shape) for x in inputs[1:])
    _short_attention_backward[_short_grid(q_NHLd, k_NKLd)](
        *inputs, *gradients, *_strides(*inputs, *gradients), len(q_NHLd), scale,
        **_short_sizes(q_NHLd, k_NKLd, causal), num_warps=WARPS_BACKWARD, num_stages=1,
    )  # fmt: skip
    d_q_NHLd, d_k_NKLd, d_v_NKLd = gradients
    return d_q_NHLd, d_k_NKLd, d_v_NKLd


def _short_grid(q_NHLd: Tensor, k_NKLd: Tensor) -> tuple[int, int]:
    sequences, _, length, _ = q_NHLd.shape
    return triton.cdiv(sequences, TILE // length), k_NKLd.shape[1]


def _strides(*tensors: Tensor) -> list[int]:
    return [x.stride(dim) for x in tensors for dim in range(3)]


def _short_sizes(q_NHLd: Tensor, k_NKLd: Tensor, causal: bool) -> dict[str, int | bool]:
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


# Triton kernels of `gated_rows`: one program for a tile of whole rows, forward and backward.
#
# Legend: N rows, F intermediate size.

GATED_ROWS = 8  # of a program
GATED_BLOCK = 256  # columns at a time


def gated_rows(gate_up_N2F: Tensor, weight_N: Tensor) -> Tensor:
    rows, size = len(gate_up_N2F), gate_up_N2F.shape[1] // 2
    out_NF = gate_up_N2F.new_empty(rows, size)
    if rows:
        _gated_rows_forward[_row_grid(rows)](
            gate_up_N2F, weight_N, out_NF, rows, **_row_sizes(size), num_warps=4
        )
    return out_NF


def gated_rows_backward(
    d_out_NF: Tensor, gate_up_N2F: Tensor, weight_N: Tensor
) -> tuple[Tensor, Tensor]:
    rows, size = d_out_NF.shape
    d_gate_up_N2F = gate_up_N2F.new_empty(gate_up_N2F.shape)
    d_weight_N = weight_N.new_empty(weight_N.shape)
    if rows:
        _gated_rows_backward[_row_grid(rows)](
            d_out_NF, gate_up_N2F, weight_N, d_gate_up_N2F, d_weight_N, rows, **_row_sizes(size), num_warps=4
        )  # fmt: skip
    return d_gate_up_N2F, d_weight_N


def _row_grid(rows: int) -> tuple[int]:
    return (triton.cdiv(rows, GATED_ROWS),)


def _row_sizes(size: int) -> dict[str, int]:
    return {"F": size, "ROWS": GATED_ROWS, "BLOCK": min(GATED_BLOCK, triton.next_power_of_2(size))}


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


# Transposed FP8 matrices (`fp8.py`): one program for a tile. Legend: R rows, C columns, P rows with padding.

TILE_ROWS = 256
TILE_COLUMNS = 64
TRANSPOSE_WARPS = 8


def transpose_fp8(values: Tensor, scale: Tensor, largest: Tensor, padded: int) -> Tensor:
    *stack, rows, columns = values.shape
    out = values.new_empty(*stack, columns, padded)
    if not out.numel():
        return out
    matrices = largest.numel()
    grid = (triton.cdiv(padded, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS), matrices)
    _transpose_fp8[grid](
        values.contiguous().view(torch.uint8),
        scale.contiguous(),
        largest,
        out.view(torch.uint8),
        rows,
        columns,
        padded,
        ROWS=TILE_ROWS,
        COLUMNS=TILE_COLUMNS,
        num_warps=TRANSPOSE_WARPS,
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


# Triton kernel that dequantizes NF4 weights: it reads 4.5 bits and writes one number per weight, nothing else.
#
# Legend: N outputs, K inputs, B bytes of a row. The layout of the bytes is in `mvp_engine.ops.nf4`.

NF4_CODES = 1024  # bytes of codes per program, two weights each
NF4_WARPS = 4


def dequantize_nf4(
    stored_NB: Tensor, levels: Tensor, in_features: int, dtype: torch.dtype
) -> Tensor:
    rows, row_bytes = stored_NB.shape
    out_NK = stored_NB.new_empty(rows, in_features, dtype=dtype)
    code_bytes = in_features // 2
    grid = (rows, triton.cdiv(code_bytes, NF4_CODES))
    scales = stored_NB.view(torch.float32)  # the same memory
    _dequantize_nf4[grid](
        stored_NB,
        scales,
        levels,
        out_NK,
        row_bytes,
        code_bytes,
        CODES=NF4_CODES,
        num_warps=NF4_WARPS,
    )
    return out_NK


@triton.jit
def _dequantize_nf4(  # type: ignore[no-untyped-def]
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


# Triton kernel that samples tokens: it reads the logits once, and no noise is in memory. The tokens are those of
# `sample_tokens` in kit/decoding.py, whose plain PyTorch reads and writes about 400 bytes per logit.
#
# Legend: S sequences, V vocabulary, B blocks of the vocabulary.

SAMPLING_BLOCK = (
    1024  # 4 logits per thread: more would unroll into code beyond the instruction cache
)
SAMPLING_WARPS = 8


def sample_tokens(logits_SV: Tensor, keys_S: Tensor) -> Tensor:
    """The index of the largest sum of logit and noise in each row; `keys_S` are those of one position."""
    sequences, vocab_size = logits_SV.shape
    logits_SV = logits_SV.contiguous()
    blocks = triton.cdiv(vocab_size, SAMPLING_BLOCK)
    values_SB = logits_SV.new_empty(sequences, blocks)
    indices_SB = keys_S.new_empty(sequences, blocks)
    grid = (sequences, blocks)
    _largest_sum[grid](
        logits_SV,
        keys_S,
        values_SB,
        indices_SB,
        vocab_size,
        blocks,
        BLOCK=SAMPLING_BLOCK,
        num_warps=SAMPLING_WARPS,
    )
    return indices_SB.gather(1, values_SB.argmax(1, keepdim=True))[:, 0]


@triton.jit
def _hash(x):  # type: ignore[no-untyped-def]
    """`_hash_` of kit/decoding.py; the factors are 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as int64."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _largest_sum(  # type: ignore[no-untyped-def]
    logits, keys, values, indices, vocab_size, blocks, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    x = tl.load(logits + row * vocab_size + column, inside, -float("inf"))
    # 0x9E3779B97F4A7C15 as int64, `GOLDEN` of kit/decoding.py.
    bits = _hash(tl.load(keys + row) + (column + 1).to(tl.int64) * -0x61C8864680B583EB)
    uniform = (((bits >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16
    noise = -tl.log(-tl.log(uniform))
    total = x + noise.to(tl.float32)
    at = row * blocks + block
    tl.store(values + at, tl.max(total, 0))
    tl.store(indices + at, (block * BLOCK + tl.argmax(total, 0)).to(tl.int64))
