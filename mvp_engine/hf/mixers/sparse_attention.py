"""Sparse attention with an indexer (DeepSeek-V3.2 and V4, GLM-5, MiniMax-M3, Qwen4) on packed sequences.

An indexer scores all tokens before a query and keeps the best few; some layers also compress windows of tokens into one
entry. On a pack both would pick tokens of other sequences, and their score matrix would grow with the square of the
pack. So these attention layers run by sequence, like mixers without a kernel (`per_sequence.py`), with
transformers' own attention and a causal mask for each group of sequences. Everything else in the model stays packed.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.hf.mixers import PackedMixers
from mvp_engine.hf.mixers.per_sequence import (
    cut_tokens,
    gather_tokens,
    run_by_sequence,
    without_pack_arguments,
)

_PARTS = {"indexer", "compressor"}  # names of submodules that only sparse attention has


def sparse_attention_of(decoder: nn.Module) -> list[nn.Module]:
    """The sparse attention layers of a decoder, with those that reuse the choice of an earlier layer."""
    classes = {
        type(module)
        for module in decoder.modules()
        if any(name in _PARTS for name, _ in module.named_children())
    }
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if type(child) in classes:
                found.append(child)
            else:
                walk(child)

    walk(decoder)
    return found


def run_sparse_attention_by_sequence(
    layers: list[nn.Module], mixers: PackedMixers, implementation: str
) -> None:
    """Change the forward of these layers. `mixers` knows the boundaries of the forward that runs."""
    for layer in layers:
        changed: Any = layer
        changed.config = copy.copy(changed.config)
        changed.config._attn_implementation = implementation
        changed.forward = functools.partial(_run, mixers, layer, layer.forward)


@torch.compiler.disable
def _run(
    mixers: PackedMixers, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    packing = mixers.current
    if packing is None:
        return forward(*args, **kwargs)
    args, kwargs = without_pack_arguments(args, kwargs)
    causal = functools.partial(_causal_forward, layer, forward)
    if packing.shard is None:
        return run_by_sequence(causal, packing, args, kwargs)
    args, kwargs = gather_tokens(args, kwargs, packing.shard)
    return cut_tokens(run_by_sequence(causal, packing, args, kwargs), packing.shard)


def _causal_forward(
    layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The layer's own forward, with a causal mask of the batch that it gets."""
    call = inspect.signature(forward).bind(*args, **kwargs)
    hidden: Tensor = call.arguments["hidden_states"]
    call.arguments["attention_mask"] = _causal_mask(hidden, getattr(layer, "sliding_window", None))
    return forward(*call.args, **call.kwargs)


def _causal_mask(hidden_SLD: Tensor, window: int | None) -> Tensor:
    """(S, 1, L, L): 0, or the lowest number of the dtype where a query must not see a key."""
    rows, tokens = hidden_SLD.shape[:2]
    steps_L = torch.arange(tokens, device=hidden_SLD.device)
    distance_LL = steps_L[:, None] - steps_L[None]
    hidden_LL = distance_LL < 0
    if window is not None:
        hidden_LL = hidden_LL | (distance_LL >= window)
    mask_LL = torch.zeros(tokens, tokens, dtype=hidden_SLD.dtype, device=hidden_SLD.device)
    mask_LL.masked_fill_(hidden_LL, torch.finfo(hidden_SLD.dtype).min)
    return mask_LL.expand(rows, 1, tokens, tokens)
