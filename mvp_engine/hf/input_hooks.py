"""What happens to the inputs of a Hugging Face model's text layers on their way in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.distributed.ulysses import UlyssesShard
from mvp_engine.errors import UserError
from mvp_engine.ops.autocast import autocast_dtype


def low(module: nn.Module, args: Any, embedded_TD: Tensor) -> Tensor | None:
    """Autocast leaves embeddings in float32, and all that is added to them: twice the memory of bf16, which is what
    sharded ranks have. float16 could overflow there."""
    return embedded_TD.bfloat16() if autocast_dtype(embedded_TD) == torch.bfloat16 else None


def low_inputs(
    decoder: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    embedded = kwargs.get("inputs_embeds")
    lower = None if embedded is None else low(decoder, args, embedded)
    return None if lower is None else (args, {**kwargs, "inputs_embeds": lower})


def cut_inputs(
    decoder: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """This rank's part of what a decoder is given. Each rank ran the encoders on everything; a part of their gradient
    comes back on each, and the sum over ranks is the whole."""
    shard: UlyssesShard | None = kwargs.get("ulysses_shard")
    if shard is None:
        return None
    given = {name: value for name, value in kwargs.items() if value is not None}
    if (layers := given.pop("deepstack_visual_embeds", None)) is not None:
        kwargs = {**kwargs, "deepstack_visual_embeds": [shard.cut(layer) for layer in layers]}
    for name, value in given.items():
        if name in _BY_TOKEN:
            kwargs = {**kwargs, name: shard.cut(value, _BY_TOKEN[name])}
        elif (
            isinstance(value, Tensor)
            and sum(shard.sizes) in value.shape
            and not name.startswith("cu_seq_lens")
        ):
            who = type(decoder).__name__
            raise UserError(
                f"parallel.ulysses > 1: {who} is given {name}, and it is not known how to share that"
            )
    return args, kwargs


# The inputs of a decoder with a row for each token, and the dimension of the rows.
_BY_TOKEN = {"inputs_embeds": 1, "position_ids": -1, "per_layer_inputs": 1}
