"""`mvp merge`: write a checkpoint of any model type as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch

from mvp_engine.checkpoint.manager import find_checkpoint
from mvp_engine.checkpoint.state import HF
from mvp_engine.errors import UserError
from mvp_engine.hf.merge import merge
from mvp_engine.hf.model_info import read_model_info
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.imports import load_spec
from mvp_engine.model_engine.base import ModelSource
from mvp_engine.model_engine.registry import engine_class, is_registered
from mvp_engine.runs import trained_run


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
    """Merge a checkpoint, or the best one of a run (its folder, its id or `latest`), into the folder `out`."""
    is_path = Path(checkpoint).exists() or "/" in checkpoint
    folder = model_checkpoint(Path(checkpoint) if is_path else trained_run(checkpoint).dir)
    if not 0 < max_file_gb < float("inf"):
        raise UserError(f"--max-file-gb {max_file_gb}: must be a positive size")
    merge(
        folder,
        build_model(folder, engine),
        Path(out).expanduser().resolve(),
        dtype=getattr(torch, dtype) if dtype else None,
        max_file_bytes=int(max_file_gb * 1e9),
        base=base,
        adapter_only=adapter,
        ema=ema,
    )
    print(f"{folder} is now the {'peft' if adapter else 'Hugging Face'} folder {out}")


def model_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the best one of the run there, else its newest; of an RL run, that of its policy."""
    checkpoint = find_checkpoint(path, best=True)
    policy = checkpoint / "actor"
    return find_checkpoint(policy) if policy.is_dir() else checkpoint


def build_model(checkpoint: Path, engine: str | None = None) -> PackedModel:
    """The model of a checkpoint, on the meta device.

    `engine` names the file or module that registers the model type, if it has moved since the training.
    """
    info = read_model_info(checkpoint)
    _register(info.model_type, engine or info.engine, checkpoint)
    model = engine_class(info.model_type).build_model(ModelSource(str(checkpoint / HF)))
    assert isinstance(model, PackedModel)
    return model


def _register(model_type: str, spec: str | None, checkpoint: Path) -> None:
    """Import the file or module that registers the model type of a recipe."""
    if is_registered(model_type):
        return
    fix = "Name the file or module that registers it: mvp merge --engine FILE"
    if spec is None:
        raise UserError(f"{checkpoint} is of the unknown model type {model_type}. {fix}")
    try:
        load_spec(spec, Path.cwd(), "its engine")
    except UserError as error:
        why = str(error).removesuffix(".")
        raise UserError(f"{checkpoint} is of model type {model_type}: {why}. {fix}") from None
    if not is_registered(model_type):
        raise UserError(
            f"{checkpoint} is of model type {model_type}, which {spec} does not register. {fix}"
        )
