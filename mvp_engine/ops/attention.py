"""Attention over packed sequences, registered with transformers: no sequence sees another, whatever the model.

Legend: T tokens of all sequences, L tokens of one, H query heads, K key/value heads, d head size.

A model built with `attn_implementation=NAME` calls `packed_attention` in every layer and makes no mask; the boundaries
arrive as keyword arguments of the model's forward (`boundaries(batch)`). What a layer asks for and this cannot do is
refused by name, never ignored.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from mvp_engine.distributed.sequence import SequenceShard

NAME = "mvp_packed"

# torch 2.11 takes fewer key/value heads as they come, later versions want to be told.
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

# Handed down by models next to what matters; none of them changes what attention computes.
_HARMLESS = {
    "cu_seq_lens_k", "max_length_k", "position_ids", "position_embeddings", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", "cache_position", "return_dict", "layer_idx", "logits_to_keep",
}  # fmt: skip


def register() -> str:
    """Make `NAME` known to transformers (again is fine); gives the name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


def boundaries(cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Any]:
    """The keyword arguments of a model's forward that carry the boundaries to every attention layer."""
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max_seqlen,
        "max_length_k": max_seqlen,
    }


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sequence_shard: SequenceShard | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The signature of transformers' attention interface: (1, H, T, d) in, (1, T, H, d) out."""
    who = type(module).__name__
    unknown = [name for name, value in others.items() if name not in _HARMLESS and value is not None]
    if unknown:
        raise NotImplementedError(
            f"{who} asks attention for {', '.join(unknown)}, which packed attention does not have"
        )
    if attention_mask is not None:
        raise NotImplementedError(f"{who} brings an attention mask of its own, which packed attention cannot honour")
    if cu_seq_lens_q is None or max_length_q is None:
        raise NotImplementedError(f"{who} was not told where sequences begin: its model drops keyword arguments")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise NotImplementedError(f"{who} calls attention with a batch or a cache; packed batches have neither")
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    q, k, v = query[0], key[0], value[0]
    if torch.is_autocast_enabled(q.device.type):  # norms and rotary positions may have brought float32 back
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if sequence_shard is not None:
        ranks = len(sequence_shard.sizes)
        copies = max(1, ranks // k.shape[0])  # fewer key/value heads than ranks: each goes to several
        k, v = k.repeat_interleave(copies, 0), v.repeat_interleave(copies, 0)
        q, k, v = (sequence_shard.to_heads(x) for x in (q, k, v))
        s_aux = None if s_aux is None else s_aux.chunk(ranks)[sequence_shard.rank]
    how = (scaling, dropout, causal, sliding_window, softcap, s_aux)
    if _flash_can(q, dropout, softcap, s_aux):
        out = _flash(q, k, v, cu_seq_lens_q, max_length_q, scaling, causal, sliding_window)
    else:
        parts = [x.split(cu_seq_lens_q.diff().tolist(), dim=1) for x in (q, k, v)]
        out = torch.cat([_one_sequence(qs, ks, vs, *how) for qs, ks, vs in zip(*parts, strict=True)], dim=1)
    if sequence_shard is not None:
        out = sequence_shard.to_tokens(out)
    return out.transpose(0, 1)[None], None


def _flash_can(q: Tensor, dropout: float, softcap: float | None, sinks: Tensor | None) -> bool:
    """torch's variable-length FlashAttention: one call for all sequences, no wait for the GPU."""
    plain = dropout == 0.0 and softcap is None and sinks is None
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return plain and fits and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def _flash(
    q_HTd: Tensor,
    k_KTd: Tensor,
    v_KTd: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    q, k, v = (x.transpose(0, 1).contiguous() for x in (q_HTd, k_KTd, v_KTd))
    behind = -1 if window is None or window >= longest else window - 1  # a token sees itself and window - 1 before it
    ahead = 0 if causal else behind
    out_THd = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=(behind, ahead), **_GQA
    )
    assert isinstance(out_THd, Tensor)
    return out_THd.transpose(0, 1)


def _one_sequence(
    q_HLd: Tensor,
    k_KLd: Tensor,
    v_KLd: Tensor,
    scale: float | None,
    dropout: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    length = q_HLd.shape[1]
    allowed_LL = None
    if window is not None and window < length:
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
    scores_HLL = q_HLd @ k_HLd.transpose(1, 2) * (q_HLd.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores_HLL = softcap * torch.tanh(scores_HLL / softcap)
    if allowed_LL is None and causal:
        allowed_LL = torch.ones(length, length, dtype=torch.bool, device=q_HLd.device).tril()
    if allowed_LL is not None:
        scores_HLL = scores_HLL.masked_fill(~allowed_LL, float("-inf"))
    if sinks_H is not None:  # one more logit per head, which takes its share of the probability and gives nothing
        sinks = sinks_H.to(scores_HLL.dtype).view(-1, 1, 1).expand(-1, length, 1)
        scores_HLL = torch.cat([scores_HLL, sinks], dim=-1)
    probs = scores_HLL.float().softmax(-1).to(v_HLd.dtype)[..., :length]
    return F.dropout(probs, dropout) @ v_HLd
