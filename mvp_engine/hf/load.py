"""Hugging Face folders in: each rank reads the slices of its own shards, through transformers' conversion tables.

The tables map entries of the files to parameters: renamed, stacked (experts) or fused (projections). A renamed entry
is read slice by slice. Of a parameter that is stacked from entries, a rank reads the entries of its own rows. Any other
parameter is converted completely, one at a time.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mvp_engine.distributed.dtensor import local_shards, shard_slices
from mvp_engine.errors import UserError
from mvp_engine.hf.weight_files import Index, WeightFiles
from mvp_engine.ops.nf4 import Nf4Linear

# lerobot saves pi0 as a part of its policy; the folder that it starts from, and transformers' table, have no prefix.
_LEROBOT_PREFIX = re.compile(r"^model\.(?=paligemma_with_expert\.|action_|state_proj\.)")


@dataclass(frozen=True)
class FolderParameter:
    """A parameter that a folder has: its shape, and a function that reads a slice of it."""

    shape: torch.Size
    read: Callable[[Index], Tensor]


@dataclass(frozen=True)
class FolderGroup:
    """Entries of a folder that are converted together, and the parameters that they become; mostly one of each."""

    entries: list[str]
    params: dict[str, FolderParameter]


class Entries(Protocol):
    """Tensors by the names of a Hugging Face folder: its weight files, or tensors in memory."""

    def __iter__(self) -> Iterator[str]: ...

    def meta(self, key: str) -> Tensor: ...

    def read(self, key: str, index: Index = ()) -> Tensor: ...


def load(
    model: Any,
    folder: Path,
    params: Mapping[str, Tensor],
    quantized: Mapping[str, Nf4Linear] | None = None,
    elsewhere: Set[str] = frozenset(),
) -> tuple[set[str], list[str]]:
    """Fill `params`, given by their names in the Hugging Face `model`, from a folder; each rank its own shards.

    `quantized` are layers by the names of their weights, `elsewhere` parameters that other ranks fill. Returns the
    names that were filled, here or elsewhere, and the entries of the files that belong to none of them.
    """
    return load_entries(model, WeightFiles(folder), params, str(folder), quantized, elsewhere)


def load_entries(
    model: Any,
    files: Entries,
    params: Mapping[str, Tensor],
    folder: str,
    quantized: Mapping[str, Nf4Linear] | None = None,
    elsewhere: Set[str] = frozenset(),
) -> tuple[set[str], list[str]]:
    """As `load`, from any entries; `folder` names them in errors."""
    loaded: set[str] = set()
    unused: list[str] = []
    first_names: dict[int, str] = {}  # of tied parameters, the name that was filled
    for group in folder_groups(model, files):
        if not group.params.keys() & (params.keys() | elsewhere):
            unused += group.entries
        loaded |= group.params.keys() & elsewhere
        for name, source in group.params.items():
            if name not in params:
                continue
            first_name = first_names.setdefault(id(params[name]), name)
            if first_name == name:
                layer = (quantized or {}).get(name)
                _fill(name, params[name] if layer is None else layer, source, folder)
            elif not _is_equal(params[name], source):
                raise UserError(
                    f"{folder}: its config ties {name} to {first_name}, but its files have both, and they differ. "
                    "Set model.config.tie_word_embeddings=false to train them as they are"
                )
            loaded.add(name)
    return loaded, unused


def load_by_name(folder: Path, params: Mapping[str, Tensor]) -> None:
    """Fill `params` from entries of the same names, such as heads that are not part of the Hugging Face model."""
    load_entries_by_name(WeightFiles(folder), params, str(folder))


def load_entries_by_name(files: Entries, params: Mapping[str, Tensor], folder: str) -> None:
    for name, param in params.items():
        source = FolderParameter(files.meta(name).shape, partial(files.read, name))
        _fill(name, param, source, folder)


def folder_groups(model: Any, files: Entries, keep_converted: bool = True) -> Iterator[FolderGroup]:
    """The entries of a folder as parameters of a Hugging Face `model`.

    `keep_converted`: a converted group is kept in memory until it is dropped, for callers that read a parameter in
    several slices.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    mapping = get_model_conversion_mapping(model)
    converters: dict[str, Any] = {}  # by source pattern
    for entry in mapping:
        if isinstance(entry, WeightConverter):
            converters.update(dict.fromkeys(entry.source_patterns, entry))
    for name, entries in _entries_by_parameter(model, files, mapping).items():
        keys = [key for key, _ in entries]
        pattern = entries[0][1]
        if pattern is None:
            plain = FolderParameter(files.meta(keys[0]).shape, partial(files.read, keys[0]))
            yield FolderGroup(keys, {name: plain})
            continue
        by_pattern: dict[str, list[str]] = {}
        for key, key_pattern in entries:
            by_pattern.setdefault(str(key_pattern), []).append(key)
        converted = _Converted(files, model, converters[pattern], name, by_pattern, keep_converted)
        yield FolderGroup(keys, converted.params())


