"""The reference path of every mixer: its own forward on batches of sequences cut out of the pack.

It needs no kernel, runs on any device and is exact for any layer that is causal and has no state but its tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.sequence_parallel import UlyssesShard
from mvp_engine.hf.mixers.kinds import kind_of
from mvp_engine.hf.model.attention import PACK_ARGUMENTS, NoMask, Overlay, Window

if TYPE_CHECKING:
    from mvp_engine.hf.model.kv_cache import KVCache

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


# Packing: the sequence boundaries of one forward as mixers need them, and batches of sequences cut out of the pack.
#
# Legend: T tokens of all sequences, S sequences of a group, L tokens of its longest sequence, D features.


@dataclass(frozen=True)
class Group:
    """Sequences of about one length. Padding repeats the last token: it cannot change the tokens before it."""

    sequences: list[int]
    places: Tensor  # (S, L), the token in the pack of each place
    kept: Tensor  # places that are no padding, in flat (S * L) order

    def cut(self, value_1T: Tensor) -> Tensor:
        """(1, T, ...) -> (S, L, ...)"""
        return value_1T[0][self.places]


@dataclass(eq=False)
class Packing:
    """Sequence boundaries of one forward, on the host and on the device. All layers share it."""

    lengths: list[int]
    cu_seqlens: Tensor
    shard: UlyssesShard | None = None
    cache: KVCache | None = None
    _groups: dict[bool, tuple[list[Group], Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, batch: PackedBatch, shard: UlyssesShard | None = None, cache: KVCache | None = None
    ) -> Packing:
        return cls(batch.host_lengths, batch.cu_seqlens, shard, cache)

    def __post_init__(self) -> None:
        # All that layers use is made here: in a compiled layer it would be made again in every one.
        device = self.cu_seqlens.device
        lengths_S = torch.tensor(self.lengths)
        ends_S = lengths_S.cumsum(0)
        self.num_tokens = int(ends_S[-1])
        ids_T = torch.arange(len(self.lengths)).repeat_interleave(lengths_S)
        steps_T = torch.arange(self.num_tokens) - (ends_S - lengths_S)[ids_T]
        self.steps = _to(steps_T, device)  # (T,), the index of each token in its sequence
        self.sequence_ids = _to(ids_T[None].int(), device)  # (1, T)
        self._host_boundaries = F.pad(ends_S, (1, 0))
        self._boundaries = self.cu_seqlens.long()

    def fla_boundaries(self) -> dict[str, Tensor]:
        """Keyword arguments of flash-linear-attention; with those on the host it needs no host sync."""
        return {"cu_seqlens": self._boundaries, "cu_seqlens_cpu": self._host_boundaries}

    def groups(self, padded: bool = True) -> tuple[list[Group], Tensor]:
        """Groups of sequences, and the index that brings their tokens, one group after the other, into pack order.

        `padded`: lengths in a group differ by a factor of two at most. Otherwise they are equal.
        """
        if padded not in self._groups:
            self._groups[padded] = self._find_groups(padded)
        return self._groups[padded]

    def _find_groups(self, padded: bool) -> tuple[list[Group], Tensor]:
        members: dict[int, list[int]] = {}
        for sequence, length in enumerate(self.lengths):
            key = (length - 1).bit_length() if padded else length
            members.setdefault(key, []).append(sequence)
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        device = self.cu_seqlens.device
        groups = []
        order = []
        for sequences in members.values():
            lengths_S1 = torch.tensor([self.lengths[s] for s in sequences])[:, None]
            steps_1L = torch.arange(int(lengths_S1.max()))[None]
            starts_S1 = torch.tensor([starts[s] for s in sequences])[:, None]
            places_SL = starts_S1 + torch.minimum(steps_1L, lengths_S1 - 1)
            is_kept_SL = steps_1L < lengths_S1
            order.append(places_SL[is_kept_SL])
            kept = is_kept_SL.flatten().nonzero()[:, 0]
            groups.append(Group(sequences, _to(places_SL, device), _to(kept, device)))
        return groups, _to(torch.cat(order).argsort(), device)


def _to(index: Tensor, device: torch.device) -> Tensor:
    """A copy on the device without a host sync."""
    if device.type != "cuda":
        return index.to(device)
    return index.pin_memory().to(device, non_blocking=True)


def is_per_token(value: Any, tokens: int) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == (1, tokens)


def map_token_tensors(function: Any, inputs: Any, tokens: int) -> Any:
    """Apply `function` to the tensors (1, T, ...) in nested inputs."""
    return _pytree.tree_map(
        lambda value: function(value) if is_per_token(value, tokens) else value, inputs
    )


# Generation: the states of one mixer, for all sequences of a batch.
#
# `MixerStates` has the methods of transformers' cache that mixers call, so the mixer's own forward reads and writes it.
# The prompts run by groups of equal length, since padding would change the state at their end; their states are
# stacked. Every later forward has one token per sequence, which is a batch of S sequences to the mixer.


class MixerStates:
    """States by kind and number; the first dimension of each is the sequence."""

    def __init__(self) -> None:
        self.states: dict[tuple[str, int], Tensor] = {}

    @classmethod
    def stack(cls, groups: list[MixerStates], order: list[int]) -> MixerStates:
        """The states of all groups; `order` is where sequence 0, 1, ... is among theirs."""
        stacked = cls()
        for key in groups[0].states:
            stacked.states[key] = torch.cat([group.states[key] for group in groups])
        stacked.select(torch.tensor(order))
        return stacked

    def select(self, sequences: Tensor) -> None:
        for key, state in self.states.items():
            self.states[key] = state.index_select(0, sequences.to(state.device))

    # ---- What mixers call; `layer_idx` is always their own -----------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("conv", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Append the newest inputs of a convolution; returns them, behind those that came before."""
        size = conv_kernel_size or conv_states.shape[-1]
        before = self.states.get(("conv", state_idx))
        if before is not None:
            full = torch.cat([before, conv_states], dim=-1)
            size = before.shape[-1]
        else:
            full = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        self.states["conv", state_idx] = full[..., -size:].clone()
        return full

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("recurrent", state_idx))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def run_with_states(
    mixer: nn.Module, forward: Callable[..., Any], packing: Packing, args: Any, kwargs: Any
) -> Any:
    """The output of a mixer in generation; its states are in `packing.cache`, which must be."""
    assert packing.cache is not None
    stored = packing.cache.mixer_states
    tokens = packing.num_tokens
    if packing.cache.is_prefilled:
        inputs, options = map_token_tensors(
            lambda value: value.transpose(0, 1), (args, kwargs), tokens
        )
        out = _call(mixer, forward, inputs, options, stored[mixer])
        return _tokens_first(out)
    groups, pack_order = packing.groups(padded=False)
    states = [MixerStates() for _ in groups]
    outputs = []
    for group, of_group in zip(groups, states, strict=True):
        inputs, options = map_token_tensors(group.cut, (args, kwargs), tokens)
        outputs.append(_call(mixer, forward, inputs, options, of_group))
    sequences = [sequence for group in groups for sequence in group.sequences]
    # Sequences behind the prompts are dummies.
    order = [sequences.index(sequence) for sequence in range(len(packing.cache.lengths))]
    stored[mixer] = MixerStates.stack(states, order)
    return join_groups(outputs, groups, pack_order)


def _call(
    mixer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, states: MixerStates
) -> Any:
    """Call the forward with `states` as its cache, whether that is passed by position or by name."""
    kind = kind_of(type(mixer))
    assert kind is not None
    assert kind.cache_argument is not None
    original: Any = inspect.unwrap(type(mixer).forward)
    bound = inspect.signature(original).bind(mixer, *args, **kwargs)
    bound.arguments[kind.cache_argument] = states
    return forward(*bound.args[1:], **bound.kwargs)


def _tokens_first(out: Any) -> Any:
    """(S, 1, ...) -> (1, S, ...), in tuples entry by entry."""
    if isinstance(out, tuple | list):
        return type(out)(_tokens_first(value) for value in out)
    is_output = isinstance(out, Tensor) and out.ndim >= 3 and out.shape[1] == 1
    return out.transpose(0, 1) if is_output else None
