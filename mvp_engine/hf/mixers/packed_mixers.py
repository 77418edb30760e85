"""PackedMixers: the mixers of one model, changed to restart at sequence boundaries.

How the boundaries reach a mixer: `PackedModel.hidden` calls `packing(...)`, and `BlockContext` passes them to every
block with mixers, also to the forward that activation checkpointing repeats in backward.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.sequence_parallel import UlyssesShard
from mvp_engine.hf.mixers import kernels
from mvp_engine.hf.mixers.functions import FUSED, REPLACEMENTS, has_kernel, not_fused, operations_of
from mvp_engine.hf.mixers.per_sequence import (
    Packing,
    cut_tokens,
    gather_tokens,
    run_by_sequence,
    without_pack_arguments,
)
from mvp_engine.hf.mixers.states import keeps_states, mixers_of, run_with_states
from mvp_engine.hf.model.input_hooks import BlockContext
from mvp_engine.hf.model.kv_cache import KVCache

LOGGER = logging.getLogger("mvp_engine")


class PackedMixers(BlockContext):
    """What the mixers of a model share: the boundaries of the forward that runs. None: no packed forward runs."""

    current: Packing | None

    def __init__(self, decoder: nn.Module, others: Iterable[nn.Module] = ()) -> None:
        """`others`: modules that read `current`, too."""
        super().__init__("mixer_packing")
        self.modules = mixers_of(decoder)
        inside = {part for module in (*self.modules.values(), *others) for part in module.modules()}
        self.is_used = bool(inside)
        self._has_others = any(True for _ in others)
        self._forwards = _Forwards(self)
        self.operations: set[str] = set()  # what the mixers compute by kernels, where installed
        for mixer in self.modules.values():
            operations = operations_of(mixer)
            self._forwards.add(type(mixer))
            forward = functools.partial(self._forwards.run, type(mixer), mixer)
            if operations is None:
                mixer.forward = functools.partial(self._run_by_sequence, mixer, forward)
            else:
                self.operations |= {*operations}
                mixer.forward = functools.partial(self._run, mixer, forward, forward)
        self.add_to_blocks(decoder, inside)

    @property
    def can_cache(self) -> bool:
        """Whether generation can keep the states of all mixers."""
        kept = all(keeps_states(mixer) for mixer in self.modules.values())
        return kept and not self._has_others

    def log_kernels(self, device: torch.device) -> None:
        """Say what computes the mixers: at start, since the difference in speed is large."""
        if not self.modules:
            return
        parts = [f"{name} by {kernels.describe(name, device)}" for name in sorted(self.operations)]
        rest = sorted({type(m).__name__ for m in self.modules.values() if operations_of(m) is None})
        parts += [f"{name} by torch, one batch per sequence length" for name in rest]
        is_slow = device.type == "cuda" and any(
            kernels.load(name) is None for name in self.operations
        )
        LOGGER.log(logging.WARNING if is_slow else logging.INFO, "mixers: %s", "; ".join(parts))

    @contextmanager
    def packing(
        self, batch: PackedBatch, shard: UlyssesShard | None, cache: KVCache | None
    ) -> Iterator[None]:
        """While a packed batch runs."""
        if not self.is_used:
            yield
            return
        with self.running(Packing.of(batch, shard, cache)):
            yield

    @torch.compiler.disable
    def _run_by_sequence(
        self, mixer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        def run(*inputs: Any, **options: Any) -> Any:
            packing = self.current
            with self.running(None):
                return run_by_sequence(forward, packing, inputs, options)

        return self._run(mixer, forward, run, *args, **kwargs)

    def _run(
        self,
        mixer: nn.Module,
        forward: Callable[..., Any],
        on_pack: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a mixer: as transformers does without boundaries, in generation with its states, else on the pack.

        With sequence parallel it runs on the tokens of all ranks, for the output tokens of this rank.
        """
        packing = self.current
        if packing is None:
            return forward(*args, **kwargs)
        args, kwargs = without_pack_arguments(args, kwargs)
        if packing.cache is not None:
            with self.running(None):
                return run_with_states(mixer, forward, packing, args, kwargs)
        shard = packing.shard
        if shard is None:
            return on_pack(*args, **kwargs)
        args, kwargs = gather_tokens(args, kwargs, shard)
        return cut_tokens(on_pack(*args, **kwargs), shard)


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
        forward: Any = inspect.unwrap(mixer_class.forward)  # type: ignore[attr-defined]
        replaced = {}
        for name in forward.__code__.co_names:
            original = forward.__globals__.get(name)
            _, function = REPLACEMENTS.get(name, (None, None))
            if name in FUSED:
                replaced[name] = not_fused
            elif function is not None or has_kernel(original):
                calls = (function, original, inspect.unwrap(original))
                replaced[name] = functools.partial(self._call, *calls)
        self._forwards[mixer_class] = forward_with(mixer_class, replaced)

    def run(self, mixer_class: type, mixer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._forwards[mixer_class](mixer, *args, **kwargs)

    def _call(
        self,
        function: Callable[..., Any] | None,
        original: Callable[..., Any],
        torch_function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        packing = self.mixers.current
        if packing is not None and function is not None:
            return function(packing, torch_function, *args, **kwargs)
        # Where kernels are installed, transformers calls them for tensors on a CPU, too.
        return (original if args[0].is_cuda else torch_function)(*args, **kwargs)


# A forward with other functions in its namespace: a copy of the function; its class and module stay unchanged.


def forward_with(module_class: type, replacements: Mapping[str, Any]) -> Callable[..., Any]:
    """The forward of a class, with other values for these global names."""
    function: Any = inspect.unwrap(module_class.forward)  # type: ignore[attr-defined]
    # With the name of the module, torch.compile would look the values up in the module.
    namespace = {**function.__globals__, **replacements}
    del namespace["__name__"]
    copy = FunctionType(
        function.__code__.replace(),  # torch.compile keeps what it compiled by code, not by function
        namespace,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    return copy
