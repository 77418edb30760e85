"""`mvp merge`: a checkpoint of any model type as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mvp_engine.checkpoint import state
from mvp_engine.checkpoint.manager import find_checkpoint
from mvp_engine.errors import UserError
from mvp_engine.hf import merge as hf_merge
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.imports import load_spec
from mvp_engine.model_engine.base import ModelSource, engine_class, is_registered


def merge(checkpoint: Path, out: Path, engine: str | None = None, **options: Any) -> None:
    """Merge a checkpoint. `options` are those of `mvp_engine.hf.merge.merge`.

    `engine` names a file or module that registers the model type, if it moved since the training.
    """

    def build_model(model_type: str, registered_in: str | None) -> PackedModel:
        _register(model_type, engine or registered_in, checkpoint)
        source = ModelSource(str(checkpoint / state.HF))
        model = engine_class(model_type).build_model(source)
        assert isinstance(model, PackedModel)
        return model

    hf_merge.merge(checkpoint, out, build_model, **options)


def merge_command(
    checkpoint: str,
    out: str,
    *,
    engine: str | None,
    dtype: str | None,
    max_file_gb: float,
    base: str | None,
    adapter: bool,
    ema: bool,
) -> None:
    """Merge a checkpoint, or the newest one of a run folder, into the folder `out`."""
    folder = find_checkpoint(Path(checkpoint))
    if not 0 < max_file_gb < float("inf"):
        raise UserError(f"--max-file-gb {max_file_gb}: must be a positive size")
    merge(
        folder,
        Path(out).expanduser().resolve(),
        engine,
        dtype=getattr(torch, dtype) if dtype else None,
        limit=int(max_file_gb * 1e9),
        base=base,
        adapter=adapter,
        ema=ema,
    )
    print(f"{folder} is now the {'peft' if adapter else 'Hugging Face'} folder {out}")


def _register(model_type: str, spec: str | None, checkpoint: Path) -> None:
    """Import the module that registers a model type of a recipe."""
    if is_registered(model_type):
        return
    fix = "Name the file or module that registers it: mvp merge --engine FILE"
    if spec is None:
        raise UserError(
            f"{checkpoint} is of model type {model_type}, which is not known here. {fix}"
        )
    try:
        load_spec(spec, Path.cwd(), "its engine")
    except UserError as error:
        raise UserError(f"{checkpoint} is of model type {model_type}: {error}. {fix}") from None
    if not is_registered(model_type):
        raise UserError(
            f"{checkpoint} is of model type {model_type}, which {spec} does not register. {fix}"
        )
