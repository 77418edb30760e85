"""FlashAttention 4 over packed sequences (package flash-attn-4), without a host sync: the fastest kernel on Hopper.

Legend: T tokens of all sequences, H query heads, K key/value heads, d head size.

Its kernels are compiled at their first use, in some seconds, and kept next to Inductor's, where that has a folder. The
package is loaded late: that takes a second or two. It is used where it was compared with other kernels on a GPU: a
version with wrong gradients for some sizes would not be noticed.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mvp_engine.ops.attn_spec import AttnSpec, attention_operator

LOGGER = logging.getLogger("mvp_engine")
# For another one, change the extra `cuda` in pyproject.toml, too, and run tests/ops on a GPU.
VERSION = "4.0.0b36"
HEADS = (64, 128)  # head sizes; with 80, some gradients are zero
# The package has other kernels for shorter and for more sequences.
_MIN_SEQLEN = 129
_MAX_SEQUENCES = 256
_MAX_ELEMENTS = 2**28  # of queries or keys


def _is_installed() -> bool:
    """By the distribution: FlashAttention 2 has a package of the same name."""
    try:
        return importlib.metadata.version("flash-attn-4") == VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


INSTALLED = _is_installed()


@cache
def load() -> Any:
    """The module with the kernels, or None with a warning if it cannot be imported."""
    if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", f"{folder}/flash_attention")
    try:
        from flash_attn.cute import interface
    except Exception as error:  # noqa: BLE001 - its compiler raises anything
        LOGGER.warning(
            "flash-attn-4 is installed but cannot be imported, so attention uses other kernels. Install it with "
            "`pip install 'mvp-engine[cuda]'`, or uninstall it. %s: %s",
            type(error).__name__,
            error,
        )
        return None
    warnings.filterwarnings("ignore", "Argument aux_data")  # of compiling its kernels
    return interface


def runs_on(device: int | torch.device | None = None) -> bool:
    """Whether this GPU is a Hopper with CUDA 13."""
    has_cuda_13 = int((torch.version.cuda or "0").split(".")[0]) >= 13
    return has_cuda_13 and torch.cuda.get_device_capability(device)[0] == 9


def _can_run(device: int) -> bool:
    return runs_on(device) and load() is not None


_can_run._dynamo_marked_constant = True  # type: ignore[attr-defined] # as in `cudnn_attention`


def is_supported(q: Tensor, spec: AttnSpec, k: Tensor | None = None) -> bool:
    """It computes this attention, and is the fastest: a window must be causal."""
    if not INSTALLED or not q.is_cuda or q.dtype != torch.bfloat16 or q.shape[-1] not in HEADS:
        return False
    if spec.window is not None and not spec.causal:
        return False
    if spec.max_seqlen < _MIN_SEQLEN or spec.max_seqlen_k < _MIN_SEQLEN:
        return False
    elements = max(q.numel(), 0 if k is None else k.numel())
    if elements > _MAX_ELEMENTS or len(spec.cu_seqlens) > _MAX_SEQUENCES + 1:
        return False
    return _can_run(q.device.index)


def _forward(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens, cu_seqlens_k, *options
) -> tuple[Tensor, Tensor]:
    arguments = _arguments(cu_seqlens, cu_seqlens_k, *options)
    out, stats = load()._flash_attn_fwd(q, k, v, return_lse=True, **arguments)[:2]
    return out, stats


def _backward(  # type: ignore[no-untyped-def]
    d_out, q, k, v, out, stats, cu_seqlens, cu_seqlens_k, *options
) -> tuple[Tensor, ...]:
    arguments = _arguments(cu_seqlens, cu_seqlens_k, *options)
    # Contiguous, also where q, k and v are slices of one tensor, which the kernels read as they are.
    gradients = {name: x.new_empty(x.shape) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    load()._flash_attn_bwd(
        q,
        k,
        v,
        out,
        d_out,
        stats,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **arguments,
        **gradients,
    )
    return tuple(gradients.values())


def _arguments(
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool,
    window: int,
    _: bool,  # causality always counts from the end of the keys
) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens_k,
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
