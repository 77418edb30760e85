"""From a checkpoint of any layout to a Hugging Face folder, in one process without a GPU, one file at a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from mvp_engine.checkpoint import hf_export, state, storage
from mvp_engine.distributed import World
from mvp_engine.errors import UserError
from mvp_engine.imports import load_spec
from mvp_engine.model_engine.base import ModelSource, engine_class, is_registered
from mvp_engine.model_engine.packed import PackedModel

ABOUT = f"{state.HF}/mvp.json"


def describe(model: PackedModel, folder: Path) -> None:
    """Write what `merge` needs beside the weights into `folder`, which goes into each checkpoint as `hf`."""
    folder.mkdir(exist_ok=True)
    target = model.export_target()
    hf_export.write_side_files(target, folder)
    # The config of what was trained, not of the class that the export is read with.
    model.hf.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
    kind = engine_class(model.model_type) if is_registered(model.model_type) else type(model)
    dtype = str(target.dtype).removeprefix("torch.")
    about = {"model_type": model.model_type, "dtype": dtype, "engine": _where(kind)}
    (folder / "mvp.json").write_text(json.dumps(about) + "\n")


def _where(kind: type) -> str | None:
    """The module or the file that makes this class known when it is imported; None for those of this package."""
    if kind.__module__.split(".")[0] in ("mvp_engine", "__main__"):
        return None  # a script would run once more if it were imported
    module = sys.modules.get(kind.__module__)
    package = sys.modules.get(kind.__module__.rpartition(".")[0])
    if package is not None and package.__spec__ is not None:  # a recipe's folder has none: it only stands for one
        return kind.__module__
    file = getattr(module, "__file__", None)
    return str(Path(file).resolve()) if file else None


def merge(
    checkpoint: Path,
    out: Path,
    dtype: torch.dtype | None = None,
    limit: int = hf_export.MAX_FILE_BYTES,
    engine: str | None = None,
) -> None:
    """`engine`: a file or module that makes a model type of your own known, if it is not where it was in training."""
    model_type, saved_dtype, spec = _read_about(checkpoint)
    _make_known(model_type, engine or spec, checkpoint)
    model = engine_class(model_type).build_model(ModelSource(str(checkpoint / state.HF)))
    assert isinstance(model, PackedModel)
    reader = storage.Reader(checkpoint)
    state.check_fit(checkpoint, state.tensors_of(model)[0], reader.entries)
    tensors = model.state_dict(keep_vars=True)
    first = {id(value): name for name, value in reversed(tensors.items())}  # a tied one is stored under its first name
    target = model.export_target(dtype or saved_dtype)
    alone = World(0, 1, 0, 1, torch.device("cpu"))

    def stored(name: str) -> str:
        return f"model.{first[id(tensors[name])]}"

    def like(name: str) -> torch.Tensor:
        entry = reader.entries[stored(name)]
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    hf_export.export(target, out, lambda name: reader.read(stored(name)), like, alone, limit)


def _read_about(checkpoint: Path) -> tuple[str, torch.dtype, str | None]:
    if not (checkpoint / ABOUT).is_file():
        raise UserError(f"{checkpoint} is no checkpoint of a Hugging Face model: it has no {ABOUT}")
    try:
        about = json.loads((checkpoint / ABOUT).read_text())
        return about["model_type"], getattr(torch, about["dtype"]), about.get("engine")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{checkpoint / ABOUT} is damaged: {type(error).__name__}: {error}") from None


def _make_known(model_type: str, spec: str | None, checkpoint: Path) -> None:
    """Import what registers a model type of a recipe's own."""
    if is_registered(model_type):
        return
    fix = "Name the file or module that registers it: mvp merge --engine FILE"
    if spec is None:
        raise UserError(f"{checkpoint} is of model type {model_type}, which is not known here. {fix}")
    try:
        load_spec(spec, Path.cwd(), "its engine")
    except UserError as error:
        raise UserError(f"{checkpoint} is of model type {model_type}: {error}. {fix}") from None
    if not is_registered(model_type):
        raise UserError(f"{checkpoint} is of model type {model_type}, which {spec} does not register. {fix}")
