"""MixerStates: the states of one mixer during generation, for all sequences of a batch.

Legend: S sequences, T tokens.

It has the methods of transformers' cache that mixers call, so the mixer's own forward reads and writes it. The prompts
run by groups of equal length, since padding would change the state at their end; their states are stacked. Every later
forward has one token per sequence, which is a batch of S sequences to the mixer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.hf.mixers.per_sequence import Packing, join_groups, map_token_tensors

# The argument by which a mixer gets the cache.
_ARGUMENTS = ("cache_params", "past_key_values")


def keeps_states(mixer: nn.Module) -> bool:
    """Whether the mixer reads and writes its state by the methods below, so that generation can keep it."""
    forward: Any = inspect.unwrap(type(mixer).forward)
    names = {*forward.__code__.co_names}
    reads = {"get_conv_state", "get_recurrent_state", "get_linear_cache"}
    return bool(names & reads) and _argument(forward) is not None


def _argument(forward: Callable[..., Any]) -> str | None:
    known = inspect.signature(forward).parameters
    return next((name for name in _ARGUMENTS if name in known), None)


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
    original: Any = inspect.unwrap(type(mixer).forward)
    argument = _argument(original)
    assert argument is not None
    bound = inspect.signature(original).bind(mixer, *args, **kwargs)
    bound.arguments[argument] = states
    return forward(*bound.args[1:], **bound.kwargs)


def _tokens_first(out: Any) -> Any:
    """(S, 1, ...) -> (1, S, ...), in tuples entry by entry."""
    if isinstance(out, tuple | list):
        return type(out)(_tokens_first(value) for value in out)
    is_output = isinstance(out, Tensor) and out.ndim >= 3 and out.shape[1] == 1
    return out.transpose(0, 1) if is_output else None


# Which modules of a decoder carry a state from token to token.

# A mixer keeps its state between two calls of generation in one of these ways: methods of transformers' cache (most
# mixers; MiniMax has a cache of its own), an attribute of the layer (RecurrentGemma), or an argument (RWKV, xLSTM).
_CACHE_METHODS = {
    "get_conv_state",
    "update_conv_state",
    "get_recurrent_state",
    "update_recurrent_state",
    "get_linear_cache",
}
_STATE_ATTRIBUTES = {"conv1d_state"}
_STATE_ARGUMENT = "state"

# Attributes whose product is the size of the recurrent state: gated delta nets, Mamba 2, Mamba 1, and linear attention
# with square heads (Kimi, MiniMax). A mixer without any of them has a short convolution, or one number per channel.
_STATE_SIZES = (
    ("num_v_heads", "head_k_dim", "head_v_dim"),
    ("num_heads", "head_dim", "ssm_state_size"),
    ("intermediate_size", "ssm_state_size"),
    ("num_heads", "head_dim", "head_dim"),
    ("num_attention_heads", "head_dim", "head_dim"),
)


def mixers_of(decoder: nn.Module) -> dict[str, nn.Module]:
    """The mixers below `decoder` by name, outermost ones only."""
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            if is_mixer(child):
                found[prefix + name] = child
            else:
                walk(child, f"{prefix}{name}.")

    walk(decoder, "")
    return found


def is_mixer(module: nn.Module) -> bool:
    forward: Any = inspect.unwrap(type(module).forward)
    code: CodeType | None = getattr(forward, "__code__", None)
    if code is None:
        return False
    if _STATE_ARGUMENT in code.co_varnames[: code.co_argcount]:
        return True
    return not {*_CACHE_METHODS, *_STATE_ATTRIBUTES}.isdisjoint(code.co_names)


def state_flops(mixer: nn.Module) -> float:
    """Forward FLOPs per token of writing the recurrent state and reading it; with a delta rule it is read twice."""
    forward: Any = inspect.unwrap(type(mixer).forward)
    names = forward.__code__.co_names
    has_delta_rule = any("delta" in name for name in names)
    has_matrix = has_delta_rule or "get_linear_cache" in names
    for attributes in _STATE_SIZES:
        sizes: list[Any] = [getattr(mixer, name, None) for name in attributes]
        is_square = attributes[-1] == "head_dim"
        if all(isinstance(size, int) for size in sizes) and (has_matrix or not is_square):
            return 2.0 * (3 if has_delta_rule else 2) * math.prod(sizes)
    return 0.0
