"""Kinds of mixers: what a class of mixers packs, and how it caches.

A model is not looked up in a list. transformers writes every mixer of a kind with the same functions, and reads its
state in generation by the same methods: `kind_of` looks for these names, and everything else asks the kind.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

from torch import nn

from mvp_engine.hf.model.attention import names_in_forward

# Functions over tokens in the files of transformers' models, and what they compute: `kernels.py` has one with sequence
# boundaries for each of them.
OPERATIONS = {
    "causal_conv1d_fn": "short convolution",
    "torch_chunk_gated_delta_rule": "gated delta rule",
    "chunk_kimi_delta_attention": "Kimi delta attention",
    "mamba2_chunk_scan": "Mamba 2 scan",
}
# Functions over tokens without a variable-length kernel: mixers that call them run by sequence as a whole.
_BY_SEQUENCE = {"mamba_selective_scan"}

# A mixer keeps its state between two calls of generation in one of these ways: methods of transformers' cache (most
# mixers; MiniMax has a cache of its own), an attribute of the layer (RecurrentGemma), or an argument (RWKV, xLSTM).
_READS = {"get_conv_state", "get_recurrent_state", "get_linear_cache"}
_WRITES = {"update_conv_state", "update_recurrent_state"}
_STATE_ATTRIBUTES = {"conv1d_state"}
_STATE_ARGUMENT = "state"
_CACHE_ARGUMENTS = ("cache_params", "past_key_values")

# Attributes whose product is the size of the recurrent state: gated delta nets, Mamba 2, Mamba 1, and linear attention
# with square heads (Kimi, MiniMax). A mixer without any of them has a short convolution, or one number per channel.
_STATE_SIZES = (
    ("num_v_heads", "head_k_dim", "head_v_dim"),
    ("num_heads", "head_dim", "ssm_state_size"),
    ("intermediate_size", "ssm_state_size"),
    ("num_heads", "head_dim", "head_dim"),
    ("num_attention_heads", "head_dim", "head_dim"),
)


class Kind(NamedTuple):
    """What a class of mixers packs, and how it caches."""

    operations: tuple[str, ...]  # which take boundaries; none: it runs by sequence as a whole
    cache_argument: str | None  # gets its states in generation; None: generation cannot keep them
    has_delta_rule: bool  # reads its state twice per token
    has_matrix: bool  # its state is a matrix for each head


def kind_of(mixer_class: type) -> Kind | None:
    """The kind of a class of layers; None if it carries no state from token to token."""
    forward: Any = inspect.unwrap(mixer_class.forward)  # type: ignore[attr-defined]
    names = names_in_forward(mixer_class)
    if not hasattr(forward, "__code__"):
        return None
    positional = forward.__code__.co_varnames[: forward.__code__.co_argcount]
    if not names & {*_READS, *_WRITES, *_STATE_ATTRIBUTES} and _STATE_ARGUMENT not in positional:
        return None
    arguments = inspect.signature(forward).parameters
    used = [name for name in OPERATIONS if name in names and name in forward.__globals__]
    operations = () if names & _BY_SEQUENCE else tuple(OPERATIONS[name] for name in used)
    cache = next((name for name in _CACHE_ARGUMENTS if name in arguments), None)
    has_delta_rule = any("delta" in name for name in names)
    has_matrix = has_delta_rule or "get_linear_cache" in names
    return Kind(operations, cache if names & _READS else None, has_delta_rule, has_matrix)


def mixers_of(decoder: nn.Module) -> dict[str, nn.Module]:
    """The mixers below `decoder` by name, outermost ones only."""
    mixers: dict[str, nn.Module] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            if kind_of(type(child)) is not None:
                mixers[prefix + name] = child
            else:
                walk(child, f"{prefix}{name}.")

    walk(decoder, "")
    return mixers


def state_flops(mixer: nn.Module) -> float:
    """Forward FLOPs per token of writing the recurrent state and reading it; with a delta rule it is read twice."""
    kind = kind_of(type(mixer))
    assert kind is not None
    for attributes in _STATE_SIZES:
        sizes: list[Any] = [getattr(mixer, name, None) for name in attributes]
        is_square = attributes[-1] == "head_dim"
        if all(isinstance(size, int) for size in sizes) and (kind.has_matrix or not is_square):
            return 2.0 * (3 if kind.has_delta_rule else 2) * math.prod(sizes)
    return 0.0
