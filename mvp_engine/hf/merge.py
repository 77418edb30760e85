"""A checkpoint of any layout as one Hugging Face folder, in one process without a GPU.

The tensors of one output file are in memory at a time. The command line is in `tools/merge.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mvp_engine.checkpoint import state
from mvp_engine.checkpoint.format import Reader, verify
from mvp_engine.distributed import World
from mvp_engine.errors import UserError
from mvp_engine.hf.export import MAX_FILE_BYTES, export
from mvp_engine.hf.hub import local_folder
from mvp_engine.hf.load import folder_groups
from mvp_engine.hf.lora import add_adapters, merge_adapters
from mvp_engine.hf.lora_export import export_adapter
from mvp_engine.hf.model_info import read_model_info
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.hf.weight_files import WeightFiles
from mvp_engine.ops import nf4


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
        model.source = base_folder
        export_adapter(model, out, saved.fetch, single_process)
        return
    if info.base is not None and base_folder is not None:
        info.base.check(base_folder, "Name the folder: mvp merge --base FOLDER")
        saved.add_base(base_folder)
        if model.whole is not None:  # its other parts are copied from there
            model.side_files = model.source
            model.source = base_folder
    if info.base is None and model.whole is not None:  # trained from nothing
        model.side_files = model.source
        model.source = None
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
        for group in folder_groups(view.model, WeightFiles(folder), keep_converted=False):
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
