"""Triton kernels over the logits of a chunk of tokens: one pass for what forward needs, one for the gradient.

Legend: C tokens of a chunk, V vocabulary. A program works on one token; the logits stay in the precision of the matmul
that made them, and every sum is float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 8  # on an H200: 2.8 TB/s for the numbers, 3.7 for the gradient


def row_numbers(logits_CV: Tensor, labels_C: Tensor, factor: float) -> tuple[Tensor, ...]:
    """Of `logits * factor`: log-prob of the label (0 where there is none), log of the sum of exponentials, entropy,
    mean."""
    numbers_4C = logits_CV.new_empty(4, len(logits_CV), dtype=torch.float32)
    how: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": WARPS}
    _row_numbers[(len(logits_CV),)](
        logits_CV,
        labels_C.contiguous(),
        *numbers_4C,
        logits_CV.shape[1],
        logits_CV.stride(0),
        factor,
        **how,
    )
    return numbers_4C.unbind()


def to_gradient_(
    logits_CV: Tensor,
    labels_C: Tensor,
    norm_C: Tensor,
    entropy_C: Tensor,
    d_label_C: Tensor,
    d_p_C: Tensor,
    d_entropy_C: Tensor | None,
    d_flat_C: Tensor | None,
    factor: float,
) -> Tensor:
    """Overwrites the logits with the gradient with respect to them; what is given is `_Upstream`'s."""
    some = [
        d_p_C if d is None else d for d in (d_entropy_C, d_flat_C)
    ]  # a pointer that is not read
    rows = (labels_C, norm_C, entropy_C, d_label_C, d_p_C, *some)
    assert all(x.is_contiguous() for x in rows)
    how: dict[str, Any] = {"ENTROPY": d_entropy_C is not None, "FLAT": d_flat_C is not None}
    _to_gradient[(len(logits_CV),)](
        logits_CV,
        *rows,
        logits_CV.shape[1],
        logits_CV.stride(0),
        factor,
        **how,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return logits_CV


@triton.jit
def _row_numbers(  # type: ignore[no-untyped-def]
    logits, labels, log_probs, norms, entropies, means, size, stride, factor, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    top, total, dot, plain = (
        -float("inf"),
        0.0,
        0.0,
        0.0,
    )  # sums of exp(x - top), that times (x - top), and x
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < size
        x = tl.load(logits + row * stride + column, inside, 0.0).to(tl.float32) * factor
        new_top = tl.maximum(top, tl.max(tl.where(inside, x, -float("inf")), 0))
        lower = tl.where(
            total > 0.0, top - new_top, 0.0
        )  # before the first block there is nothing to move
        below = x - new_top
        share = tl.where(inside, tl.exp(below), 0.0)
        dot = (dot + total * lower) * tl.exp(lower) + tl.sum(share * below, 0)
        total = total * tl.exp(lower) + tl.sum(share, 0)
        plain += tl.sum(x, 0)
        top = new_top
    norm = top + tl.log(total)
    label = tl.load(labels + row)
    known = (label >= 0) & (label < size)
    picked = tl.load(logits + row * stride + label, known, float("nan")).to(tl.float32) * factor
    tl.store(log_probs + row, tl.where(label < 0, 0.0, picked - norm))
    tl.store(norms + row, norm)
    tl.store(entropies + row, tl.log(total) - dot / total)
    tl.store(means + row, plain / size)


@triton.jit
def _to_gradient(  # type: ignore[no-untyped-def]
    logits, labels, norms, entropies, d_labels, d_ps, d_entropies, d_flats, size, stride, factor,
    ENTROPY: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    norm = tl.load(norms + row)
    d_label = tl.load(d_labels + row)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < size
        where = logits + row * stride + column
        log_p = tl.load(where, inside, 0.0).to(tl.float32) * factor - norm
        inner = tl.load(d_ps + row)
        if ENTROPY:
            inner += tl.load(d_entropies + row) * (log_p + tl.load(entropies + row))
        gradient = tl.where(column == label, d_label, 0.0) - tl.exp(log_p) * inner
        if FLAT:
            gradient += tl.load(d_flats + row)
        tl.store(where, (gradient * factor).to(logits.dtype.element_ty), inside)
