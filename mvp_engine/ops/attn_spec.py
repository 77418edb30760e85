"""`AttnSpec`: what one attention call computes, as the one argument that all kernels share.

It holds no query, key or value and chooses no kernel: `mvp_engine.ops.attention` does that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
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


# An attention kernel over packed sequences as a torch operator, whatever library the kernel is of. It has a fake
# implementation for torch.compile and a second operator for its gradients, so that activation checkpointing can keep
# its outputs.

_SPEC_SCHEMA = (
    "Tensor cu_seqlens, Tensor cu_seqlens_k, SymInt max_seqlen, SymInt max_seqlen_k, float scale, bool causal, "
    "int window, bool bottom_right"
)
Attention = Callable[[Tensor, Tensor, Tensor, AttnSpec], Tensor]


def attention_operator(
    name: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, ...]],
    stats_shape: Callable[[Tensor], tuple[int, ...]],
) -> Attention:
    """A function that computes attention of shape (H, T, d) by the operator `mvp::name`.

    `forward` gets q (T, H, d), k and v (T, K, d) and the values of `_SPEC_SCHEMA`, and returns the output (T, H, d) and
    the log-sum-exp of each row, in float32 and of `stats_shape(q)`. `backward` gets the gradient of the output, then
    q, k, v, both outputs and the same values, and returns the gradients of q, k and v.
    """
    register: Any = torch.library.custom_op
    options = {"mutates_args": (), "device_types": "cuda"}
    schema = f"Tensor q, Tensor k, Tensor v, {_SPEC_SCHEMA}) -> (Tensor, Tensor)"
    forward_op = register(f"mvp::{name}", forward, schema=f"({schema}", **options)
    schema = f"Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor stats, {_SPEC_SCHEMA}"
    backward_op = register(
        f"mvp::{name}_backward",
        backward,
        schema=f"({schema}) -> (Tensor, Tensor, Tensor)",
        **options,
    )

    @forward_op.register_fake
    def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), q.new_empty(stats_shape(q), dtype=torch.float32)

    @backward_op.register_fake
    def _(d_out: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in tensors[:3])

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        qkv = inputs[:3]
        boundaries = inputs[3:5]
        ctx.options = inputs[5:]
        ctx.save_for_backward(*qkv, *output, *boundaries)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, d_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if d_out is None:
            return (None,) * 11
        d_qkv = backward_op(d_out, *ctx.saved_tensors, *ctx.options)
        return (*d_qkv, *(None,) * 8)

    forward_op.register_autograd(gradients, setup_context=setup_context)

    def attention(q_HTd: Tensor, k_KTd: Tensor, v_KTd: Tensor, spec: AttnSpec) -> Tensor:
        out_THd, _ = forward_op(
            q_HTd.transpose(0, 1),
            k_KTd.transpose(0, 1),
            v_KTd.transpose(0, 1),
            spec.cu_seqlens,
            spec.cu_seqlens_k,
            spec.max_seqlen,
            spec.max_seqlen_k,
            q_HTd.shape[-1] ** -0.5 if spec.scale is None else spec.scale,
            spec.causal,
            spec.window or 0,
            spec.keys is not None,
        )
        return out_THd.transpose(0, 1)

    return attention
