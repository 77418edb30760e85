"""BlockContext: a value that belongs to one forward of a model, and that reaches its blocks as a keyword argument.

So the value is among the inputs that activation checkpointing saves, and the forward that it repeats in backward sees
the one of its own micro-batch. Keyword arguments of transformers' forward would not do: some models drop them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from mvp_engine.distributed.data_parallel import blocks


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
