"""cuDNN's attention over packed sequences as a torch operator: the fastest kernel on Hopper and Blackwell.

Legend: T tokens of all sequences, H query heads, K key/value heads, d head size.

The operator has a fake implementation for torch.compile, a second operator for its gradients (so that activation
checkpointing can save its outputs), and no host sync. Graphs and plans are in `mvp_engine.ops.cudnn_graph`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from mvp_engine.ops import cudnn_graph
from mvp_engine.ops.attn_spec import AttnSpec

INSTALLED = importlib.util.find_spec("cudnn") is not None
_MAX_ELEMENTS = 2**31 - 1  # ragged offsets are 32-bit numbers of elements
COMMON_HEAD = 128  # the largest head that all versions support
LARGEST_HEAD = 256  # as Gemma and Qwen3.5 have them


def _has_ragged_kernels(device: int) -> bool:
    """Hopper and Blackwell have kernels for packed sequences, forward and backward."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _has_large_heads(device: int) -> bool:
    """Whether this cuDNN has kernels for heads of more than 128, forward and backward: it can plan both."""
    return cudnn_graph.can_build(device, LARGEST_HEAD)


# What torch.compiler.assume_constant_result sets; calling it imports torch._dynamo, which takes half a second.
for _constant in (_has_ragged_kernels, _has_large_heads):
    _constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_supported(q: Tensor, spec: AttnSpec, k: Tensor | None = None) -> bool:
    """cuDNN computes this attention and is the fastest: a window must be causal, and FlashAttention is faster where no
    sequence is longer than 64 tokens."""
    if not INSTALLED or not q.is_cuda or q.dtype not in cudnn_graph.DTYPES:
        return False
    head_size = q.shape[-1]
    if head_size % 16 or head_size > LARGEST_HEAD or spec.max_seqlen_k <= 64:
        return False
    if spec.window is not None and not spec.causal:
        return False
    elements = max(q.numel(), 0 if k is None else k.numel())
    device = q.device.index
    if elements > _MAX_ELEMENTS or not _has_ragged_kernels(device):
        return False
    return head_size <= COMMON_HEAD or _has_large_heads(device)


def cudnn_attention(q_HTd: Tensor, k_KTd: Tensor, v_KTd: Tensor, spec: AttnSpec) -> Tensor:
    """Attention of shape (H, T, d) in one kernel call for all sequences, without a host sync."""
    out_THd, _ = _forward(
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


_SPEC_SCHEMA = (
    "Tensor cu_seqlens, Tensor cu_seqlens_k, SymInt max_seqlen, SymInt max_seqlen_k, float scale, bool causal, "
    "int window, bool bottom_right"
)


@torch.library.custom_op(
    "mvp::ragged_attention",
    mutates_args=(),
    device_types="cuda",
    schema=f"(Tensor q, Tensor k, Tensor v, {_SPEC_SCHEMA}) -> (Tensor, Tensor)",
)
def _forward(q, k, v, cu_seqlens, cu_seqlens_k, *options):  # type: ignore[no-untyped-def]
    """The output (T, H, d), and the log-sum-exp of each row (T, H, 1), which backward needs."""
    q = q.contiguous()
    k = k.contiguous()
    out = torch.empty_like(q)
    stats = q.new_empty(*q.shape[:2], 1, dtype=torch.float32)
    plan = cudnn_graph.Plan.of(q, k, len(cu_seqlens) - 1, *options)
    tensors = {"q": q, "k": k, "v": v.contiguous(), "o": out, "stats": stats}
    cudnn_graph.run(plan, cu_seqlens, False, tensors, cu_seqlens_k)
    return out, stats


@torch.library.custom_op(
    "mvp::ragged_attention_backward",
    mutates_args=(),
    device_types="cuda",
    schema=f"(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor stats, {_SPEC_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)",
)
def _backward(  # type: ignore[no-untyped-def]
    d_out, q, k, v, out, stats, cu_seqlens, cu_seqlens_k, *options
):
    q = q.contiguous()
    k = k.contiguous()
    v = v.contiguous()
    gradients = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    plan = cudnn_graph.Plan.of(q, k, len(cu_seqlens) - 1, *options)
    inputs = {"q": q, "k": k, "v": v, "o": out, "do": d_out.contiguous(), "stats": stats}
    cudnn_graph.run(plan, cu_seqlens, True, inputs | gradients, cu_seqlens_k)
    return tuple(gradients.values())


@_forward.register_fake
def _(q, k, v, *spec):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), q.new_empty(*q.shape[:2], 1, dtype=torch.float32)


@_backward.register_fake
def _(d_out, q, k, v, *rest):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv = inputs[:3]
    boundaries = inputs[3:5]
    ctx.options = inputs[5:]
    ctx.save_for_backward(*qkv, *output, *boundaries)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return (None,) * 11
    d_qkv = _backward(d_out, *ctx.saved_tensors, *ctx.options)
    return (*d_qkv, *(None,) * 8)


_forward.register_autograd(_gradients, setup_context=_setup_context)
