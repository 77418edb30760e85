"""The reference path of every mixer: its own forward on batches of sequences cut out of the pack.

It needs no kernel, runs on any device and is exact for any layer that is causal and has no state but its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mvp_engine.distributed.ulysses import UlyssesShard
from mvp_engine.hf.attention_mask import PACK_ARGUMENTS, NoMask, Overlay, Window
from mvp_engine.hf.mixers.packing import Group, Packing, map_token_tensors

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def run_by_sequence(
    forward: Callable[..., Any],
    packing: Packing | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The output of a causal function over tokens, for every sequence of the pack by itself."""
    if packing is None or len(packing.lengths) == 1:
        return forward(*args, **kwargs)
    groups, pack_order = packing.groups()
    outputs = []
    for group in groups:
        group_args, group_kwargs = map_token_tensors(group.cut, (args, kwargs), packing.num_tokens)
        outputs.append(forward(*group_args, **group_kwargs))
    return join_groups(outputs, groups, pack_order)


def join_groups(outputs: list[Any], groups: list[Group], pack_order: Tensor) -> Any:
    """Outputs (S, L, ...) of all groups as (1, T, ...); in tuples entry by entry, None for what is not per token."""
    first = outputs[0]
    if isinstance(first, tuple | list):
        entries = zip(*outputs, strict=True)
        return type(first)(join_groups(list(entry), groups, pack_order) for entry in entries)
    parts = []
    for out, group in zip(outputs, groups, strict=True):
        if not isinstance(out, Tensor) or out.shape[:2] != group.places.shape:
            return None  # a final state, which training does not use
        parts.append(out.flatten(0, 1)[group.kept])
    return torch.cat(_same_width(parts))[pack_order][None]


def _same_width(parts: list[Tensor]) -> list[Tensor]:
    """Indices of chosen tokens: longer sequences choose more of them. Shorter lists repeat their last entry."""
    width = max(part.shape[-1] for part in parts)
    filled = []
    for part in parts:
        repeated = part[..., -1:].expand(*part.shape[:-1], width - part.shape[-1])
        filled.append(torch.cat([part, repeated], -1) if repeated.numel() else part)
    return filled


def without_pack_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Inputs without masks and boundaries of attention: a mixer reads padding masks only, and there is no padding."""
    args = tuple(None if _is_mask(value) else value for value in args)
    kept = {name: value for name, value in kwargs.items() if name not in PACK_ARGUMENTS}
    return args, {name: None if _is_mask(value) else value for name, value in kept.items()}


def _is_mask(value: Any) -> bool:
    return isinstance(value, NoMask | Overlay | Window)


def gather_tokens(args: tuple[Any, ...], kwargs: dict[str, Any], shard: UlyssesShard) -> Inputs:
    """All-gather of inputs (1, t, ...) along the tokens. Its gradient is a reduce-scatter.

    Every rank computes the mixer on all tokens, and the gradient of its own output tokens only.
    """
    tokens = shard.sizes[shard.rank]
    return map_token_tensors(
        lambda value: shard.gather_shared(value[0])[None], (args, kwargs), tokens
    )


def cut_tokens(outputs: Any, shard: UlyssesShard) -> Any:
    return map_token_tensors(lambda value: shard.cut(value, dim=1), outputs, sum(shard.sizes))
