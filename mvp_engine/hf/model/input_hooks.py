"""Forward hooks on the inputs of a model's text layers: bf16 embeddings, and slices for sequence parallel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.distributed.data_parallel import blocks
from mvp_engine.distributed.sequence_parallel import UlyssesShard
from mvp_engine.errors import UserError
from mvp_engine.ops.precision import autocast_dtype

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
    dtype = None if embeds is None else embedding_dtype(embeds)
    if embeds is None or dtype == embeds.dtype:
        return None
    return args, {**kwargs, "inputs_embeds": embeds.to(dtype)}


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


# Sizes that differ between packs, marked for torch.compile: then the first graph of a block is one for all packs.
#
# torch compiles a first graph for the sizes that it sees, and a second one where they change. With `dynamic=True` it
# assumes that every size may change, hidden sizes too: that takes longer, and compiles more graphs of image-text
# models.

# Integers are marked by the names of their arguments: the longest sequence, of queries and of keys.
_LONGEST = r".*\['max_(length|seqlen)\w*'\]"
_MARKED = "_dynamo_weak_dynamic_indices"  # of torch, on a tensor


def mark_sizes(block: nn.Module) -> None:
    """Let a compiled block mark the sizes of its inputs before each call: tokens, sequences, longest sequence."""
    from torch._dynamo import maybe_mark_dynamic
    from torch.compiler import config

    if _LONGEST not in config.dynamic_sources.split(","):
        config.dynamic_sources = ",".join(filter(None, [config.dynamic_sources, _LONGEST]))
    compiled: Callable[..., Any] = block._compiled_call_impl  # type: ignore[assignment]

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = list(_tensors((*args, *kwargs.values())))
        tokens = tensors[0].shape[-2] if tensors and tensors[0].ndim > 1 else None
        for tensor in tensors:
            if hasattr(tensor, _MARKED):  # all blocks of a forward share it
                continue
            if tensor.ndim == 1:  # boundaries of sequences
                maybe_mark_dynamic(tensor, 0)
            elif tokens in tensor.shape:
                # One dimension alone: a pack may have as many tokens as there are features, which come last.
                before = tensor.shape[-2] == tokens
                maybe_mark_dynamic(
                    tensor, tensor.ndim - 2 if before else tensor.shape.index(tokens)
                )
        return compiled(*args, **kwargs)

    block._compiled_call_impl = call


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors among arguments; rotary embeddings come as a pair."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


# BlockContext: a value that belongs to one forward of a model, and that reaches its blocks as a keyword argument.
#
# So the value is among the inputs that activation checkpointing saves, and the forward that it repeats in backward sees
# the one of its own micro-batch. Keyword arguments of transformers' forward would not do: some models drop them.


class BlockContext:
    """`current` is the value of the forward that runs; None: none does."""

    def __init__(self, key: str) -> None:
        """`key`: of the keyword argument."""
        self.current: Any = None
        self._key = key

    def add_to_blocks(self, model: nn.Module, inside: set[nn.Module]) -> None:
        """Pass the value to the blocks that hold one of these modules."""
        for block in blocks(model):
            if not inside.isdisjoint(block.modules()):
                block.register_forward_pre_hook(self._pass_current, with_kwargs=True)
                block.forward = functools.partial(self._run_block, block.forward)

    @contextmanager
    def running(self, value: Any) -> Iterator[None]:
        """While a forward with this value runs."""
        before = self.current
        self.current = value
        try:
            yield
        finally:
            self.current = before

    def _pass_current(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return args, {**kwargs, self._key: self.current}

    def _run_block(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self.current
        self.current = kwargs.pop(self._key, None)
        try:
            return forward(*args, **kwargs)
        finally:
            self.current = before
