"""The reference path of every mixer: its own forward on batches of sequences cut out of the pack.

It needs no kernel, runs on any device and is exact for any layer that is causal and has no state but its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.distributed.ulysses import UlyssesShard
from mvp_engine.hf.attention_mask import NoMask, Overlay, Window
from mvp_engine.hf.mixers.packing import Group, Packing, map_token_tensors

# Keyword arguments about the pack, which is no longer one when the mixer's own forward runs.
_OF_THE_PACK = {
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "ulysses_shard",
    "kv_cache",
}


def run_packed(
    mixer: nn.Module,
    forward: Callable[..., Any],
    packing: Packing,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The output of a mixer for a packed batch; with sequence parallel, for this rank's tokens of it."""
    kwargs = {name: value for name, value in kwargs.items() if name not in _OF_THE_PACK}
    args, kwargs = _without_masks((args, kwargs))
    shard = packing.shard
    if shard is None:
        return run_by_sequence(forward, packing, args, kwargs)
    own_tokens = shard.sizes[shard.rank]
    args, kwargs = map_token_tensors(
        lambda value: gather_tokens(value, shard), (args, kwargs), own_tokens
    )
    out = run_by_sequence(forward, packing, args, kwargs)
    return map_token_tensors(lambda value: shard.cut(value, dim=1), out, packing.num_tokens)


def run_by_sequence(
    forward: Callable[..., Any], packing: Packing, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tokens = packing.num_tokens
    if len(packing.lengths) == 1:
        return forward(*args, **kwargs)
    groups, pack_order = packing.groups()
    outputs = []
    for group in groups:
        group_args, group_kwargs = map_token_tensors(group.cut, (args, kwargs), tokens)
        outputs.append(forward(*group_args, **group_kwargs))
    return _join(outputs, groups, pack_order)


def _join(outputs: list[Any], groups: list[Group], pack_order: Tensor) -> Any:
    """Outputs (S, L, ...) of all groups as (1, T, ...); in tuples entry by entry, None for what is not per token."""
    first = outputs[0]
    if isinstance(first, tuple | list):
        entries = zip(*outputs, strict=True)
        return type(first)(_join(list(entry), groups, pack_order) for entry in entries)
    parts = []
    for out, group in zip(outputs, groups, strict=True):
        if not isinstance(out, Tensor) or out.shape[:2] != group.places_SL.shape:
            return None  # a final state, which training does not use
        parts.append(out.flatten(0, 1)[group.kept])
    return torch.cat(parts)[pack_order][None]


def _without_masks(inputs: Any) -> Any:
    """Without the values that stand for attention masks of packed batches: a mixer reads padding masks only."""
    if isinstance(inputs, NoMask | Overlay | Window):
        return None
    if isinstance(inputs, tuple):
        return tuple(_without_masks(value) for value in inputs)
    if isinstance(inputs, dict):
        return {name: _without_masks(value) for name, value in inputs.items()}
    return inputs


def gather_tokens(value_1t: Tensor, shard: UlyssesShard) -> Tensor:
    """All-gather of (1, t, ...) along the tokens. Its gradient is a reduce-scatter.

    Every rank computes the mixer on all tokens, and the gradient of its own output tokens only.
    """
    return shard.gather_shared(value_1t[0])[None]
