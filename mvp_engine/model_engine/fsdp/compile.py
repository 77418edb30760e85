"""Which torch.compile backend each part of a model uses."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mvp_engine.distributed import Layout
from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.hf.parts import by_part

LOGGER = logging.getLogger("mvp_engine")


def compile_backends(
    model: nn.Module, setting: object, layout: Layout, by_default: bool
) -> Mapping[str, str | None]:
    """The backend by part. `by_default`: "auto" compiles this model on a GPU."""
    asked: Mapping[str, str | None] = by_part(model, setting, "model.compile")
    named = {backend for backend in asked.values() if backend not in (None, "auto")}
    auto = "inductor" if by_default and layout.world.device.type == "cuda" else None
    if layout.tensor_mesh is not None and torch.__version__ >= "2.13":
        why = f"torch {torch.__version__} cannot compile tensor-parallel blocks (parallel.tensor > 1) for all packs"
        if named:
            raise UserError(
                f"model.compile: {why}. Set it to null, install torch 2.12, or set parallel.shard instead"
            )
        if auto and "auto" in asked.values():
            LOGGER.warning("%s: blocks run uncompiled. torch 2.12 and parallel.shard can", why)
        auto = None
    if named:
        from torch._dynamo import list_backends

        known = list_backends(exclude_tags=())
        for name in named.difference(known):
            hint = did_you_mean(str(name), known) or f" Known backends: {', '.join(known)}."
            raise UserError(f"model.compile={name} is no backend of torch.compile.{hint}")
    return {part: auto if backend == "auto" else backend for part, backend in asked.items()}


def compile_options(backend: str) -> dict[str, Any] | None:
    """What torch.compile is asked for besides its defaults.

    Inductor pads strides to 128 bytes. In torch 2.11 a bf16 block with head size 32 then computes wrong values, or NaN,
    from an odd number of tokens.
    """
    return {"comprehensive_padding": False} if backend == "inductor" else None
