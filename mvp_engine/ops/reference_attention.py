"""Plain attention, one packed sequence after the other: what it computes is what all kernels are held against.

Legend: T tokens of all sequences, L tokens of one, H query heads, K key/value heads, d head size.

It has everything (any head size and type, soft caps, sinks, masks, dropout), holds the scores of a sequence in memory,
and waits for the GPU to know where sequences end.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_attention(
    q_HTd: Tensor,
    k_KTd: Tensor,
    v_KTd: Tensor,
    cu_seqlens: Tensor,
    allows: Callable[[int, int, Tensor, Tensor], Tensor] | None,
    *how: Any,
) -> Tensor:
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    # Split, not sliced: backward then joins the gradients once, where each slice would make one of the whole length.
    parts = zip(
        *(x.split(lengths, dim=1) for x in (q_HTd, k_KTd, v_KTd)), pairwise(ends), strict=True
    )
    outs = []
    for q, k, v, (start, end) in parts:
        allowed_LL = None
        if allows is not None:
            index = torch.arange(start, end, device=q_HTd.device)
            allowed_LL = allows(0, 0, index[:, None], index[None, :])
        outs.append(_one_sequence(q, k, v, allowed_LL, *how))
    return torch.cat(outs, dim=1)


def _one_sequence(
    q_HLd: Tensor,
    k_KLd: Tensor,
    v_KLd: Tensor,
    allowed_LL: Tensor | None,
    scale: float | None,
    dropout: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """`allowed_LL`, where there is one, has causality and window in it."""
    length = q_HLd.shape[1]
    if allowed_LL is None and window is not None and window < length:
        distance = torch.arange(length, device=q_HLd.device)
        behind = distance[:, None] - distance[None, :]
        allowed_LL = (behind < window) & ((behind >= 0) if causal else (behind > -window))
    if softcap is None and sinks_H is None:
        return F.scaled_dot_product_attention(
            q_HLd[None],
            k_KLd[None],
            v_KLd[None],
            attn_mask=allowed_LL,
            dropout_p=dropout,
            is_causal=causal and allowed_LL is None,
            scale=scale,
            enable_gqa=q_HLd.shape[0] != k_KLd.shape[0],
        )[0]
    groups = q_HLd.shape[0] // k_KLd.shape[0]
    k_HLd, v_HLd = k_KLd.repeat_interleave(groups, 0), v_KLd.repeat_interleave(groups, 0)
    scores_HLL = (
        q_HLd @ k_HLd.transpose(1, 2) * (q_HLd.shape[-1] ** -0.5 if scale is None else scale)
    )
    if softcap is not None:
        scores_HLL = softcap * torch.tanh(scores_HLL / softcap)
    if allowed_LL is None and causal:
        allowed_LL = torch.ones(length, length, dtype=torch.bool, device=q_HLd.device).tril()
    if allowed_LL is not None:
        scores_HLL = scores_HLL.masked_fill(~allowed_LL, float("-inf"))
    if (
        sinks_H is not None
    ):  # one more logit per head, which takes its share of the probability and gives nothing
        sinks = sinks_H.to(scores_HLL.dtype).view(-1, 1, 1).expand(-1, length, 1)
        scores_HLL = torch.cat([scores_HLL, sinks], dim=-1)
    probs = scores_HLL.float().softmax(-1).to(v_HLd.dtype)[..., :length]
    return F.dropout(probs, dropout) @ v_HLd
