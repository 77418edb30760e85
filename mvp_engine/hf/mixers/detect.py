"""Which modules of a decoder carry a state from token to token."""

from __future__ import annotations

import inspect
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
