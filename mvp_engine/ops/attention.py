"""Variable-length attention over packed sequences: one call, and the fastest kernel that supports it.

Legend: T tokens of all sequences, H query heads, K key/value heads, d head size.

The kernels, in order of preference: FlashAttention 4, cuDNN, torch's `varlen_attn` (FlashAttention 2), FlexAttention,
and the reference, which supports every option. What transformers adds (call signatures, mask objects, registration) is
in `mvp_engine.hf.model.attention`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mvp_engine.ops import cudnn_attention, flash_attention, flex_attention
from mvp_engine.ops.attn_spec import AttnSpec
from mvp_engine.ops.flex_attention import flex_varlen_attention
from mvp_engine.ops.precision import is_half_on_gpu


def varlen_attention(q_HTd: Tensor, k_KTd: Tensor, v_KTd: Tensor, spec: AttnSpec) -> Tensor:
    """Attention of shape (H, T, d) by the fastest kernel for this GPU, dtype, head size and spec."""
    if not _has_kernels(q_HTd):
        return untraced_reference_attention(q_HTd, k_KTd, v_KTd, spec)
    if spec.is_plain:
        # Latent attention (DeepSeek) has two head sizes: cuDNN's plans have one, and FlashAttention 4 was not tried.
        is_same = v_KTd.shape[-1] == q_HTd.shape[-1]
        if is_same and flash_attention.is_supported(q_HTd, spec, k_KTd):
            return flash_attention.flash_attention(q_HTd, k_KTd, v_KTd, spec)
        if is_same and cudnn_attention.is_supported(q_HTd, spec, k_KTd):
            return cudnn_attention.cudnn_attention(q_HTd, k_KTd, v_KTd, spec)
        if _torch_varlen_is_supported(q_HTd, v_KTd):
            return _torch_varlen(q_HTd, k_KTd, v_KTd, spec)
    if spec.dropout == 0.0 and flex_attention.is_supported(q_HTd, v_KTd):
        return untraced_flex_attention(q_HTd, k_KTd, v_KTd, spec)
    return untraced_reference_attention(q_HTd, k_KTd, v_KTd, spec)


def _has_kernels(q_HTd: Tensor) -> bool:
    """Kernels are for GPUs; elsewhere none of them is asked."""
    return q_HTd.is_cuda


def _torch_varlen_is_supported(q_HTd: Tensor, v_KTd: Tensor) -> bool:
    """FlashAttention 2 runs on more GPUs than cuDNN's kernels, and with head sizes up to 256."""
    head_size = q_HTd.shape[-1]
    if head_size % 8 != 0 or head_size > 256 or v_KTd.shape[-1] != head_size:
        return False
    return is_half_on_gpu(q_HTd)


def _torch_varlen(q_HTd: Tensor, k_KTd: Tensor, v_KTd: Tensor, spec: AttnSpec) -> Tensor:
    # Imported here: torch.nn.attention.varlen takes half a second to import.
    from mvp_engine.ops.torch_varlen import torch_varlen_attention

    return torch_varlen_attention(q_HTd, k_KTd, v_KTd, spec)


# Reference attention: plain PyTorch, one packed sequence at a time. Every kernel is tested against it.
#
# Legend: L queries and M keys of one sequence.
#
# It supports every option (any head size and dtype, soft caps, sinks, masks, dropout). The price: it holds the (L, M)
# scores of a sequence in memory, and a host sync reads the sequence boundaries.


def reference_attention(q_HTd: Tensor, k_KTd: Tensor, v_KTd: Tensor, spec: AttnSpec) -> Tensor:
    """Attention of shape (H, T, d), computed sequence by sequence."""
    offsets = spec.cu_seqlens.tolist()
    key_offsets = offsets if spec.keys is None else spec.keys.cu_seqlens.tolist()
    q_lengths = [end - start for start, end in pairwise(offsets)]
    k_lengths = [end - start for start, end in pairwise(key_offsets)]
    # The calls of 64 sequences of 24 tokens cost more than their arithmetic: one call halves the time on a CPU.
    is_even = len(q_lengths) > 1 and len({*q_lengths}) == len({*k_lengths}) == 1
    if is_even and q_HTd.is_cpu and spec.is_plain:
        return _equal_sequences(q_HTd, k_KTd, v_KTd, spec, q_lengths, k_lengths[0])
    # split, not slices: backward then concatenates the gradients once, where each slice would allocate a gradient of
    # the whole length.
    q_parts = q_HTd.split(q_lengths, dim=1)
    k_parts = k_KTd.split(k_lengths, dim=1)
    v_parts = v_KTd.split(k_lengths, dim=1)
    outs = []
    for i, q_HLd in enumerate(q_parts):
        rows = slice(offsets[i], offsets[i + 1])
        columns = slice(key_offsets[i], key_offsets[i + 1])
        allowed_LM = _mask(spec, rows, columns, q_HTd.device)
        if spec.softcap is not None or spec.sinks is not None:
            out_HLd = _capped_or_with_sinks(q_HLd, k_parts[i], v_parts[i], allowed_LM, spec)
        else:
            one = (q_HLd[None], k_parts[i][None], v_parts[i][None])
            out_HLd = _sdpa(*one, allowed_LM, spec)[0]
        outs.append(out_HLd)
    return torch.cat(outs, dim=1)


