"""Variable-length attention over packed sequences: one call, and the fastest kernel that supports it.

Legend: T tokens of all sequences, H query heads, K key/value heads, d head size.

The kernels, in order of preference: FlashAttention 4, cuDNN, torch's `varlen_attn` (FlashAttention 2), FlexAttention,
and the reference, which supports every option. What transformers adds (call signatures, mask objects, registration) is
in `mvp_engine.hf.model.attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mvp_engine.ops import cudnn_attention, flash_attention, flex_attention
from mvp_engine.ops.attn_spec import AttnSpec, KeySpec
from mvp_engine.ops.flex_attention import flex_varlen_attention
from mvp_engine.ops.precision import is_half_on_gpu
from mvp_engine.ops.reference_attention import reference_attention

__all__ = ["AttnSpec", "KeySpec", "varlen_attention"]


def varlen_attention(q_HTd: Tensor, k_KTd: Tensor, v_KTd: Tensor, spec: AttnSpec) -> Tensor:
    """Attention of shape (H, T, d) by the fastest kernel for this GPU, dtype, head size and spec."""
    if spec.is_plain:
        # Latent attention (DeepSeek) has two head sizes: cuDNN's plans have one, and FlashAttention 4 was not tried.
        is_same = v_KTd.shape[-1] == q_HTd.shape[-1]
        if is_same and flash_attention.is_supported(q_HTd, spec, k_KTd):
            return flash_attention.flash_attention(q_HTd, k_KTd, v_KTd, spec)
        if is_same and cudnn_attention.is_supported(q_HTd, spec, k_KTd):
            return cudnn_attention.cudnn_attention(q_HTd, k_KTd, v_KTd, spec)
        if _torch_varlen_is_supported(q_HTd, v_KTd):
            return _torch_varlen(q_HTd, k_KTd, v_KTd, spec)
    # Imported here: it needs torch._dynamo, which takes half a second to import.

    if spec.dropout == 0.0 and flex_attention.is_supported(q_HTd, v_KTd):
        return untraced_flex_attention(q_HTd, k_KTd, v_KTd, spec)
    return untraced_reference_attention(q_HTd, k_KTd, v_KTd, spec)


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


# Attention kernels that torch.compile must not trace: a compiled block breaks its graph around them.
#
# The reference loops over sequences, so a traced one would be recompiled for each number of sequences. FlexAttention is
# compiled on its own, for its own padded sizes. Outside of a compiled block the wrappers only call the function, so
# compiled and uncompiled engines share them. Importing this module imports torch._dynamo (half a second).

untraced_flex_attention = torch.compiler.disable(flex_varlen_attention)
untraced_reference_attention = torch.compiler.disable(reference_attention)
