"""A checkpoint of any layout as one Hugging Face folder, in one process without a GPU.

The tensors of one output file are in memory at a time. The command line is in `tools/merge.py`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.checkpoint import state
from mvp_engine.checkpoint.format import Reader, verify
from mvp_engine.checkpoint.state import HF
from mvp_engine.distributed import World
from mvp_engine.errors import UserError
from mvp_engine.hf.lora.lora_export import export_adapter
from mvp_engine.hf.lora.lora_layers import add_adapters, merge_adapters
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.hf.weights.export import (
    MAX_FILE_BYTES,
    drop_local_settings,
    export,
    write_side_files,
)
from mvp_engine.hf.weights.hub import local_folder, portable_name
from mvp_engine.hf.weights.load import NewRows, WeightFiles, fingerprint, folder_groups
from mvp_engine.ops import nf4
from mvp_engine.ops.nf4 import quantized_layers


def merge(
    checkpoint: Path,
    model: PackedModel,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    base: str | Path | None = None,
    adapter_only: bool = False,
    ema: bool = False,
) -> None:
    """Write the weights of a checkpoint to `out`, as a Hugging Face folder.

    `model` is the model that was trained, on the meta device and without adapters. `dtype`: of the export, by default
    that of the training's own exports. `base`: where the folder is now that the training started from. `adapter_only`:
    write a `peft` folder instead of merged weights. `ema`: export the averaged weights.
    """
    info = read_model_info(checkpoint)
    model.new_rows = info.new_rows
    if info.lora is not None:
        add_adapters(model, info.lora)
    saved = _SavedTensors(checkpoint, model, ema, info.quantized)
    base_folder = None
    if info.base is not None:
        if adapter_only or model.whole is not None or saved.missing():
            base_folder = local_folder(base or info.base.path, weights=not adapter_only)
        for name, param in model.named_parameters():
            # One that the checkpoint lacks was frozen by model.freeze, though LoRA would train it.
            was_trained = param.requires_grad and f"model.{name}" in saved.entries
            param.requires_grad_(was_trained)
    single_process = World(0, 1, 0, 1, torch.device("cpu"))
    if adapter_only:
        model.use_folder(base_folder, model.side_files)
        export_adapter(model, out, saved.fetch, single_process)
        return
    if info.base is not None and base_folder is not None:
        info.base.check(base_folder, "Name the folder: mvp export --base FOLDER")
        saved.add_base(base_folder)
        if model.whole is not None:  # its other parts are copied from there
            model.use_folder(base_folder, side_files=model.source)
    if info.base is None and model.whole is not None:  # trained from nothing
        model.use_folder(None, side_files=model.source)
    saved.check_complete()
    target = model.export_target(dtype or info.dtype)
    fetch = merge_adapters(model, saved.fetch)
    export(target, out, fetch, saved.like, single_process, max_file_bytes)


class _SavedTensors:
    """The tensors of a model by name, read from its checkpoint or from the folder that the training started from."""

    def __init__(
        self, checkpoint: Path, model: PackedModel, ema: bool, quantized: frozenset[str]
    ) -> None:
        """`quantized`: names of weights that the training had in NF4, whatever the base folder holds."""
        self.checkpoint = checkpoint
        self.model = model
        verify(checkpoint, names=state.is_weight)
        self._reader = Reader(checkpoint)
        self.entries = self._reader.entries
        self._tensors = model.state_dict(keep_vars=True)
        # A checkpoint stores tied parameters once, under the first of their names.
        self._first_names: dict[int, str] = {}
        for name, value in self._tensors.items():
            self._first_names.setdefault(id(value), name)
        self._quantized = quantized
        self._from_base: dict[str, Callable[[], Tensor]] = {}  # by the checkpoint's names
        self._averaged: set[str] = set()
        if ema:
            names = self._first_names.values()
            self._averaged = {n for n in names if state.ema_name(n) in self.entries}
            if not self._averaged:
                raise UserError(
                    f"{checkpoint} has no averaged weights: set optim.ema in the training"
                )

    def fetch(self, name: str) -> Tensor:
        entry = self._entry_name(name)
        if entry in self.entries:
            value = self._reader.read(entry)
        else:
            value = self._from_base[entry]().float()
            if name in self._quantized:
                value = nf4.quantize(value, torch.float32)
        if name in self._quantized:
            return nf4.dequantize(value, nf4.in_features_of(value), torch.float32)
        return value

    def like(self, name: str) -> Tensor:
        """An empty tensor on the meta device with the shape and the dtype that `fetch` returns."""
        entry = self.entries.get(self._entry_name(name))
        dtype = torch.float32 if entry is None or name in self._quantized else entry.dtype
        return torch.empty(self._tensors[name].shape, dtype=dtype, device="meta")

    def missing(self) -> bool:
        """Whether the checkpoint lacks tensors of the model."""
        return not self._needed().keys() <= self.entries.keys()

    def add_base(self, folder: Path) -> None:
        """Read frozen parameters that the checkpoint lacks from a pretrained folder."""
        view = self.model.folder_view()
        files, new_rows = WeightFiles(folder), self.model.new_rows
        for group in folder_groups(view.model, files, keep_converted=False, new_rows=new_rows):
            for name, param in group.params.items():
                tensor = self._tensors.get(view.own_name(name) or "")
                if tensor is not None and not tensor.requires_grad:
                    first_name = self._first_names[id(tensor)]
                    self._from_base[f"model.{first_name}"] = partial(param.read, ())

    def check_complete(self) -> None:
        """Raise `UserError` unless checkpoint and base folder together have exactly the tensors of the model."""
        here: dict[str, Tensor] = {}
        for name, value in self._needed().items():
            if name in self.entries or name not in self._from_base:
                here[name] = value
            if name in self.entries and name.removeprefix("model.") in self._quantized:
                here[name] = torch.empty(self.entries[name].shape, device="meta")
        state.check_fit(self.checkpoint, here, self.entries)

    def _needed(self) -> dict[str, Tensor]:
        return state.tensors_of(self.model)[0]

    def _entry_name(self, name: str) -> str:
        first_name = self._first_names[id(self._tensors[name])]
        if first_name in self._averaged:
            return state.ema_name(first_name)
        return f"model.{first_name}"


# `hf/mvp.json` of a checkpoint: what `mvp export` must know about the trained model besides its weights.
#
# The folder `hf` of a checkpoint is a Hugging Face folder without weights; this file is added to it.

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
    new_rows: NewRows | None = None  # of data.new_tokens


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
    if model.new_rows is not None:
        rows = model.new_rows
        sources = {str(id): list(ids) for id, ids in rows.sources.items()}
        info["new_tokens"] = {"texts": rows.tokens, "known": rows.num_known, "sources": sources}
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
        if lora is not None and lora.pop("rslora", False):
            lora["alpha"] = (lora["alpha"] or 2 * lora["rank"]) * math.sqrt(lora["rank"])
        base = info.get("base")
        found = ModelInfo(
            model_type=info["model_type"],
            dtype=getattr(torch, info["dtype"]),
            engine=info.get("engine"),
            lora=None if lora is None else Lora.model_validate(lora),
            base=None if base is None else BaseFolder(base["path"], base["weights"]),
            quantize=info.get("quantize"),
            quantized=frozenset(info.get("quantized", ())),
            new_rows=_read_new_rows(info.get("new_tokens")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    if uses_dora:
        raise UserError(
            f"{checkpoint} was trained with DoRA (lora.dora=true), which was removed. "
            "Merge it with the version of mvp_engine that trained it"
        )
    return found


def _read_new_rows(saved: dict[str, Any] | None) -> NewRows | None:
    if saved is None:
        return None
    sources = {int(id): tuple(ids) for id, ids in saved["sources"].items()}
    return NewRows(saved["known"], sources, tuple(saved["texts"]))


def check_new_tokens(checkpoint: Path, model: PackedModel) -> None:
    """Raise `UserError` if a checkpoint was trained with other new tokens than `model` has."""
    if not (checkpoint / HF / NAME).is_file():
        return
    there = read_model_info(checkpoint).new_rows
    if there != model.new_rows:
        shown = [str(list(rows.tokens) if rows else []) for rows in (there, model.new_rows)]
        raise UserError(
            f"{checkpoint} was trained with data.new_tokens={shown[0]}, and this model has {shown[1]}, or starts their "
            "rows from other tokens. Set data.new_tokens to those of the checkpoint; to change them, export the "
            "checkpoint and start from that folder"
        )


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
