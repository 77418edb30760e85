"""Which modules of a decoder carry a state from token to token."""

from __future__ import annotations

import inspect
import math
from types import CodeType
from typing import Any

from torch import nn

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
