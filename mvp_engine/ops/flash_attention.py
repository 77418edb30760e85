"""FlashAttention 4 over packed sequences (package flash-attn-4), without a host sync: the fastest kernel on Hopper.

Legend: T tokens of all sequences, H query heads, K key/value heads, d head size.

Its kernels are compiled at their first use, in some seconds, and kept next to Inductor's. The package is loaded late:
that takes a second or two.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mvp_engine.ops.attention_operator import attention_operator
from mvp_engine.ops.attn_spec import AttnSpec
from mvp_engine.ops.half_precision import is_half_on_gpu

LOGGER = logging.getLogger("mvp_engine")
HEADS = (64, 128)  # sizes of which it was measured to be faster than cuDNN, and those between
_MAX_ELEMENTS = 2**30  # of the queries: more were not tried


def _is_installed() -> bool:
    """The package `flash_attn` may also be FlashAttention 2, so its name is not enough."""
    try:
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


INSTALLED = _is_installed()


@cache
def load() -> Any:
    """The module with the kernels, or None with a warning if it cannot be imported."""
    if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", f"{folder}/flash_attention")
    try:
        from flash_attn.cute import interface
    except (ImportError, OSError, RuntimeError) as error:
        LOGGER.warning(
            "flash-attn-4 is installed but cannot be imported, so attention uses other kernels. Install it with "
            "`pip install 'mvp-engine[cuda]'`, or uninstall it. %s: %s",
            type(error).__name__,
            error,
        )
        return None
    return interface


def _can_run(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9 and load() is not None


_can_run._dynamo_marked_constant = True  # type: ignore[attr-defined] # as in `cudnn_attention`


def is_supported(q: Tensor, spec: AttnSpec) -> bool:
    """It computes this attention, and is the fastest: a window must be causal."""
    if not INSTALLED or not is_half_on_gpu(q) or q.numel() > _MAX_ELEMENTS:
        return False
    head_size = q.shape[-1]
    if head_size % 8 or not HEADS[0] <= head_size <= HEADS[1] or spec.max_seqlen_k <= 64:
        return False
    if spec.window is not None and not spec.causal:
        return False
    return _can_run(q.device.index)


def _forward(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens, cu_seqlens_k, *options
) -> tuple[Tensor, Tensor]:
    boundaries = cu_seqlens, cu_seqlens_k
    out, stats = load()._flash_attn_fwd(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        return_lse=True,
        **_arguments(boundaries, *options),
    )[:2]
    return out, stats


def _backward(  # type: ignore[no-untyped-def]
    d_out, q, k, v, out, stats, cu_seqlens, cu_seqlens_k, *options
) -> tuple[Tensor, ...]:
    boundaries = cu_seqlens, cu_seqlens_k
    gradients: tuple[Tensor, ...] = load()._flash_attn_bwd(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        out,
        d_out.contiguous(),
        stats,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_arguments(boundaries, *options),
    )
    return gradients


def _arguments(
    boundaries: tuple[Tensor, Tensor],
    max_seqlen: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool,
    window: int,
    _: bool,  # causality always counts from the end of the keys
) -> dict[str, Any]:
    return {
        "cu_seqlens_q": boundaries[0],
        "cu_seqlens_k": boundaries[1],
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen_k,
        "softmax_scale": scale,
        "causal": causal,
        "window_size_left": window - 1 if window else None,
    }


def _stats_shape(q_THd: Tensor) -> tuple[int, ...]:
    return q_THd.shape[1], q_THd.shape[0]


# Selective activation checkpointing knows it by `_flash_attention` in the name.
flash_attention = attention_operator("varlen_flash_attention", _forward, _backward, _stats_shape)
