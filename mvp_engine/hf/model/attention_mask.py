"""Masks of transformers models as values that packed attention can apply: windows and block-wise overlays.

transformers builds a mask function out of a few known parts. `packed_mask`, its mask interface, recognizes the parts by
name and returns an `Overlay`, a `Window` or None instead of an (L, L) tensor; an unknown part raises
`UnsupportedAttention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from mvp_engine.errors import UserError
from mvp_engine.ops.attn_spec import MaskFunction

# Keyword arguments about the pack, which text layers get.
PACK_ARGUMENTS = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "ulysses_shard",
    "kv_cache",
)

NAME = "mvp_packed"  # of packed attention in transformers' attention and mask interfaces
PACKED = {NAME}  # with the names of other attention functions that take these masks

# Mask parts that packed attention applies anyway: causality, window, sequence boundaries.
_PLAIN = {"causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function"}
_BLOCKS = "blockwise_overlay"  # looked up by token index


class UnsupportedAttention(UserError, NotImplementedError):
    """A model uses an attention option that packed attention does not support."""


@dataclass(frozen=True)
class Overlay:
    """A mask that is more than causal, such as images with bidirectional attention between their tokens.

    It has the shape of a mask tensor, since some models pass it to transformers' mask functions a second time.
    """

    mask_function: MaskFunction
    shape: tuple[int, int, int, int]
    ndim: int = 4


@dataclass(frozen=True)
class Window:
    """A causal sliding window mask. Most layers also pass the window size to attention; some rely on the mask."""

    size: int


@dataclass(frozen=True)
class Chunks:
    """A causal mask in which a token sees its own chunk of the sequence only, such as in Llama 4."""

    size: int


@dataclass(frozen=True)
class NoMask:
    """A placeholder for the mask of a decoder, with the shape of one.

    Without any mask, transformers would search the positions for sequence boundaries, which costs a host sync.
    """

    shape: tuple[int, int, int, int]
    ndim: int = 4


def without_mask(
    decoder: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """A forward pre-hook that passes `NoMask` to decoders, and to models that build the masks of their decoder."""
    inputs = kwargs.get("inputs_embeds")
    if inputs is None:
        inputs = kwargs.get("input_ids")
    is_packed = decoder.config._attn_implementation in PACKED  # type: ignore[union-attr, operator]
    if not is_packed or inputs is None or kwargs.get("attention_mask") is not None:
        return None
    tokens = inputs.shape[1]
    mask: Any = NoMask((1, 1, tokens, tokens))
    chunk = getattr(decoder.config, "attention_chunk_size", None)
    if chunk is not None:  # by kind of layer: transformers looks for padding before it makes chunks
        mask = {"full_attention": mask, "chunked_attention": Chunks(chunk)}
    return args, {**kwargs, "attention_mask": mask}


def packed_mask(
    *, mask_function: Callable[..., Any], attention_mask: Any, kv_length: int, config: Any, **_: Any
) -> Overlay | Window | None:
    """The part of a model's mask that attention does not apply anyway, with transformers' mask signature."""
    if isinstance(attention_mask, Overlay):
        return attention_mask
    parts = dict(_mask_parts(mask_function))
    # PaliGemma's layers leave causality to the mask.
    relies_on_mask = getattr(config, "use_bidirectional_attention", None) is True
    if parts.keys() <= _PLAIN and not relies_on_mask:
        window = parts.get("sliding_window_overlay")
        if window is None:
            return None
        return Window(inspect.getclosurevars(window).nonlocals["sliding_window"])
    unknown = parts.keys() - {*_PLAIN, _BLOCKS}
    if unknown:
        raise UnsupportedAttention(
            f"the mask of {config.model_type} contains {', '.join(sorted(unknown))}, which packed attention does not "
            "support"
        )
    return Overlay(mask_function, (1, 1, kv_length, kv_length))


def _mask_parts(function: Callable[..., Any]) -> list[tuple[str, Callable[..., Any]]]:
    """The functions that transformers combined into this one, each with the name of the factory that made it."""
    factory = getattr(function, "__qualname__", repr(function)).split(".")[0]
    if factory not in ("and_masks", "or_masks"):
        return [(factory, function)]
    parts = []
    for part in inspect.getclosurevars(function).nonlocals["mask_functions"]:
        parts += _mask_parts(part)
    return parts
