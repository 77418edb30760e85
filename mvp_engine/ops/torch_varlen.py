"""torch's own attention over packed sequences. Importing it takes half a second, so this is done where it is used."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# torch 2.11 takes fewer key/value heads as they come, later versions want to be told.
_GQA: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def varlen(
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float | None,
    window: tuple[int, int],
) -> Tensor:
    """(T, H, d); a token sees so many before and after it, -1: all of its sequence."""
    out_THd = varlen_attn(
        q_THd,
        k_TKd,
        v_TKd,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scale,
        window_size=window,
        **_GQA,
    )
    assert isinstance(out_THd, Tensor)
    return out_THd
