"""Forward hooks on the inputs of a model's text layers: bf16 embeddings, and slices for sequence parallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.distributed.ulysses import UlyssesShard
from mvp_engine.errors import UserError
from mvp_engine.ops.autocast import autocast_dtype

# Inputs of a decoder with one entry per token, and the dimension of the tokens.
_TOKEN_DIMS = {
    "inputs_embeds": 1,
    "position_ids": -1,
    "per_layer_inputs": 1,
    "moe_mm_token_type_ids": 1,  # which experts a token uses (ERNIE-VL)
}


def cast_embeddings(module: nn.Module, args: Any, embeds: Tensor) -> Tensor | None:
    """Forward hook of the embedding layer: see `embedding_dtype`."""
    dtype = embedding_dtype(embeds)
    return None if dtype == embeds.dtype else embeds.to(dtype)


def embedding_dtype(embeds: Tensor) -> torch.dtype:
    """bf16 under bf16 autocast. That leaves embeddings in float32, and with them the residual stream: twice the memory.

    Under float16 they stay float32, since the residual stream could overflow.
    """
    return torch.bfloat16 if autocast_dtype(embeds) == torch.bfloat16 else embeds.dtype


def keep_graph(module: nn.Module, args: Any, embeds: Tensor) -> Tensor | None:
    """Forward hook of the embedding layer where only encoders train: a batch without media has a backward, too.

    It gives no gradients, but ranks run the same collectives in it.
    """
    if embeds.requires_grad or not torch.is_grad_enabled():
        return None
    return embeds.requires_grad_().clone()  # a copy: models may write features into it


def cast_decoder_inputs(
    decoder: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook of a decoder with encoders: the same cast, after features are inserted."""
    embeds = kwargs.get("inputs_embeds")
    cast = None if embeds is None else cast_embeddings(decoder, args, embeds)
    return None if cast is None else (args, {**kwargs, "inputs_embeds": cast})


def slice_decoder_inputs(
    decoder: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook of a decoder with encoders: this rank's slice of the tokens (Ulysses, context parallel).

    Each rank has the features of all media. Each computes a part of the encoders' gradient, and
    the reduction over ranks adds up the parts.
    """
    shard: UlyssesShard | None = kwargs.get("ulysses_shard")
    if shard is None:
        return None
    sliced = dict(kwargs)
    keys = "parallel.ulysses" if shard.context is None else "parallel.context"
    for name, value in kwargs.items():
        if value is None:
            continue
        if name == "deepstack_visual_embeds":  # a list with one tensor per layer
            sliced[name] = [shard.cut(layer) for layer in value]
        elif name in _TOKEN_DIMS:
            sliced[name] = shard.cut(value, _TOKEN_DIMS[name])
        elif _may_be_per_token(name, value, num_tokens=sum(shard.sizes)):
            raise UserError(
                f"{keys} > 1: {type(decoder).__name__} gets {name}, which may have one "
                f"entry per token; it is not known how to slice it. Set {keys}=1."
            )
    return args, sliced


def _may_be_per_token(name: str, value: Any, num_tokens: int) -> bool:
    if not isinstance(value, Tensor) or name.startswith("cu_seq_lens"):
        return False
    return num_tokens in value.shape
