"""From a checkpoint of any layout to a Hugging Face folder, in one process without a GPU, one file at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mvp_engine.checkpoint import hf_export, storage
from mvp_engine.distributed import World
from mvp_engine.errors import UserError
from mvp_engine.model_engine.base import ModelSource, engine_class
from mvp_engine.model_engine.packed import PackedModel

HF = "hf"  # in a checkpoint: config, tokenizer and all else of a Hugging Face folder but the weights


def describe(model: PackedModel, folder: Path) -> None:
    """Write what `merge` needs beside the weights into `folder`, which goes into each checkpoint as `hf`."""
    folder.mkdir(exist_ok=True)
    target = model.export_target()
    hf_export.write_side_files(target, folder)
    # The config of what was trained, not of the class that the export is read with.
    model.hf.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
    about = {"model_type": model.model_type, "dtype": str(target.dtype).removeprefix("torch.")}
    (folder / "mvp.json").write_text(json.dumps(about) + "\n")


def merge(checkpoint: Path, out: Path, dtype: torch.dtype | None = None, limit: int = hf_export.MAX_FILE_BYTES) -> None:
    if not (checkpoint / HF / "mvp.json").is_file():
        raise UserError(f"{checkpoint} is no checkpoint of a Hugging Face model: it has no {HF}/mvp.json")
    about = json.loads((checkpoint / HF / "mvp.json").read_text())
    model = engine_class(about["model_type"]).build_model(ModelSource(str(checkpoint / HF)))
    assert isinstance(model, PackedModel)
    reader = storage.Reader(checkpoint)
    state = model.state_dict(keep_vars=True)
    first = {id(value): name for name, value in reversed(state.items())}  # a tied one is stored under its first name

    def stored(name: str) -> str:
        return f"model.{first[id(state[name])]}"

    if missing := [name for name in state if stored(name) not in reader.entries]:
        raise UserError(f"{checkpoint} lacks {', '.join(missing[:3])}, which {type(model.hf).__name__} has")
    target = model.export_target(dtype or getattr(torch, about["dtype"]))
    alone = World(0, 1, 0, 1, torch.device("cpu"))

    def like(name: str) -> torch.Tensor:
        entry = reader.entries[stored(name)]
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    hf_export.export(target, out, lambda name: reader.read(stored(name)), like, alone, limit)
