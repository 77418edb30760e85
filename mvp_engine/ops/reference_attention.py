"""Reference attention: plain PyTorch, one packed sequence at a time. Every kernel is tested against it.

Legend: T tokens of all sequences, L tokens of one sequence, H query heads, K key/value heads, d head size.

It supports every option (any head size and dtype, soft caps, sinks, masks, dropout). The price: it holds the (L, L)
scores of a sequence in memory, and a host sync reads the sequence boundaries.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mvp_engine.ops.attn_spec import AttnSpec


def reference_attention(q_HTd: Tensor, k_KTd: Tensor, v_KTd: Tensor, spec: AttnSpec) -> Tensor:
    """Attention of shape (H, T, d), computed sequence by sequence."""
    offsets = spec.cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(offsets)]
    # split, not slices: backward then concatenates the gradients once, where each slice would allocate a gradient of
    # the whole length.
    q_parts = q_HTd.split(lengths, dim=1)
    k_parts = k_KTd.split(lengths, dim=1)
    v_parts = v_KTd.split(lengths, dim=1)
    outs = []
    for i, start in enumerate(offsets[:-1]):
        allowed_LL = _mask(spec, start, lengths[i], q_HTd.device)
        outs.append(_one_sequence(q_parts[i], k_parts[i], v_parts[i], allowed_LL, spec))
    return torch.cat(outs, dim=1)


def _mask(spec: AttnSpec, start: int, length: int, device: torch.device) -> Tensor | None:
    """The boolean mask of one sequence, (L, L); None where causality alone, or nothing, describes it."""
    if spec.mask_function is not None:
        index = torch.arange(start, start + length, device=device)
        return spec.mask_function(0, 0, index[:, None], index[None, :])
    if spec.window is None or spec.window >= length:
        return None
    index = torch.arange(length, device=device)
    distance_LL = index[:, None] - index[None, :]
    before = distance_LL >= 0 if spec.causal else distance_LL > -spec.window
    return (distance_LL < spec.window) & before


def _one_sequence(
    q_HLd: Tensor, k_KLd: Tensor, v_KLd: Tensor, allowed_LL: Tensor | None, spec: AttnSpec
) -> Tensor:
    if spec.softcap is not None or spec.sinks is not None:
        return _capped_or_with_sinks(q_HLd, k_KLd, v_KLd, allowed_LL, spec)
    out_1HLd = F.scaled_dot_product_attention(
        q_HLd[None],
        k_KLd[None],
        v_KLd[None],
        attn_mask=allowed_LL,
        dropout_p=spec.dropout,
        is_causal=spec.causal and allowed_LL is None,
        scale=spec.scale,
        enable_gqa=q_HLd.shape[0] != k_KLd.shape[0],
    )
    return out_1HLd[0]


def _capped_or_with_sinks(
    q_HLd: Tensor, k_KLd: Tensor, v_KLd: Tensor, allowed_LL: Tensor | None, spec: AttnSpec
) -> Tensor:
    """Soft caps and sinks change the scores, which scaled_dot_product_attention does not expose."""
    length = q_HLd.shape[1]
    queries_per_kv = q_HLd.shape[0] // k_KLd.shape[0]
    k_HLd = k_KLd.repeat_interleave(queries_per_kv, 0)
    v_HLd = v_KLd.repeat_interleave(queries_per_kv, 0)
    scale = q_HLd.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    scores_HLL = q_HLd @ k_HLd.transpose(1, 2) * scale
    if spec.softcap is not None:
        scores_HLL = spec.softcap * torch.tanh(scores_HLL / spec.softcap)
    if allowed_LL is None and spec.causal:
        allowed_LL = torch.ones(length, length, dtype=torch.bool, device=q_HLd.device).tril()
    if allowed_LL is not None:
        scores_HLL = scores_HLL.masked_fill(~allowed_LL, float("-inf"))
    if spec.sinks is not None:
        # One more logit per head takes its share of the probability and adds no value.
        sinks_H11 = spec.sinks.to(scores_HLL.dtype).view(-1, 1, 1)
        scores_HLL = torch.cat([scores_HLL, sinks_H11.expand(-1, length, 1)], dim=-1)
    probs_HLL = scores_HLL.float().softmax(-1).to(v_HLd.dtype)[..., :length]
    return F.dropout(probs_HLL, spec.dropout) @ v_HLd
