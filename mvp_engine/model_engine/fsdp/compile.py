"""torch.compile of blocks: the backend of each part, the options, the cache on disk, and late recompiles."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.distributed import Layout
from mvp_engine.errors import UserError, count, did_you_mean
from mvp_engine.hf.model.model_parts import by_part

LOGGER = logging.getLogger("mvp_engine")
WARM_UP_STEPS = 3  # in which every kind of block is compiled
MOST_GRAPHS = 3  # that a warning lists
# Graphs of one function. Checkpointed blocks of all kinds share one, and an image-text model has nine with and without
# gradients; torch runs the rest uncompiled after 8.
RECOMPILE_LIMIT = 64
REASON_LENGTH = 200


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


def compile_arguments(backend: str) -> dict[str, Any]:
    """Keyword arguments of torch.compile for a block.

    Inductor pads strides to 128 bytes. In torch 2.11 a bf16 block with head size 32 then computes wrong values, or NaN,
    from an odd number of tokens.
    """
    options = {"comprehensive_padding": False} if backend == "inductor" else None
    return {"backend": backend, "options": options}


def allow_graphs() -> None:
    """Let torch compile as many graphs as a model has kinds of blocks, and keep those with autograd functions on disk.

    By default it traces the latter again in every start: blocks with experts or FP8. Their backward is part of the
    graph by which the cache finds them, so a change of its code is a new graph.
    """
    from torch._dynamo import config
    from torch._functorch import config as functorch_config

    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    functorch_config.autograd_cache_allow_custom_autograd_functions = True


def copy_views(module: nn.Module) -> None:
    """Give a compiled block a copy of its input if that is a view, as an encoder's first block gets it.

    torch compiles one more graph for views.
    """
    compiled: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]

    def call(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor) and args[0]._is_view():
            args = (args[0].clone(), *args[1:])
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call


def use_cache() -> None:
    """Keep what Inductor compiles in the user's cache folder: later starts and other ranks read it.

    A folder that $TORCHINDUCTOR_CACHE_DIR names stays.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = Path(f"{cache}/mvp_engine/compile").expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise UserError(
            f"model.compile: {path}, the folder of compiled graphs, cannot be written to: {error.strerror}. Set "
            "$TORCHINDUCTOR_CACHE_DIR to another folder"
        ) from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path)


class RecompileWatch:
    """Warns of graph breaks, and of graphs that are compiled after the first steps: each takes seconds to minutes."""

    def __init__(self) -> None:
        self.steps = 0
        self.recompiles = 0  # after the first steps
        self._seen: set[str | None] = {None}

    def after_step(self) -> None:
        self.steps += 1
        found = self._new_graphs()
        if self.steps == WARM_UP_STEPS:
            _warn_of_graph_breaks()
        if self.steps <= WARM_UP_STEPS or not found:
            return
        self.recompiles += len(found)
        LOGGER.warning(
            "%s compiled after the first %d steps, %d so far (%.0f s): %s",
            count(len(found), "graph"),
            WARM_UP_STEPS,
            self.recompiles,
            sum(one.entire_frame_compile_time_s or 0.0 for one in found),
            "; ".join(f"{_place(one)}: {_reason(one)}" for one in found[:MOST_GRAPHS]),
        )

    def forget(self) -> None:
        """What was compiled until now is expected, such as the graphs of a first evaluation."""
        self._new_graphs()

    def _new_graphs(self) -> list[Any]:
        dynamo = sys.modules.get("torch._dynamo.utils")  # not imported: nothing is compiled
        if dynamo is None:
            return []
        graphs = [one for one in dynamo.get_compilation_metrics() if one.is_forward is not False]
        new = [one for one in graphs if one.compile_id not in self._seen]
        self._seen.update(one.compile_id for one in new)
        return new


def _warn_of_graph_breaks() -> None:
    """Blocks that are compiled in pieces take longer: what is between two graphs runs in Python."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    breaks = [] if dynamo is None else dynamo.counters["graph_break"]
    # Not those that someone meant, such as around kernels that torch cannot trace.
    found = [one for one in breaks if "torch.compiler.disable" not in one]
    if found:
        reasons = [" ".join(one.split())[:REASON_LENGTH] for one in found[:MOST_GRAPHS]]
        LOGGER.warning(
            "torch.compile divides blocks into several graphs, which takes longer. Change what it cannot trace, if "
            "that is your code: %s",
            "; ".join(reasons),
        )


def _place(graph: Any) -> str:
    return f"{graph.co_name} ({Path(graph.co_filename or '?').name}:{graph.co_firstlineno})"


def _reason(graph: Any) -> str:
    reason: str = graph.recompile_reason or "not compiled before"
    return reason.strip().splitlines()[0][:REASON_LENGTH]
