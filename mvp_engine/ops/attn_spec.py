"""`AttnSpec`: what one attention call computes, as the one argument that all kernels share.

It holds no query, key or value and chooses no kernel: `mvp_engine.ops.attention` does that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# FlexAttention's `mask_mod`: (batch, head, query index, key index) -> may this query attend to this key?
MaskFunction = Callable[[Any, Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class KeySpec:
    """Keys that are not those of the same tokens as the queries: the last query of a sequence stands at its last key.

    So causality and windows count from the end of the keys, which kernels call a bottom-right mask.
    """

    cu_seqlens: Tensor  # int32 (S + 1,): the offset of the keys of each sequence
    max_seqlen: int
    # What a mask function gets as the index of each query and of each key.
    q_index: Tensor
    k_index: Tensor


@dataclass(frozen=True, eq=False)
class AttnSpec:
    """One attention over packed sequences: the sequence boundaries and the options of the softmax.

    A token attends only to tokens of its own sequence, whatever the options. `mask_function` replaces `causal` and
    `window` where it is set: it includes both.
    """

    # int32 (S + 1,): the offset of each of the S sequences, then the number of tokens
    cu_seqlens: Tensor
    max_seqlen: int
    scale: float | None = None  # None: 1 / sqrt(head size)
    causal: bool = True
    # A token attends to `window - 1` tokens before it; after it, too, if not causal.
    window: int | None = None
    dropout: float = 0.0
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    sinks: Tensor | None = None  # (H,): one more logit per head, with a value of zero
    mask_function: MaskFunction | None = None
    keys: KeySpec | None = None  # None: queries and keys are of the same tokens

    @property
    def cu_seqlens_k(self) -> Tensor:
        return self.cu_seqlens if self.keys is None else self.keys.cu_seqlens

    @property
    def max_seqlen_k(self) -> int:
        return self.max_seqlen if self.keys is None else self.keys.max_seqlen

    @property
    def is_plain(self) -> bool:
        """Only scale, causality and window are set, which every fused kernel supports."""
        if self.mask_function is not None or self.dropout != 0.0:
            return False
        return self.softcap is None and self.sinks is None


def round_up_to_bucket(n: int, smallest: int) -> int:
    """The smallest bucket that holds `n`. Buckets are `smallest` times 1, 1.5, 2, 3, 4, 6, 8, ..."""
    size = smallest
    while size < n:
        if size * 3 // 2 >= n:
            return size * 3 // 2
        size *= 2
    return size
