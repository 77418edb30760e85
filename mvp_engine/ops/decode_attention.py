"""Triton kernel for decoding: one query per sequence attends to the cached keys and values of its sequence.

It reads each cached token once, and only those that the sequence has. Plain PyTorch (`hf/model/kv_cache.py`) reads
the cache up to the longest sequence, in two batched GEMMs with as many rows as query heads share a key/value head:
one to eight. With few sequences several programs share one of them (splits), and a second kernel adds up their parts.

Legend: S sequences, H query heads, K key/value heads, G query heads per key/value head, C capacity of the cache,
d head size, e head size of the values, P splits of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # cached tokens that a program reads at a time
PROGRAMS = 528  # wanted on the device: four for each multiprocessor of an H100
MAX_SPLITS = 32


def decode_attention(
    q_HSd: Tensor,
    k_SKCd: Tensor,
    v_SKCe: Tensor,
    newest_S: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's newest token to the cached tokens up to itself, (H, S, e).

    `newest_S`: the index of that token in the cache, which it is stored in already.
    """
    if q_HSd.stride(2) != 1:
        q_HSd = q_HSd.contiguous()
    heads, sequences, size = q_HSd.shape
    kv_heads, capacity = k_SKCd.shape[1:3]
    value_size = v_SKCe.shape[3]
    splits = min(MAX_SPLITS, triton.cdiv(PROGRAMS, sequences * kv_heads))
    splits = max(1, min(splits, triton.cdiv(capacity, BLOCK)))
    out_HSe = q_HSd.new_empty(heads, sequences, value_size)
    parts_PHSe = out_HSe[None]
    # The largest logit of each part and the sum of its softmax; not of a single one.
    stats_2PHS = out_HSe[None]
    if splits > 1:
        parts_PHSe = out_HSe.new_empty(splits, *out_HSe.shape, dtype=torch.float32)
        stats_2PHS = parts_PHSe.new_empty(2, *parts_PHSe.shape[:3])
    options: dict[str, Any] = {
        "GROUP": heads // kv_heads,
        # A matmul of Triton has 16 rows or more.
        "ROWS": max(16, triton.next_power_of_2(heads // kv_heads)),
        "SIZE": size,
        "VALUE_SIZE": value_size,
        "SIZE_2": max(16, triton.next_power_of_2(size)),
        "VALUE_SIZE_2": max(16, triton.next_power_of_2(value_size)),
        "SPLITS": splits,
        "BLOCK": BLOCK,
        "WINDOW": window,
        "SOFTCAP": softcap,
    }
    grid = (sequences, kv_heads, splits)
    _attend[grid](
        q_HSd,
        k_SKCd,
        v_SKCe,
        newest_S,
        sinks_H,
        parts_PHSe,
        stats_2PHS[0],
        stats_2PHS[-1],
        size**-0.5 if scale is None else scale,
        sequences,
        heads,
        *q_HSd.stride()[:2],
        *k_SKCd.stride()[:3],
        *v_SKCe.stride()[:3],
        **options,
        num_warps=4,
    )
    if splits > 1:
        _add_up[(sequences, heads)](
            parts_PHSe,
            *stats_2PHS,
            out_HSe,
            sequences,
            heads,
            VALUE_SIZE=value_size,
            VALUE_SIZE_2=options["VALUE_SIZE_2"],
            SPLITS=splits,
            SPLITS_2=triton.next_power_of_2(splits),
            num_warps=4,
        )
    return out_HSe


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    newest,
    sinks,
    out,
    largest,
    sums,
    scale,
    sequences,
    heads,
    q_head,
    q_sequence,
    k_sequence,
    k_head,
    k_token,
    v_sequence,
    v_head,
    v_token,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    SIZE_2: tl.constexpr,
    VALUE_SIZE_2: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """The part `split` of the cached tokens of one sequence and key/value head, for its group of query heads."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    end = tl.load(newest + sequence).to(tl.int32) + 1
    start = 0
    if WINDOW is not None:
        start = tl.maximum(0, end - WINDOW)
    blocks_of_split = tl.cdiv(tl.cdiv(end - start, BLOCK), SPLITS)
    start += split * blocks_of_split * BLOCK
    end = tl.minimum(end, start + blocks_of_split * BLOCK)

    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    is_head = row < GROUP
    column = tl.arange(0, SIZE_2)
    value_column = tl.arange(0, VALUE_SIZE_2)
    q_at = q + head[:, None] * q_head + sequence * q_sequence + column[None]
    q_rows = tl.load(q_at, is_head[:, None] & (column < SIZE)[None], 0.0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:  # noqa: SIM102 - known when the kernel is compiled
        # One more logit per head takes its share of the probability and adds no value.
        if split == 0:
            top = tl.load(sinks + head, is_head, 0.0).to(tl.float32)
            total += 1.0
    acc = tl.zeros([ROWS, VALUE_SIZE_2], tl.float32)
    k += sequence * k_sequence + kv_head * k_head
    v += sequence * v_sequence + kv_head * v_head
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        is_token = token < end
        k_at = k + token[:, None] * k_token + column[None]
        keys = tl.load(k_at, is_token[:, None] & (column < SIZE)[None], 0.0)
        scores = tl.dot(q_rows, tl.trans(keys), input_precision="ieee") * scale
        if SOFTCAP is not None:
            scores = SOFTCAP * (2.0 * tl.sigmoid(2.0 * scores / SOFTCAP) - 1.0)  # tanh
        scores = tl.where(is_token[None], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        probs = tl.exp(scores - new_top[:, None])
        decay = tl.exp(top - new_top)
        top = new_top
        total = total * decay + tl.sum(probs, 1)
        v_at = v + token[:, None] * v_token + value_column[None]
        values = tl.load(v_at, is_token[:, None] & (value_column < VALUE_SIZE)[None], 0.0)
        acc = acc * decay[:, None] + tl.dot(probs.to(values.dtype), values, input_precision="ieee")
    row_at = (split * heads + head) * sequences + sequence
    if SPLITS == 1:
        acc = acc / total[:, None]
    else:
        tl.store(largest + row_at, top, is_head)
        tl.store(sums + row_at, total, is_head)
    out_at = out + row_at[:, None] * VALUE_SIZE + value_column[None]
    tl.store(out_at, acc, is_head[:, None] & (value_column < VALUE_SIZE)[None])


@triton.jit
def _add_up(  # type: ignore[no-untyped-def]
    parts,
    largest,
    sums,
    out,
    sequences,
    heads,
    VALUE_SIZE: tl.constexpr,
    VALUE_SIZE_2: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
):
    """The output of one sequence and query head from its splits; one without tokens has the sum 0."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, SPLITS_2)
    is_split = split < SPLITS
    column = tl.arange(0, VALUE_SIZE_2)
    row_at = (split * heads + head) * sequences + sequence
    top = tl.load(largest + row_at, is_split, -float("inf"))
    weight = tl.exp(top - tl.max(top, 0))
    total = tl.sum(weight * tl.load(sums + row_at, is_split, 0.0), 0)
    at = parts + row_at[:, None] * VALUE_SIZE + column[None]
    acc = tl.load(at, is_split[:, None] & (column < VALUE_SIZE)[None], 0.0)
    out_at = out + (head * sequences + sequence) * VALUE_SIZE + column
    tl.store(out_at, tl.sum(weight[:, None] * acc, 0) / total, column < VALUE_SIZE)
