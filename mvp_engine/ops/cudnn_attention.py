"""cuDNN's attention over packed sequences, without a host sync: a fast kernel on Hopper and Blackwell.

Legend: T tokens of all sequences, H query heads, K key/value heads, d head size.

Graphs and plans are in `mvp_engine.ops.cudnn_graph`.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from mvp_engine.ops import cudnn_graph
from mvp_engine.ops.attention_operator import attention_operator
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
    """cuDNN computes this attention: a window must be causal, and torch's FlashAttention is faster where no sequence is
    longer than 64 tokens."""
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


def _forward(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens, cu_seqlens_k, *options
) -> tuple[Tensor, Tensor]:
    q = q.contiguous()
    k = k.contiguous()
    out = torch.empty_like(q)
    stats = q.new_empty(_stats_shape(q), dtype=torch.float32)
    plan = cudnn_graph.Plan.of(q, k, len(cu_seqlens) - 1, *options)
    tensors = {"q": q, "k": k, "v": v.contiguous(), "o": out, "stats": stats}
    cudnn_graph.run(plan, cu_seqlens, False, tensors, cu_seqlens_k)
    return out, stats


def _backward(  # type: ignore[no-untyped-def]
    d_out, q, k, v, out, stats, cu_seqlens, cu_seqlens_k, *options
) -> tuple[Tensor, ...]:
    q = q.contiguous()
    k = k.contiguous()
    v = v.contiguous()
    gradients = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    plan = cudnn_graph.Plan.of(q, k, len(cu_seqlens) - 1, *options)
    inputs = {"q": q, "k": k, "v": v, "o": out, "do": d_out.contiguous(), "stats": stats}
    cudnn_graph.run(plan, cu_seqlens, True, inputs | gradients, cu_seqlens_k)
    return tuple(gradients.values())


def _stats_shape(q_THd: Tensor) -> tuple[int, ...]:
    return (*q_THd.shape[:2], 1)


cudnn_attention = attention_operator("ragged_attention", _forward, _backward, _stats_shape)
