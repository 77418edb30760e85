"""From a model to the same model on its layout: freeze, cut, recompute, compile, shard, and only then weights.

The order is FSDP2's: what changes a block's forward comes before the block is sharded. A model on the meta device gets
its weights last, each rank its own part, so that no rank ever holds the whole of it.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from mvp_engine.distributed import Layout
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.distributed.fsdp import apply_fsdp
from mvp_engine.errors import UserError
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.hf.parts import PARTS, blocks_by_part, by_part, matching
from mvp_engine.model_engine.base import Settings
from mvp_engine.model_engine.fsdp.grad_norm import DTYPES
from mvp_engine.model_engine.fsdp.init_weights import materialize_weights
from mvp_engine.model_engine.fsdp.tensor_parallel import apply_tensor_parallel
from mvp_engine.ops import fp8

LOGGER = logging.getLogger("mvp_engine")


def place(model: nn.Module, layout: Layout, settings: Settings) -> None:
    recompute = by_part(model, settings.activation_checkpointing, "model.activation_checkpointing")
    compiled = _backends(model, layout, settings)
    freeze(model, settings.freeze)
    low = _in_fp8(model, layout, settings)
    config: Any = model.hf.config if isinstance(model, PackedModel) else None
    if config is not None and getattr(config.get_text_config(), "output_router_logits", False):
        LOGGER.warning(
            "output_router_logits of the model's config asks for transformers' loss that balances experts; it is not "
            "part of any output here, so nothing balances them. Set it to false to say that this is meant."
        )
    cast_frozen_base(model, DTYPES[settings.precision])
    world = layout.world
    skeleton = copy.deepcopy(model) if any(param.is_meta for param in model.parameters()) else None
    if skeleton is None:
        _full_precision(model, settings)
        model.to(world.device)
        world.broadcast_from_rank0_([*model.parameters(), *model.buffers()])
    if layout.model_parallel_size > 1 and not isinstance(model, PackedModel):
        raise UserError(
            f"parallel.ulysses > 1 and parallel.tensor > 1 need a packed model; {type(model).__name__} is none"
        )
    if layout.tensor_mesh is not None:
        assert isinstance(model, PackedModel)
        if model.lora is not None:
            raise UserError(
                "LoRA does not go with parallel.tensor > 1: share the model with parallel.shard instead"
            )
        apply_tensor_parallel(model, layout.tensor_mesh)
    if layout.ulysses_group is not None:
        assert isinstance(model, PackedModel)
        model.enable_sequence_parallel(layout.ulysses_group, layout.tensor)
    in_fp8 = 0
    for block, part in blocks_by_part(model):
        if low.get(part, False):
            in_fp8 += fp8.use(block)
        backend = compiled.get(part)
        if (mode := recompute.get(part, "none")) != "none":
            _recompute(block, mode == "selective", backend)
        if backend is not None:
            block.compile(backend=backend)
    if any(low.values()) and not in_fp8:
        raise UserError(
            f"model.fp8: no block of {type(model).__name__} has linear layers whose sizes are multiples of "
            f"{fp8.MULTIPLE}, so nothing would change. Leave it out"
        )
    if layout.shard_mesh is not None:
        apply_fsdp(model, layout.shard_mesh, DTYPES[settings.precision])
        if isinstance(model, PackedModel):
            register_fsdp_forward_method(model, "own_log_probs")
    if skeleton is not None:
        with raise_on_all_ranks(
            world.host_group
        ):  # a file may be damaged in one rank's part, or on one machine
            materialize_weights(model, skeleton, world.device, settings.seed)


def _backends(model: nn.Module, layout: Layout, settings: Settings) -> Mapping[str, str | None]:
    """How each part is compiled."""
    auto = (
        "inductor"
        if layout.world.device.type == "cuda" and isinstance(model, PackedModel)
        else None
    )
    asked: Mapping[str, str | None] = by_part(model, settings.compile, "model.compile")
    backends = {backend for backend in asked.values() if backend is not None and backend != "auto"}
    if layout.tensor_mesh is not None and torch.__version__ >= "2.13":
        why = f"torch {torch.__version__} cannot compile matrices that ranks share (parallel.tensor > 1) for all packs"
        if backends:
            raise UserError(
                f"model.compile: {why}. Set it to null, install torch 2.12, or set parallel.shard instead"
            )
        if auto and "auto" in asked.values():
            LOGGER.warning(
                "%s: blocks run uncompiled. torch 2.12 could, and parallel.shard can", why
            )
        auto = None
    for backend in backends:
        _check_backend(backend)
    return {part: auto if backend == "auto" else backend for part, backend in asked.items()}


def _in_fp8(model: nn.Module, layout: Layout, settings: Settings) -> Mapping[str, bool]:
    """Which parts compute on 8-bit floats."""
    parts: Mapping[str, bool] = by_part(model, settings.fp8, "model.fp8")
    if any(parts.values()):
        if settings.precision != "bf16":
            raise UserError(
                f"model.fp8 is for bf16, not for {settings.precision}: set loop.precision=bf16"
            )
        if layout.tensor_mesh is not None:
            raise UserError(
                "model.fp8 does not go with parallel.tensor > 1: set parallel.shard instead"
            )
        fp8.check(layout.world.device)
    return parts


def cast_frozen_base(model: nn.Module, dtype: torch.dtype) -> None:
    """What is frozen under adapters is kept in the precision that its folder has and that it is computed in."""
    if (
        isinstance(model, PackedModel)
        and model.lora is not None
        and model.export_dtype == dtype != torch.float32
    ):
        hf: Any = model.hf
        whole = {*(hf._keep_in_fp32_modules or ()), *(hf._keep_in_fp32_modules_strict or ())}
        for name, param in model.named_parameters():
            if not param.requires_grad and not whole & {*name.split(".")}:
                param.data = param.data.to(dtype)


def _full_precision(model: nn.Module, settings: Settings) -> None:
    """What trains is kept in float32, whatever the model came in; what is frozen only if that is computed with."""
    halves = (torch.bfloat16, torch.float16)
    if isinstance(model, PackedModel):
        model.export_dtype = next(
            (p.dtype for p in model.parameters() if p.dtype in halves), model.export_dtype
        )
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dtype in halves and (tensor.requires_grad or settings.precision == "fp32"):
            tensor.data = tensor.data.float()


def _check_backend(name: str) -> None:
    from torch._dynamo import list_backends

    if name not in (known := list_backends(exclude_tags=())):
        near = difflib.get_close_matches(name, known, 1)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}."
        raise UserError(f"model.compile={name} is no backend of torch.compile. {hint}")


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        for name in matching(model, pattern, "model.freeze"):
            if (
                pattern not in PARTS or ".lora_" not in name
            ):  # what a part is made of; adapters stand beside it
                model.get_parameter(name).requires_grad_(False)


# Worth keeping: what takes longest to compute again. All else is cheap, and most of the memory.
_KEPT = {
    "mm",
    "addmm",
    "bmm",
    "_scaled_dot_product",
    "_flash_attention",
    "_cudnn_attention",
    "_grouped_mm",
}
_KEPT |= {"_varlen_attn", "ragged_attention", "_scaled_mm"}
THIN = 8  # a matrix with so many times more columns than rows is quickly multiplied by


def _keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = (
        op.overloadpacket.__name__ if hasattr(op, "overloadpacket") else getattr(op, "__name__", "")
    )
    kept = any(name == kind or (kind[0] == "_" and kind in name) for kind in _KEPT)
    if (
        name in ("mm", "addmm") and args[-1].shape[1] > THIN * args[-1].shape[0]
    ):  # adapters give much for little work
        kept = False
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute(block: nn.Module, selective: bool, backend: str | None) -> None:
    """From now on the block's forward keeps its inputs (and, if selective, the costly results), not all it computes.

    A block that is to be compiled and arrives here uncompiled has attention that looks at the boundaries on the host,
    sequence by sequence, or is compiled apart (FlexAttention): torch compiles around it, but not within what is
    computed again. So what is inside is compiled alone. That would hide the costly results from what selects them.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep)
    forward = block.forward
    alone = forward if selective or backend is None else torch.compile(forward, backend=backend)

    def inside(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        if selective and backend is not None:
            _say_uncompiled(type(block).__name__)
        try:
            return alone(*args, **kwargs)
        except RuntimeError as error:
            if selective and "has been mutated" in str(error):
                raise UserError(
                    f"model.activation_checkpointing=selective keeps the results of matrix products and attention; "
                    f"{type(block).__name__} changes one of them in place. Set model.activation_checkpointing=full, or change it "
                    "out of place (nn.ReLU() for nn.ReLU(inplace=True), x = x + y for x += y)"
                ) from error
            raise

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with (
            _casts_anew()
            if selective and not torch.compiler.is_compiling()
            else contextlib.nullcontext()
        ):
            return checkpoint(inside, *args, **options, **kwargs)

    block.forward = recomputed


@contextlib.contextmanager
def _casts_anew() -> Iterator[None]:
    """Autocast keeps no weights that it cast. A block that runs twice in a step, for images and for videos, would take
    those of the first time; computed again it casts them itself, and what selects would find one operation too many."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@functools.cache
def _say_uncompiled(name: str) -> None:
    LOGGER.warning(
        "%s runs uncompiled: its attention goes sequence by sequence (in fp32) or to FlexAttention (for what other "
        "kernels do not have), around which torch does not compile with model.activation_checkpointing=selective. "
        "Set model.activation_checkpointing=full, or model.compile=null",
        name,
    )
