"""torch's own variable-length attention (FlashAttention). Importing it takes half a second, so callers import it late.

Legend: T tokens of all sequences, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from mvp_engine.ops.attn_spec import AttnSpec

# torch 2.11 has no `enable_gqa` argument and always accepts fewer key/value heads; later versions require it.
_HAS_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
_GQA: dict[str, Any] = {"enable_gqa": True} if _HAS_ENABLE_GQA else {}


def torch_varlen_attention(q_HTd: Tensor, k_KTd: Tensor, v_KTd: Tensor, spec: AttnSpec) -> Tensor:
    """Attention of shape (H, T, d) in one kernel call for all sequences, without a host sync."""
    out_THd = varlen_attn(
        q_HTd.transpose(0, 1).contiguous(),
        k_KTd.transpose(0, 1).contiguous(),
        v_KTd.transpose(0, 1).contiguous(),
        spec.cu_seqlens,
        spec.cu_seqlens_k,
        spec.max_seqlen,
        spec.max_seqlen_k,
        scale=spec.scale,
        window_size=_window_size(spec),
        **_GQA,
    )
    assert isinstance(out_THd, Tensor)
    return out_THd.transpose(0, 1)


def _window_size(spec: AttnSpec) -> tuple[int, int]:
    """How many tokens before and after itself a token attends to; -1 is the whole sequence."""
    before = -1
    if spec.window is not None and spec.window < spec.max_seqlen_k:
        before = spec.window - 1  # a window counts the token itself
    after = 0 if spec.causal else before
    return before, after