def _entries_by_parameter(
    model: Any, files: Entries, mapping: list[Any]
) -> dict[str, list[tuple[str, str | None]]]:
    """For each parameter (of a converted group: its first), its entries and the converter pattern that each matched."""
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix = model.base_model_prefix
    known = dict(model.state_dict())
    is_pi0 = getattr(model.config, "model_type", None) == "pi0"
    found: dict[str, list[tuple[str, str | None]]] = {}
    for key in sorted(files, key=dot_natural_key):
        source = _LEROBOT_PREFIX.sub("", key) if is_pi0 else key
        name, pattern = rename_source_key(source, renamings, converters, prefix, known)
        if name not in known and key in known:  # the entry has today's name already
            name, pattern = rename_source_key(key, [], [], prefix, known)
        found.setdefault(name, []).append((key, pattern))
    return found


class _Converted:
    """Parameters that one of transformers' converters makes of several entries."""

    def __init__(
        self,
        files: Entries,
        model: Any,
        converter: Any,
        first_name: str,
        entries: dict[str, list[str]],
        keep: bool,
    ) -> None:
        self.files = files
        self.model = model
        self.converter = converter
        self.first_name = first_name  # of the parameters
        self.entries = entries  # by source pattern
        self.keep = keep
        self._cached: dict[str, Tensor] | None = None
        on_meta = self._convert(files.meta)
        self.shapes = {name: value.shape for name, value in on_meta.items()}
        self._is_stacked = self._has_one_entry_per_row()

    def params(self) -> dict[str, FolderParameter]:
        found: dict[str, FolderParameter] = {}
        for name, shape in self.shapes.items():
            found[name] = FolderParameter(shape, partial(self.read, name))
        return found

    def read(self, name: str, index: Index) -> Tensor:
        if self._is_stacked and index:
            [rows] = self._convert(self.files.read, index[0]).values()
            return rows[(slice(None), *index[1:])]
        converted = self._cached
        if converted is None:
            converted = self._convert(self.files.read)
        if self.keep:
            self._cached = converted
        return converted[name][index]

    def _has_one_entry_per_row(self) -> bool:
        """Whether each row of the parameter is made of one entry of each pattern, as stacked experts are.

        Then a slice of the rows needs only their entries.
        """
        if len(self.shapes) != 1:
            return False
        [shape] = self.shapes.values()
        if not shape or any(len(keys) != shape[0] for keys in self.entries.values()):
            return False
        first_row = self._convert(self.files.meta, slice(0, 1))
        return [value.shape for value in first_row.values()] == [(1, *shape[1:])]

    def _convert(
        self, read: Callable[[str], Tensor], rows: slice = slice(None)
    ) -> dict[str, Tensor]:
        converter = copy.deepcopy(self.converter)  # it collects tensors
        for pattern, keys in self.entries.items():
            for key in keys[rows]:
                converter.add_tensor(self.first_name, key, pattern, read(key))
        made = converter.convert(self.first_name, model=self.model, config=self.model.config)
        return {n: value[0] if isinstance(value, list) else value for n, value in made.items()}


def _fill(name: str, target: Tensor | Nf4Linear, source: FolderParameter, folder: str) -> None:
    """Fill a parameter, or the weight of a quantized layer."""
    if isinstance(target, Nf4Linear):
        shape: tuple[int, ...] = (target.out_features, target.in_features)
    else:
        shape = tuple(target.shape)
    if shape != tuple(source.shape):
        raise UserError(
            f"{folder}: {name} has the shape {tuple(source.shape)} there and {shape} in the model's config"
        )

    def read(index: Index, wants_floats: bool = True) -> Tensor:
        value = source.read(index)
        is_quantized = not value.is_floating_point() or value.itemsize < 2
        if wants_floats and is_quantized:
            raise UserError(
                f"{folder}: {name} is quantized ({value.dtype}), which cannot be trained; use the original weights"
            )
        return value

    with torch.no_grad():
        if isinstance(target, Nf4Linear):
            target.fill(read)
            return
        for offset, shard in local_shards(target):
            shard.copy_(read(shard_slices(offset, shard), shard.is_floating_point()))


def _is_equal(param: Tensor, source: FolderParameter) -> bool:
    if param.shape != source.shape:
        return False
    for offset, shard in local_shards(param):
        if not torch.equal(shard, source.read(shard_slices(offset, shard)).to(shard)):
            return False
    return True
