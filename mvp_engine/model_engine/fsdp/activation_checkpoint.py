"""Activation checkpointing of blocks: full, or with kept outputs, of GEMMs and attention (selective) or of attention.

`offload` is full, and what a block saves goes to the host (`activation_offload.py`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from mvp_engine.errors import UserError
from mvp_engine.model_engine.fsdp.compile import compile_arguments

LOGGER = logging.getLogger("mvp_engine")

# Outputs of these operators are kept: they take longest to compute. Names with an underscore match any operator that
# contains them. All others are cheap, or make up most of the memory.
_ATTENTION = {
    "_scaled_dot_product",
    "_flash_attention",
    "_cudnn_attention",
    "_varlen_attn",
    "ragged_attention",
    "short_attention",
}
_GEMMS = {"mm", "addmm", "bmm", "_grouped_mm", "_scaled_mm", "nf4_matmul"}
# A GEMM with so many times more columns than rows (a LoRA adapter's second matrix) is cheap for the size of its output.
_MAX_ASPECT_RATIO = 8
_NUM_KEPT = [0]  # outputs, in all forwards


def _policy(kinds: set[str], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(getattr(getattr(op, "overloadpacket", op), "__name__", ""))
    kept = any(name == kind or (kind[0] == "_" and kind in name) for kind in kinds)
    if kept and name in ("mm", "addmm"):
        rows, columns = args[-1].shape
        kept = columns <= _MAX_ASPECT_RATIO * rows
    _NUM_KEPT[0] += kept
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_policy, _ATTENTION | _GEMMS))


def _attention_contexts() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_policy, _ATTENTION))


def _compiled_attention_contexts() -> Any:
    """No policy where a block runs uncompiled although it is to be compiled: see `checkpoint_block`."""
    if TracingContext.try_get() is None:
        return noop_context_fn()
    return _attention_contexts()


_CONTEXTS = {"selective": _selective_contexts, "attention": _attention_contexts}
# The identity of a policy in the compile cache: without it, each start traces the graphs again. It changes with this
# file.
_FILE_HASH = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
for _contexts in (_selective_contexts, _attention_contexts, _compiled_attention_contexts):
    _contexts.cache_hash = _contexts.__name__ + _FILE_HASH  # type: ignore[attr-defined]


def checkpoint_block(block: nn.Module, mode: str, backend: str | None) -> None:
    """Replace the forward of `block` by one that saves its inputs, and the outputs that `mode` keeps, for backward.

    A block that torch compiles with `backend` but that arrives here uncompiled has attention with a graph break: it
    loops over sequences on the host, or is FlexAttention, which is compiled separately. torch compiles around such
    attention, but not inside of a checkpointed function. So the function is compiled inside. Selective checkpointing
    cannot do that: a compiled function would hide the operators that the policy selects. `attention` can, because
    such attention is no operator, and nothing is kept.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if mode in _CONTEXTS:
        options["context_fn"] = _CONTEXTS[mode]
    if backend and mode == "attention":
        options["context_fn"] = _compiled_attention_contexts
    name = type(block).__name__
    forward = block.forward
    inner = forward
    if backend and mode != "selective":
        inner = torch.compile(forward, **compile_arguments(backend))

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        if mode in _CONTEXTS and backend:
            _warn_of_attention(name, mode)
        try:
            return inner(*args, **kwargs)
        except RuntimeError as error:
            if mode in _CONTEXTS and "has been mutated" in str(error):
                raise UserError(
                    f"model.activation_checkpointing={mode} keeps the outputs of some operators; "
                    f"{name} changes one of them in place. Set model.activation_checkpointing=full, or "
                    "change it out of place (nn.ReLU() for nn.ReLU(inplace=True), x = x + y for x += y)"
                ) from error
            raise

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(run, *args, **options, **kwargs)
        # torch saves positional arguments only; a closure would hold the others, where `offload` does not see them.
        named = {key: value for key, value in kwargs.items() if _needs_grad(value)}
        others = {key: value for key, value in kwargs.items() if key not in named}
        names = tuple(named)
        split = len(args)

        def positional(*values: Any) -> Any:
            return run(*values[:split], **dict(zip(names, values[split:], strict=True)), **others)

        before = _NUM_KEPT[0]
        with disable_autocast_cache() if mode in _CONTEXTS else contextlib.nullcontext():
            result = checkpoint(positional, *args, *named.values(), **options)
        if mode == "attention" and not backend and _NUM_KEPT[0] == before:
            _warn_of_attention(name, mode)
        return result

    block.forward = checkpointed


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@contextlib.contextmanager
def disable_autocast_cache() -> Iterator[None]:
    """Make autocast cast weights in every use.

    A block that runs twice in a step (on images and on videos) would reuse the weights cast the first time. The second
    run in backward casts them itself, and a policy would see one operator too many.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


_ATTENTION_IS_NO_OPERATOR = {
    "selective": "%s runs uncompiled: its attention loops over sequences (in fp32) or is FlexAttention (for what other "
    "kernels lack), and torch does not compile around those with model.activation_checkpointing=selective. "
    "Set model.activation_checkpointing=full, or model.compile=null",
    "attention": "%s keeps nothing with model.activation_checkpointing=attention, as with full: its attention or mixer "
    "loops over sequences (attention in fp32) or is FlexAttention (for what other kernels lack). If all blocks do, set "
    "model.activation_checkpointing=full",
}


@functools.cache
def _warn_of_attention(name: str, mode: str) -> None:
    LOGGER.warning(_ATTENTION_IS_NO_OPERATOR[mode], name)