def _equal_sequences(
    q_HTd: Tensor, k_KTd: Tensor, v_KTd: Tensor, spec: AttnSpec, q_lengths: list[int], keys: int
) -> Tensor:
    """All sequences in one call: they have the same lengths and one mask."""
    queries = q_lengths[0]
    allowed_LM = _mask(spec, slice(0, queries), slice(0, keys), q_HTd.device)
    count = len(q_lengths)
    out_SHLd = _sdpa(
        q_HTd.unflatten(1, (count, queries)).transpose(0, 1),
        k_KTd.unflatten(1, (count, keys)).transpose(0, 1),
        v_KTd.unflatten(1, (count, keys)).transpose(0, 1),
        allowed_LM,
        spec,
    )
    return out_SHLd.transpose(0, 1).flatten(1, 2)


def _sdpa(
    q_SHLd: Tensor, k_SKMd: Tensor, v_SKMd: Tensor, allowed_LM: Tensor | None, spec: AttnSpec
) -> Tensor:
    return F.scaled_dot_product_attention(
        q_SHLd,
        k_SKMd,
        v_SKMd,
        attn_mask=allowed_LM,
        dropout_p=spec.dropout,
        is_causal=spec.causal and allowed_LM is None,
        scale=spec.scale,
        enable_gqa=q_SHLd.shape[1] != k_SKMd.shape[1],
    )


def _mask(spec: AttnSpec, rows: slice, columns: slice, device: torch.device) -> Tensor | None:
    """The boolean mask of one sequence, (L, M); None where causality alone, or nothing, describes it."""
    if spec.mask_function is not None:
        q_index = _index(rows, device) if spec.keys is None else spec.keys.q_index[rows]
        k_index = _index(columns, device) if spec.keys is None else spec.keys.k_index[columns]
        return spec.mask_function(0, 0, q_index[:, None], k_index[None, :])
    queries = rows.stop - rows.start
    keys = columns.stop - columns.start
    window = keys if spec.window is None else spec.window
    if window >= keys and (queries == keys or not spec.causal):
        return None
    q_at = torch.arange(keys - queries, keys, device=device)
    distance_LM = q_at[:, None] - torch.arange(keys, device=device)[None, :]
    before = distance_LM >= 0 if spec.causal else distance_LM > -window
    return (distance_LM < window) & before


def _index(span: slice, device: torch.device) -> Tensor:
    return torch.arange(span.start, span.stop, device=device)


def _capped_or_with_sinks(
    q_HLd: Tensor, k_KMd: Tensor, v_KMd: Tensor, allowed_LM: Tensor | None, spec: AttnSpec
) -> Tensor:
    """Soft caps and sinks change the scores, which scaled_dot_product_attention does not expose."""
    queries = q_HLd.shape[1]
    keys = k_KMd.shape[1]
    queries_per_kv = q_HLd.shape[0] // k_KMd.shape[0]
    k_HMd = k_KMd.repeat_interleave(queries_per_kv, 0)
    v_HMd = v_KMd.repeat_interleave(queries_per_kv, 0)
    scale = q_HLd.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    scores_HLM = q_HLd @ k_HMd.transpose(1, 2) * scale
    if spec.softcap is not None:
        scores_HLM = spec.softcap * torch.tanh(scores_HLM / spec.softcap)
    if allowed_LM is None and spec.causal:
        allowed_LM = torch.ones(queries, keys, dtype=torch.bool, device=q_HLd.device).tril()
    if allowed_LM is not None:
        scores_HLM = scores_HLM.masked_fill(~allowed_LM, float("-inf"))
    if spec.sinks is not None:
        # One more logit per head takes its share of the probability and adds no value.
        sinks_H11 = spec.sinks.to(scores_HLM.dtype).view(-1, 1, 1)
        scores_HLM = torch.cat([scores_HLM, sinks_H11.expand(-1, queries, 1)], dim=-1)
    probs_HLM = scores_HLM.float().softmax(-1).to(v_HMd.dtype)[..., :keys]
    return F.dropout(probs_HLM, spec.dropout) @ v_HMd


# torch.compile must not trace these: a compiled block breaks its graph around them. The reference loops over sequences,
# so a traced one would be recompiled for each number of sequences. FlexAttention is compiled on its own, for its own
# padded sizes. This imports torch._dynamo (half a second).
untraced_flex_attention = torch.compiler.disable(flex_varlen_attention)
untraced_reference_attention = torch.compiler.disable(reference_attention)
