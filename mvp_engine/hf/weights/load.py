"""Loads weights from Hugging Face folders: each rank reads the slices of its own shards.

An *entry* is a tensor in a weight file. transformers' conversion rules map entries to parameters: they rename an entry,
stack entries (experts) or fuse them (projections). Of a renamed entry, a rank reads the slices that it holds. Of a
parameter that is stacked from entries, it reads the entries of its own rows. Any other parameter is converted
completely, one at a time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mvp_engine import plugins
from mvp_engine.checkpoint.format import SafetensorsReader
from mvp_engine.distributed.dtensor import local_shards, shard_slices
from mvp_engine.errors import UserError
from mvp_engine.files import is_inside
from mvp_engine.ops.nf4 import Nf4Linear

# The weight files of a Hugging Face folder: one safetensors file, or several with an index.

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PADDED_TO = 64  # a vocabulary that grows gets a multiple of it
HEADS = "heads.safetensors"  # weights of heads that transformers has no class for

Index = tuple[slice, ...]


class WeightFiles:
    """The entries in the weight files of a folder, by name. The constructor reads the headers only."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}  # the file of each entry
        self._shapes: dict[str, list[int]] = {}
        self._reader = SafetensorsReader()
        for path in weight_paths(folder):
            self._read_header(path)
        if (folder / HEADS).is_file():
            self._read_header(folder / HEADS)

    def _read_header(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt")
            for key in file.keys():  # noqa: SIM118 - not a mapping
                self._files[key] = path
                self._shapes[key] = file.get_slice(key).get_shape()
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read: {error}. Is the download complete?") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def paths(self) -> set[Path]:
        return set(self._files.values())

    def meta(self, key: str) -> Tensor:
        """Returns a tensor on the meta device with the shape of an entry."""
        return torch.empty(self._shapes[key], device="meta")

    def read(self, key: str, index: Index = ()) -> Tensor:
        """Returns an entry, or the slice `index` of it."""
        return self._reader.read(self._files[key], key, index)


def weight_paths(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder. If it has a single file and an index, only the former."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        hint = f"; {pickled[0]} is a pickle: save it again as safetensors" if pickled else ""
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if not is_inside(name)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index} cannot be read: {type(error).__name__}: {error}. Is the download complete?"
        ) from None
    if outside:
        raise UserError(
            f"{index} names {outside[0]}, a file outside of its folder, which is not read: move the file into the "
            "folder, or do not trust this model"
        )
    return [folder / name for name in names]


