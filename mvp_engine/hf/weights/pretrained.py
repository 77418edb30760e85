"""Loading the pretrained weights of a folder into a model that is parallelized already."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mvp_engine.errors import UserError, count
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.hf.weights import load
from mvp_engine.hf.weights.export import ExportPlan, FolderView
from mvp_engine.hf.weights.hub import fetch_weights
from mvp_engine.ops.nf4 import quantized_layers

LOGGER = logging.getLogger("mvp_engine")
T = TypeVar("T")


def load_pretrained(model: PackedModel, skeleton: nn.Module) -> set[str]:
    """Load the model's folder; returns the names of the tensors that were loaded.

    Only tensors that the model type adds may be missing there. `skeleton` is the same model on the meta device.
    """
    assert model.source is not None
    assert isinstance(skeleton, PackedModel)
    fetch_weights(model.source)
    state = model.state_dict(keep_vars=True)
    own = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    view = skeleton.folder_view()
    wrapped = _by_folder_name(view, own)
    quantized = _by_folder_name(view, quantized_layers(model))
    others = frozenset() if model.stage is None else model.stage.elsewhere.keys()
    elsewhere = _by_folder_name(view, dict.fromkeys(others)).keys()
    names, unused = load.load(
        view.model, model.source, wrapped, quantized, elsewhere, model.new_rows
    )
    found = {name for name in map(view.own_name, names) if name is not None}
    # Tied tensors count with each other.
    filled = {own[name] for name in found if name not in others}
    loaded = {name for name, value in own.items() if value in filled}
    if others:
        loaded |= _tied_to(skeleton, found) & others
    heads = [name for name in own if view.folder_name(name) is None and name in unused]
    if heads:
        files = load.WeightFiles(model.source)
        load.load_entries_by_name(files, {name: own[name] for name in heads}, str(model.source))
        loaded |= set(heads)
    from_base = frozenset(loaded)
    if model.adapter_folder is not None:
        from mvp_engine.hf.lora.lora_import import load_adapter  # above: it needs this module's

        loaded |= load_adapter(model, skeleton)
    _check_missing(model, skeleton, [name for name in own if name not in loaded])
    unexpected = [name for name in unused if name not in heads]
    unexpected = [name for name in unexpected if not _is_expected(view, name)]
    if unexpected:
        LOGGER.warning("in %s, but not in the model: %s", model.source, first_names(unexpected))
    model.from_folder = from_base
    return loaded


def _tied_to(skeleton: nn.Module, names: set[str]) -> set[str]:
    """The names of these tensors, and of those that are tied to them."""
    tensors = skeleton.state_dict(keep_vars=True)
    found = {tensors[name] for name in names}
    return {name for name, value in tensors.items() if value in found}


def _check_missing(model: PackedModel, skeleton: PackedModel, names: list[str]) -> None:
    """Tensors that the folder lacks are initialized at random, if the model type says that they may be new."""
    missing = [n for n in names if not any(fnmatchcase(n, fresh) for fresh in model.fresh)]
    if missing:
        head = skeleton.hf.get_output_embeddings()  # type: ignore[operator]
        params = {skeleton.get_parameter(name) for name in missing}
        only_head = head is not None and params <= set(head.parameters())
        hint = "Is it a folder of this architecture?"
        if only_head:
            hint = "If its embeddings are its head too, set model.config.tie_word_embeddings=true."
        raise UserError(
            f"{model.source} lacks {count(len(missing), 'parameter')} of {type(skeleton.hf).__name__}, "
            f"such as {missing[0]}. {hint}"
        )
    # No base folder has adapters.
    model.not_in_folder = [name for name in names if ".lora_" not in name]


def first_names(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _by_folder_name(view: FolderView, values: Mapping[str, T]) -> dict[str, T]:
    named = ((view.folder_name(name), value) for name, value in values.items())
    return {name: value for name, value in named if name is not None}


def _is_expected(view: FolderView, name: str) -> bool:
    """May a folder have this entry, which its model has not?

    Entries of other parts of the folder, heads of a backbone, and what transformers drops.
    """
    model = view.model
    if view.own_name(name) is None:
        return True
    dropped = {r"rotary_emb\.inv_freq", r"position_ids$"}
    dropped |= set(model._keys_to_ignore_on_load_unexpected or ())
    is_backbone = model.base_model is model
    if is_backbone and not name.startswith(f"{model.base_model_prefix}."):
        return True
    return any(re.search(pattern, name) for pattern in dropped)


# Receiving a stream of weights, given by Hugging Face names as full tensors, into a model on any layout.
#
# The stream may come in any order. Entries that transformers converts together (experts, fused projections) wait until
# all of them have arrived.


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
            self._skeleton, entries, self._hf, "the stream of weights", elsewhere=self._elsewhere
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


# What has changed of weights since they were sent the last time, bit by bit: for receivers that keep a copy.


class Delta(NamedTuple):
    """A rank's share of what has changed of a weight: indices into the flat full tensor, and the new values."""

    name: str  # of Hugging Face
    shape: torch.Size
    indices: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        """Of the full weight."""
        return self.shape.numel() * self.values.itemsize


def applied_delta(weights: dict[str, Tensor], delta: Iterable[Delta]) -> dict[str, Tensor]:
    """The weights after changes, those of all ranks; what a weight lacks at first is in its first delta."""
    for one in delta:
        if one.name not in weights:
            weights[one.name] = torch.zeros(one.shape, dtype=one.values.dtype)
        weights[one.name].view(-1)[one.indices] = one.values
    return weights


class Deltas:
    """Of one sender; it keeps its rank's share of the weights that it sent, in host memory."""

    def __init__(self) -> None:
        self._sent: dict[str, Tensor] = {}

    def of(self, weights: Iterable[tuple[str, Tensor]], rank: int, ranks: int) -> Iterator[Delta]:
        """Yield this rank's share of what has changed; at first of everything."""
        for name, full in weights:
            first = full.numel() * rank // ranks
            own = full.detach().reshape(-1)[first : full.numel() * (rank + 1) // ranks]
            sent = self._sent.get(name)
            is_changed = torch.ones_like(own, dtype=torch.bool)
            if sent is not None and sent.dtype == own.dtype:
                both = [one.contiguous().view(torch.uint8) for one in (own.cpu(), sent)]
                # Of each byte; a small weight has no element on some ranks.
                is_changed = (both[0] != both[1]).view(len(own), own.itemsize).any(1)
            self._sent[name] = own.to("cpu", copy=True)
            changed = is_changed.cpu().nonzero()[:, 0]
            yield Delta(name, full.shape, changed + first, self._sent[name][changed])
