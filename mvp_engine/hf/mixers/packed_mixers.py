"""PackedMixers: the mixers of one model, changed to restart at sequence boundaries.

How the boundaries reach a mixer: `PackedModel.hidden` calls `packing(...)`, and `BlockContext` passes them to every
block with mixers, also to the forward that activation checkpointing repeats in backward.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.sequence_parallel import UlyssesShard
from mvp_engine.hf.mixers import kernels
from mvp_engine.hf.mixers.kinds import kind_of, mixers_of
from mvp_engine.hf.mixers.per_sequence import (
    Packing,
    cut_tokens,
    gather_tokens,
    run_by_sequence,
    run_with_states,
    without_pack_arguments,
)
from mvp_engine.hf.model.input_hooks import BlockContext
from mvp_engine.hf.model.kv_cache import KVCache

LOGGER = logging.getLogger("mvp_engine")


class PackedMixers(BlockContext):
    """What the mixers of a model share: the boundaries of the forward that runs. None: no packed forward runs."""

    current: Packing | None

    def __init__(self, decoder: nn.Module, implementation: str) -> None:
        """`implementation`: of attention in layers with an indexer, which run by sequence, too."""
        super().__init__("mixer_packing")
        self.modules = mixers_of(decoder)
        sparse = sparse_attention_of(decoder)
        inside = {part for module in (*self.modules.values(), *sparse) for part in module.modules()}
        self.is_used = bool(inside)
        self._forwards = _Forwards(self)
        self.operations: set[str] = set()  # what the mixers compute by kernels, where installed
        self.by_sequence: set[str] = set()  # classes of mixers without such kernels
        self.can_cache = not sparse  # generation can keep the states of all mixers
        for mixer in self.modules.values():
            kind = kind_of(type(mixer))
            assert kind is not None
            self.can_cache = self.can_cache and kind.cache_argument is not None
            self._forwards.add(type(mixer))
            forward = functools.partial(self._forwards.run, type(mixer), mixer)
            if not kind.operations:
                self.by_sequence.add(type(mixer).__name__)
                mixer.forward = functools.partial(self._run_by_sequence, mixer, forward)
            else:
                self.operations |= {*kind.operations}
                mixer.forward = functools.partial(self._run, mixer, forward, forward)
        run_sparse_attention_by_sequence(sparse, self, implementation)
        self.add_to_blocks(decoder, inside)

    def log_kernels(self, device: torch.device) -> None:
        """Say what computes the mixers: at start, since the difference in speed is large."""
        if not self.modules:
            return
        parts = [f"{name} by {kernels.describe(name, device)}" for name in sorted(self.operations)]
        parts += [
            f"{name} by torch, one batch per sequence length" for name in sorted(self.by_sequence)
        ]
        is_slow = device.type == "cuda" and any(
            kernels.load(name) is None for name in self.operations
        )
        LOGGER.log(logging.WARNING if is_slow else logging.INFO, "mixers: %s", "; ".join(parts))

    @contextmanager
    def packing(
        self, batch: PackedBatch, shard: UlyssesShard | None, cache: KVCache | None
    ) -> Iterator[None]:
        """While a packed batch runs."""
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
        replaced = kernels.replacements(mixer_class, self._call)
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


# Sparse attention with an indexer (DeepSeek-V3.2 and V4, GLM-5, MiniMax-M3, Qwen4) on packed sequences.
#
# An indexer scores all tokens before a query and keeps the best few; some layers also compress windows of tokens into
# one entry. On a pack both would pick tokens of other sequences, and their score matrix would grow with the square of
# the pack. So these attention layers run by sequence, like mixers without a kernel (`per_sequence.py`), with
# transformers' own attention and a causal mask for each group of sequences. Everything else in the model stays packed.

_PARTS = {"indexer", "compressor"}  # names of submodules that only sparse attention has


def sparse_attention_of(decoder: nn.Module) -> list[nn.Module]:
    """The sparse attention layers of a decoder, with those that reuse the choice of an earlier layer."""
    classes = {
        type(module)
        for module in decoder.modules()
        if any(name in _PARTS for name, _ in module.named_children())
    }
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if type(child) in classes:
                found.append(child)
            else:
                walk(child)

    walk(decoder)
    return found


def run_sparse_attention_by_sequence(
    layers: list[nn.Module], mixers: PackedMixers, implementation: str
) -> None:
    """Change the forward of these layers. `mixers` knows the boundaries of the forward that runs."""
    for layer in layers:
        changed: Any = layer
        changed.config = copy.copy(changed.config)
        changed.config._attn_implementation = implementation
        changed.forward = functools.partial(_run_attention, mixers, layer, layer.forward)


@torch.compiler.disable
def _run_attention(
    mixers: PackedMixers, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    packing = mixers.current
    if packing is None:
        return forward(*args, **kwargs)
    args, kwargs = without_pack_arguments(args, kwargs)
    causal = functools.partial(_causal_forward, layer, forward)
    if packing.shard is None:
        return run_by_sequence(causal, packing, args, kwargs)
    args, kwargs = gather_tokens(args, kwargs, packing.shard)
    return cut_tokens(run_by_sequence(causal, packing, args, kwargs), packing.shard)


def _causal_forward(
    layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The layer's own forward, with a causal mask of the batch that it gets."""
    call = inspect.signature(forward).bind(*args, **kwargs)
    hidden: Tensor = call.arguments["hidden_states"]
    call.arguments["attention_mask"] = _causal_mask(hidden, getattr(layer, "sliding_window", None))
    return forward(*call.args, **call.kwargs)


def _causal_mask(hidden_SLD: Tensor, window: int | None) -> Tensor:
    """(S, 1, L, L): 0, or the lowest number of the dtype where a query must not see a key."""
    rows, tokens = hidden_SLD.shape[:2]
    steps_L = torch.arange(tokens, device=hidden_SLD.device)
    distance_LL = steps_L[:, None] - steps_L[None]
    hidden_LL = distance_LL < 0
    if window is not None:
        hidden_LL = hidden_LL | (distance_LL >= window)
    mask_LL = torch.zeros(tokens, tokens, dtype=hidden_SLD.dtype, device=hidden_SLD.device)
    mask_LL.masked_fill_(hidden_LL, torch.finfo(hidden_SLD.dtype).min)
    return mask_LL.expand(rows, 1, tokens, tokens)
