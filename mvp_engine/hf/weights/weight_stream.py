"""Receiving a stream of weights, given by Hugging Face names as full tensors, into a model on any layout.

The stream may come in any order. Entries that transformers converts together (experts, fused projections) wait until
all of them have arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mvp_engine.errors import UserError, count
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.hf.weights import load
from mvp_engine.hf.weights.export import ExportPlan


class TensorEntries:
    """Tensors in memory, as `load` reads those of a folder."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def meta(self, key: str) -> Tensor:
        return torch.empty(self._tensors[key].shape, device="meta")

    def read(self, key: str, index: tuple[slice, ...] = ()) -> Tensor:
        return self._tensors[key][index]


class WeightReceiver:
    """Fills a model bucket by bucket; `finish` checks that every weight has arrived."""

    def __init__(self, model: PackedModel) -> None:
        if model.lora is not None:
            raise UserError(
                "a model with LoRA adapters cannot receive weights, which have adapters merged: build the receiving "
                "group without lora, or load a checkpoint"
            )
        self.model = model
        tensors = model.state_dict(keep_vars=True)
        self._own = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        view = model.folder_view()
        named = ((view.folder_name(name), value) for name, value in self._own.items())
        self._hf = {name: value for name, value in named if name is not None}
        self._skeleton = model._skeleton(type(model.hf)) if model.whole is None else view.model
        whole = tensors if model.stage is None else model.stage.whole.state_dict()
        elsewhere = (view.folder_name(name) for name in whole if name not in tensors)
        self._elsewhere = {name for name in elsewhere if name is not None}
        plan = ExportPlan(model.export_target(), lambda name: _on_meta(whole[name]))
        # Entries that are converted together, by the name of each.
        self._groups = {
            name: frozenset(group.entries)
            for group in plan.groups
            for name in group.entries
            if not group.carried
        }
        self._missing = set(self._groups)
        self._waiting: dict[str, Tensor] = {}
        # Frozen weights are no longer those of the folder, so checkpoints must have them.
        model.from_folder = frozenset()

    def add(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        for name, value in bucket:
            if name not in self._groups:
                raise UserError(f"the model has no weight {name}: is it the same architecture?")
            self._waiting[name] = value
        complete = {
            n: v for n, v in self._waiting.items() if self._groups[n] <= self._waiting.keys()
        }
        if not complete:
            return
        entries = TensorEntries(complete)
        _, unused = load.load_entries(
            self._skeleton,
            entries,
            self._hf,
            "the stream of weights",
            elsewhere=self._elsewhere,
        )
        heads = {name: self._own[name] for name in unused if name in self._own}
        load.load_entries_by_name(entries, heads, "the stream of weights")
        self._missing -= complete.keys()
        for name in complete:
            del self._waiting[name]

    def finish(self) -> None:
        if self._missing:
            raise UserError(
                f"the stream of weights lacks {count(len(self._missing), 'weight')} of the model, such as "
                f"{min(self._missing)}"
            )


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
