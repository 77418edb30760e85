"""PackedMixers: the mixers of one model, changed to restart at sequence boundaries.

How the boundaries reach a mixer: `PackedModel.hidden` calls `packing(...)`. A hook adds the boundaries to the keyword
arguments of every block with mixers, and the block's forward takes them out again. So they are among the inputs that
activation checkpointing saves, and the forward that it repeats in backward sees those of its own batch. Keyword
arguments of transformers' forward would not do: some models do not pass them to their mixers.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.fsdp import blocks
from mvp_engine.distributed.ulysses import UlyssesShard
from mvp_engine.hf.kv_cache import KVCache
from mvp_engine.hf.mixers.by_sequence import (
    cut_tokens,
    gather_tokens,
    run_by_sequence,
    without_pack_arguments,
)
from mvp_engine.hf.mixers.detect import mixers_of
from mvp_engine.hf.mixers.functions import REPLACEMENTS, operations_of
from mvp_engine.hf.mixers.namespace import forward_with
from mvp_engine.hf.mixers.packing import Packing

_KEY = "mixer_packing"  # keyword argument of blocks


class PackedMixers:
    """What the mixers of a model share: the boundaries of the forward that runs. None: no packed forward runs."""

    def __init__(self, decoder: nn.Module, others: Iterable[nn.Module] = ()) -> None:
        """`others`: modules that read `current`, too."""
        self.current: Packing | None = None
        self.modules = mixers_of(decoder)
        inside = {part for module in (*self.modules.values(), *others) for part in module.modules()}
        self.is_used = bool(inside)
        self._forwards = _Forwards(self)
        self.operations: set[str] = set()  # what the mixers compute by kernels, where installed
        for mixer in self.modules.values():
            operations = operations_of(mixer)
            if operations is None:
                mixer.forward = functools.partial(self._run_by_sequence, mixer.forward)
            else:
                self.operations |= {*operations}
                self._forwards.add(type(mixer))
                on_pack = functools.partial(self._forwards.run, type(mixer), mixer)
                mixer.forward = functools.partial(self._run, on_pack)
        for block in blocks(decoder):
            if not inside.isdisjoint(block.modules()):
                block.register_forward_pre_hook(self._pass_packing, with_kwargs=True)
                block.forward = functools.partial(self._run_block, block.forward)

    @contextmanager
    def packing(
        self, batch: PackedBatch, shard: UlyssesShard | None, cache: KVCache | None
    ) -> Iterator[None]:
        """While a packed batch runs."""
        if not self.is_used:
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
    def _run_by_sequence(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._run(functools.partial(run_by_sequence, forward), *args, **kwargs)

    def _run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`run` a mixer on a pack; with sequence parallel on all tokens, for those of this rank."""
        packing = self.current
        if packing is None:
            return run(None, args, kwargs)
        args, kwargs = without_pack_arguments(args, kwargs)
        shard = packing.shard
        if shard is None:
            return run(packing, args, kwargs)
        args, kwargs = gather_tokens(args, kwargs, shard)
        return cut_tokens(run(packing, args, kwargs), shard)


class _Forwards:
    """By class of mixers, a forward in which every function over tokens has the boundaries of the current pack."""

    def __init__(self, mixers: PackedMixers) -> None:
        self.mixers = mixers
        self._forwards: dict[type, Callable[..., Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forwards:
        # Functions are not copied: those of a copy would see the boundaries of the first model.
        new = _Forwards(copy.deepcopy(self.mixers, memo))
        for mixer_class in self._forwards:
            new.add(mixer_class)
        return new

    def add(self, mixer_class: type) -> None:
        known = inspect.unwrap(mixer_class.forward).__globals__  # type: ignore[attr-defined]
        replaced = {}
        for name, (_, function) in REPLACEMENTS.items():
            if name in known:
                calls = (function, known[name], inspect.unwrap(known[name]))
                replaced[name] = functools.partial(self._call, *calls)
        self._forwards[mixer_class] = forward_with(mixer_class, replaced)

    def run(
        self,
        mixer_class: type,
        mixer: nn.Module,
        packing: Packing | None,
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        return self._forwards[mixer_class](mixer, *args, **kwargs)

    def _call(
        self,
        function: Callable[..., Any],
        original: Callable[..., Any],
        torch_function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        packing = self.mixers.current
        if packing is not None:
            return function(packing, torch_function, *args, **kwargs)
        # Where kernels are installed, transformers calls them for tensors on a CPU, too.
        return (original if args[0].is_cuda else torch_function)(*args, **kwargs)
