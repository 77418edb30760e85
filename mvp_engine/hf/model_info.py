"""`hf/mvp.json` of a checkpoint: what `mvp merge` must know about the trained model besides its weights.

The folder `hf` of a checkpoint is a Hugging Face folder without weights; this file is added to it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mvp_engine.checkpoint.state import HF
from mvp_engine.errors import UserError
from mvp_engine.hf.export import drop_local_settings, write_side_files
from mvp_engine.hf.hub import portable_name
from mvp_engine.hf.lora_settings import Lora
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.hf.weight_files import fingerprint
from mvp_engine.ops.nf4 import quantized_layers

NAME = "mvp.json"


@dataclass(frozen=True)
class BaseFolder:
    """The pretrained folder that a training started from. Its checkpoints do not repeat the frozen weights."""

    path: str
    weights: str  # a fingerprint of its files

    def check(self, folder: Path, fix: str) -> None:
        """Raise `UserError` unless `folder` holds the weights that the training started from."""
        if not folder.is_dir():
            raise UserError(
                f"the checkpoint was trained on {self.path}, but {folder} is not a folder. {fix}"
            )
        if fingerprint(folder) != self.weights:
            raise UserError(
                f"the checkpoint was trained on {self.path}, but {folder} holds different weights. {fix}"
            )


@dataclass(frozen=True)
class ModelInfo:
    """The contents of `mvp.json`."""

    model_type: str
    dtype: torch.dtype
    engine: str | None  # the module or file that registers the model type; None: this package does
    lora: Lora | None
    base: BaseFolder | None
    quantize: dict[str, str] | None = None  # model.quantize of the training
    quantized: frozenset[str] = frozenset()  # the names of the weights that it had in NF4


def write_model_info(
    model: PackedModel, folder: Path, engine_class: type, trainable_only: bool
) -> None:
    """Write the folder `hf` of a checkpoint. `trainable_only`: it leaves out frozen weights of the model's folder."""
    folder.mkdir(exist_ok=True)
    target = model.export_target()
    write_side_files(target, folder)
    # An export may be read with another model class; a merge rebuilds the trained one, so its config is kept.
    config: Any = model.hf.config if model.whole is None else model.whole.config
    config.save_pretrained(folder)
    drop_local_settings(folder)
    info: dict[str, Any] = {
        "model_type": model.model_type,
        "dtype": str(target.dtype).removeprefix("torch."),
        "engine": _import_path(engine_class),
    }
    if model.lora is not None:
        info["lora"] = model.lora.model_dump()
    if model.quantize:
        info["quantize"] = model.quantize
        info["quantized"] = sorted(quantized_layers(model))
    needs_base = trainable_only or model.lora is not None or model.whole is not None
    if model.source is not None and needs_base:
        weights = fingerprint(model.source)
        info["base"] = {"path": portable_name(model.source), "weights": weights}
    (folder / NAME).write_text(json.dumps(info) + "\n")


def read_model_info(checkpoint: Path) -> ModelInfo:
    file = checkpoint / HF / NAME
    if not file.is_file():
        raise UserError(
            f"{checkpoint} is not a checkpoint of a Hugging Face model: it has no {HF}/{NAME}"
        )
    try:
        info = json.loads(file.read_text())
        lora = info.get("lora")
        uses_dora = lora is not None and lora.pop("dora", False)  # files of older versions
        base = info.get("base")
        found = ModelInfo(
            model_type=info["model_type"],
            dtype=getattr(torch, info["dtype"]),
            engine=info.get("engine"),
            lora=None if lora is None else Lora.model_validate(lora),
            base=None if base is None else BaseFolder(base["path"], base["weights"]),
            quantize=info.get("quantize"),
            quantized=frozenset(info.get("quantized", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    if uses_dora:
        raise UserError(
            f"{checkpoint} was trained with DoRA (lora.dora=true), which was removed. "
            "Merge it with the version of mvp_engine that trained it"
        )
    return found


def check_base(checkpoint: Path, model: PackedModel) -> None:
    """Raise `UserError` if `model` was built on other weights than those that a checkpoint's adapters belong to."""
    if not (checkpoint / HF / NAME).is_file() or model.source is None:
        return
    info = read_model_info(checkpoint)
    base = info.base
    if info.quantize != model.quantize:
        there = json.dumps(info.quantize or {}).replace('"', "")
        raise UserError(
            f"the adapters of {checkpoint} were trained with model.quantize={there}, and this model has other base "
            f"weights. Set model.quantize={there}; to change it, merge the checkpoint and start from that folder"
        )
    if base is not None:
        base.check(model.source, "Set model.path to the folder that the training started from")


def _import_path(engine_class: type) -> str | None:
    """The module or file that registers this engine class when it is imported; None for those of this package."""
    name = engine_class.__module__
    if name.split(".")[0] in ("mvp_engine", "__main__"):
        return None  # importing a script would run it again
    package = sys.modules.get(name.rpartition(".")[0])
    if package is not None and package.__spec__ is not None:
        return name  # the package of a recipe's folder has no spec and cannot be imported by name
    file = getattr(sys.modules.get(name), "__file__", None)
    return str(Path(file).resolve()) if file else None
