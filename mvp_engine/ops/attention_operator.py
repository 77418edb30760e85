"""An attention kernel over packed sequences as a torch operator, whatever library the kernel is of.

Legend: T tokens of all sequences, H query heads, K key/value heads, d head size.

The operator has a fake implementation for torch.compile and a second operator for its gradients, so that activation
checkpointing can keep its outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mvp_engine.ops.attn_spec import AttnSpec

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
