"""Sizes that differ between packs, marked for torch.compile: then the first graph of a block is one for all packs.

torch compiles a first graph for the sizes that it sees, and a second one where they change. With `dynamic=True` it
assumes that every size may change, hidden sizes too: that takes longer, and compiles more graphs of image-text models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

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