def fingerprint(folder: Path) -> str:
    """Returns a hash of a folder's weights: of 16 samples of 4 KiB of each file, its name and its size."""
    checksum = 0
    for file in sorted(WeightFiles(folder).paths()):
        size = file.stat().st_size
        with open(file, "rb") as data:
            for i in range(16):
                data.seek(size * i // 16)
                checksum = crc32(data.read(4096), checksum)
        checksum = crc32(f"{file.name} {size}".encode(), checksum)
    return f"{checksum:08x}"


@dataclass(frozen=True)
class FolderParameter:
    """A parameter that a folder has: its shape, and a function that reads a slice of it."""

    shape: torch.Size
    read: Callable[[Index], Tensor]


@dataclass(frozen=True)
class FolderGroup:
    """Entries of a folder that are converted together, and the resulting parameters. Most groups have one of each."""

    entries: list[str]
    params: dict[str, FolderParameter]


@dataclass(frozen=True)
class NewRows:
    """Rows that the embeddings of a folder lack, or have never trained: those of added tokens.

    The row of an added token is the mean of the rows of other tokens. Rows that belong to no token, and pad the
    vocabulary, are the mean of all.
    """

    num_known: int  # tokens of the folder's vocabulary: its rows after them belong to no token
    sources: Mapping[
        int, Sequence[int]
    ]  # of each added token, by id: whose rows are averaged; none: all known
    tokens: tuple[str, ...] = ()  # their texts, in the order of `sources`

    @property
    def num_rows(self) -> int:
        """The rows that a vocabulary has with these tokens, if it must grow for them: padded for GEMMs and ranks."""
        return -(-(max(self.sources) + 1) // PADDED_TO) * PADDED_TO

    def extend(self, source: FolderParameter, rows: int) -> FolderParameter:
        """The input or output embedding of the folder with `rows` rows."""
        shape = torch.Size((rows, *source.shape[1:]))
        return FolderParameter(shape, partial(self._read, source, rows))

    def _read(self, source: FolderParameter, rows: int, index: Index) -> Tensor:
        wanted = range(rows)[index[0]] if index else range(rows)
        others = tuple(index[1:])
        known = source.read((slice(wanted.start, min(wanted.stop, source.shape[0])), *others))
        added = [id for id in self.sources if id in wanted]
        padded = range(max(wanted.start, source.shape[0]), wanted.stop)
        if not added and not padded:
            return known
        mean = self._mean(source, range(min(self.num_known, source.shape[0])), others)
        values = torch.cat([known, mean.expand(len(wanted) - len(known), *mean.shape).to(known)])
        for id in added:
            ids = self.sources[id]
            values[id - wanted.start] = self._mean(source, ids, others) if ids else mean
        return values

    def _mean(self, source: FolderParameter, ids: Sequence[int], others: Index) -> Tensor:
        if not isinstance(ids, range):
            rows = [source.read((slice(id, id + 1), *others)).float() for id in ids]
            return torch.cat(rows).mean(0)
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(ids), 8192):  # in slices: a vocabulary may have gigabytes
            part = slice(start, min(start + 8192, len(ids)))
            total = total + source.read((part, *others)).sum(0, dtype=torch.float64)
        return (total / len(ids)).float()


class Entries(Protocol):
    """Tensors by the names that they have in a Hugging Face folder: in its weight files, or in memory."""

    def __iter__(self) -> Iterator[str]: ...

    def meta(self, key: str) -> Tensor: ...

    def read(self, key: str, index: Index = ()) -> Tensor: ...


def load(
    model: Any,
    folder: Path,
    params: Mapping[str, Tensor],
    quantized: Mapping[str, Nf4Linear] | None = None,
    elsewhere: Set[str] = frozenset(),
    new_rows: NewRows | None = None,
) -> tuple[set[str], list[str]]:
    """Fills `params`, given by their names in the Hugging Face `model`, from a folder. Each rank fills its own shards.

    `quantized`: quantized layers by the names of their weights. `elsewhere`: names of parameters that other ranks fill.
    `new_rows`: of tokens that the folder does not know. Returns the names that were filled, here or elsewhere, and the
    entries of the files that belong to none of them.
    """
    files = WeightFiles(folder)
    return load_entries(model, files, params, str(folder), quantized, elsewhere, new_rows)


def load_entries(
    model: Any,
    files: Entries,
    params: Mapping[str, Tensor],
    folder: str,
    quantized: Mapping[str, Nf4Linear] | None = None,
    elsewhere: Set[str] = frozenset(),
    new_rows: NewRows | None = None,
) -> tuple[set[str], list[str]]:
    """As `load`, from any entries. `folder` is the name for them in error messages."""
    loaded: set[str] = set()
    unused: list[str] = []
    # By the id of a parameter: of its tied names, the one that was filled.
    first_names: dict[int, str] = {}
    for group in folder_groups(model, files, new_rows=new_rows):
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


def folder_groups(
    model: Any, files: Entries, keep_converted: bool = True, new_rows: NewRows | None = None
) -> Iterator[FolderGroup]:
    """Yields the entries of a folder, in groups, with the parameters of a Hugging Face `model` that they become.

    `keep_converted`: a group keeps its converted tensors for as long as it exists, so that reading a parameter in
    several slices converts it once.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    rules = get_model_conversion_mapping(model)
    embeddings = {} if new_rows is None else _vocabulary_rows(model)
    converters: dict[str, Any] = {}  # by source pattern
    for rule in rules:
        if isinstance(rule, WeightConverter):
            converters.update(dict.fromkeys(rule.source_patterns, rule))
    for name, entries in _entries_by_parameter(model, files, rules).items():
        keys = [key for key, _ in entries]
        pattern = entries[0][1]
        if pattern is None:
            plain = FolderParameter(files.meta(keys[0]).shape, partial(files.read, keys[0]))
            if new_rows is not None and name in embeddings:
                plain = new_rows.extend(plain, embeddings[name])
            yield FolderGroup(keys, {name: plain})
            continue
        by_pattern: dict[str, list[str]] = {}
        for key, key_pattern in entries:
            by_pattern.setdefault(str(key_pattern), []).append(key)
        converted = _Converted(files, model, converters[pattern], name, by_pattern, keep_converted)
        yield FolderGroup(keys, converted.params())


def _vocabulary_rows(model: Any) -> dict[str, int]:
    """The number of rows of each parameter of the input and output embeddings, by its names."""
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    params = {id(p) for module in modules if module is not None for p in module.parameters(False)}
    state = model.state_dict(keep_vars=True)
    return {name: len(value) for name, value in state.items() if id(value) in params}


def _entries_by_parameter(
    model: Any, files: Entries, rules: list[Any]
) -> dict[str, list[tuple[str, str | None]]]:
    """Returns, by parameter name, its entries, each with the source pattern of the converter that it matched, or None.

    Entries that become several parameters are listed under the first of these.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix = model.base_model_prefix
    tensors = dict(model.state_dict())
    folder_types = plugins.model_folders()
    by_parameter: dict[str, list[tuple[str, str | None]]] = {}
    for key in sorted(files, key=dot_natural_key):
        source = key
        for folder_type in folder_types:
            source = folder_type.weight_name(model.config, source)
        name, pattern = rename_source_key(source, renamings, converters, prefix, tensors)
        # An entry may have the current name already, which a rule for older names has changed.
        if name not in tensors and key in tensors:
            name, pattern = rename_source_key(key, [], [], prefix, tensors)
        by_parameter.setdefault(name, []).append((key, pattern))
    return by_parameter


class _Converted:
    """Parameters that one of transformers' weight converters computes from several entries."""

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
        self.first_name = first_name  # of the parameters: transformers converts them under it
        self.entries = entries  # by source pattern
        self.keep = keep
        self._cached: dict[str, Tensor] | None = None
        on_meta = self._convert(files.meta)  # for the shapes, without reading data
        self.shapes = {name: value.shape for name, value in on_meta.items()}
        self._is_stacked = self._has_one_entry_per_row()

    def params(self) -> dict[str, FolderParameter]:
        params: dict[str, FolderParameter] = {}
        for name, shape in self.shapes.items():
            params[name] = FolderParameter(shape, partial(self.read, name))
        return params

    def read(self, name: str, index: Index) -> Tensor:
        if self._is_stacked and index:  # only the entries of these rows are read
            [rows] = self._convert(self.files.read, index[0]).values()
            return rows[(slice(None), *index[1:])]
        converted = self._cached
        if converted is None:
            converted = self._convert(self.files.read)
        if self.keep:
            self._cached = converted
        return converted[name][index]

    def _has_one_entry_per_row(self) -> bool:
        """Whether row i of the parameter is computed from entry i of each pattern, as with stacked experts.

        Then a slice of rows needs only the entries of these rows.
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
        converter = copy.deepcopy(self.converter)  # a converter keeps the tensors that are added
        for pattern, keys in self.entries.items():
            for key in keys[rows]:
                converter.add_tensor(self.first_name, key, pattern, read(key))
        converted = converter.convert(self.first_name, model=self.model, config=self.model.config)
        # Some conversions return a list of one tensor.
        return {
            name: value[0] if isinstance(value, list) else value
            for name, value in converted.items()
        }


def _fill(name: str, target: Tensor | Nf4Linear, source: FolderParameter, folder: str) -> None:
    """Fills this rank's shards of a parameter, or the weight of a quantized layer."""
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
        # Integers, or floats of 8 bits and less.
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
    """Whether this rank's shards of a parameter have the values of the folder, cast to their dtype."""
    if param.shape != source.shape:
        return False
    for offset, shard in local_shards(param):
        if not torch.equal(shard, source.read(shard_slices(offset, shard)).to(shard)):
            return False
    return True
