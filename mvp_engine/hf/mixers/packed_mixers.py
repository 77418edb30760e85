"""PackedMixers: the mixers of one model, changed to restart at sequence boundaries.

How the boundaries reach a mixer: `PackedModel.hidden` calls `packing(...)`. A hook adds the boundaries to the keyword
arguments of every block with mixers, and the block's forward takes them out again. So they are among the inputs that
activation checkpointing saves, and the forward that it repeats in backward sees those of its own batch. Keyword
arguments of transformers' forward would not do: some models do not pass them to their mixers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.fsdp import blocks
from mvp_engine.distributed.ulysses import UlyssesShard
from mvp_engine.hf.kv_cache import KVCache
from mvp_engine.hf.mixers.by_sequence import run_packed
from mvp_engine.hf.mixers.detect import mixers_of
from mvp_engine.hf.mixers.packing import Packing

_KEY = "mixer_packing"  # keyword argument of blocks


class PackedMixers:
    """What the mixers of a model share: the boundaries of the forward that runs. None: no packed forward runs."""

    def __init__(self, decoder: nn.Module) -> None:
        self.current: Packing | None = None
        self.modules = mixers_of(decoder)
        inside = {part for mixer in self.modules.values() for part in mixer.modules()}
        for mixer in self.modules.values():
            mixer.forward = functools.partial(self._run_mixer, mixer, mixer.forward)
        for block in blocks(decoder):
            if not inside.isdisjoint(block.modules()):
                block.register_forward_pre_hook(self._pass_packing, with_kwargs=True)
                block.forward = functools.partial(self._run_block, block.forward)

    @contextmanager
    def packing(
        self, batch: PackedBatch, shard: UlyssesShard | None, cache: KVCache | None
    ) -> Iterator[None]:
        """While a packed batch runs."""
        if not self.modules:
            yield
            return
        self.current = Packing.of(batch, shard, cache)
        try:
            yield
        finally:
            self.current = None

    def _pass_packing(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return args, {**kwargs, _KEY: self.current}

    def _run_block(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        packing = kwargs.pop(_KEY, None)
        before = self.current
        self.current = packing
        try:
            return forward(*args, **kwargs)
        finally:
            self.current = before

    @torch.compiler.disable
    def _run_mixer(
        self, mixer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self.current is None:
            return forward(*args, **kwargs)
        return run_packed(mixer, forward, self.current, args, kwargs)
