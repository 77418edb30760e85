"""The attention of one context rank: its chunks of queries as sequences, and the keys that they attend to."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from mvp_engine.distributed.context import ContextShard
from mvp_engine.distributed.key_exchange import KeyExchange, Keys
from mvp_engine.ops.attention import AttnSpec, KeySpec


def context_spec(spec: AttnSpec, shard: ContextShard) -> tuple[AttnSpec, KeyExchange]:
    """The spec of the whole batch as that of this rank's queries, and the exchange of the keys that they need.

    Each chunk of queries becomes a sequence. In causal attention its keys end where it ends; otherwise they are its
    whole sequence, and a mask function counts from the tokens of the batch.
    """
    if spec.causal and spec.mask_function is None:
        exchange = shard.keys(spec.window)
        # Whole sequences are an ordinary pack: cuDNN's backward takes half the time without a bottom-right mask.
        keys = None if exchange.is_own else exchange.keys
        return _with_keys(spec, shard, keys), exchange
    exchange = _all_keys(shard)
    if spec.mask_function is None and spec.window is not None:
        # Of the same window for all layers one object: block masks are cached by it.
        function = shard.__dict__.setdefault(f"window_{spec.window}", partial(_near, spec.window))
        spec = dataclasses.replace(spec, mask_function=function)
    return _with_keys(spec, shard, exchange.keys), exchange


def _with_keys(spec: AttnSpec, shard: ContextShard, keys: Keys | None) -> AttnSpec:
    by_tokens = (
        None
        if keys is None
        else KeySpec(keys.cu_seqlens, keys.max_seqlen, shard.queries, keys.tokens)
    )
    return dataclasses.replace(
        spec, cu_seqlens=shard.cu_queries, max_seqlen=shard.max_queries, keys=by_tokens
    )


@torch.compiler.disable
def _all_keys(shard: ContextShard) -> KeyExchange:
    return shard.all_keys


def _near(window: int, _batch: int, _head: int, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv).abs() < window
