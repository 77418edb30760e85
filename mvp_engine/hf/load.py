"""Hugging Face folders in: each rank reads its own slices of the safetensors, through transformers' conversion tables.

The tables say which entries of the files become which parameters, under which names and by which operations (experts
that are stacked, projections that are fused). An entry that is only renamed is read slice by slice; where parameters
are made of a list of entries, such as experts, a rank reads those of its own rows; anything else is converted whole,
one parameter at a time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mvp_engine.checkpoint.safetensors_io import SafetensorsReader
from mvp_engine.distributed.dtensor import local_shards, shard_slices
from mvp_engine.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

Box = tuple[slice, ...]


class Folder:
    """The safetensors of a Hugging Face folder, by the names of their entries."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if (path / SINGLE).is_file():  # it comes first in transformers, too
            names = [SINGLE]
        elif (path / INDEX).is_file():
            names = _files_of(path / INDEX)
        else:
            found = sorted(file.name for file in path.glob("*.bin"))
            why = (
                f"; {found[0]} would have to be unpickled: save it again as safetensors"
                if found
                else ""
            )
            raise UserError(f"{path} has neither {SINGLE} nor {INDEX}{why}")
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, list[int]] = {}
        self._slices = SafetensorsReader()
        for name in names:
            try:
                file = safe_open(path / name, framework="pt")
                for key in file.keys():  # noqa: SIM118 - no mapping
                    self._files[key], self._shapes[key] = (
                        path / name,
                        file.get_slice(key).get_shape(),
                    )
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{path / name} cannot be read: {error}. Is the download complete?"
                ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def files(self) -> set[Path]:
        return set(self._files.values())

    def meta(self, key: str) -> Tensor:
        return torch.empty(self._shapes[key], device="meta")

    def read(self, key: str, box: Box | None = None) -> Tensor:
        return self._slices.read(self._files[key], key, box or ())


def _files_of(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index} cannot be read: {type(error).__name__}: {error}. Is the download complete?"
        ) from None


class _Converted:
    """Parameters that a converter of transformers makes of several entries. `keep`: they are converted once."""

    def __init__(
        self,
        folder: Folder,
        model: Any,
        converter: Any,
        first: str,
        keys: list[tuple[str, str]],
        keep: bool,
    ) -> None:
        self.folder, self.model, self.converter, self.first, self.keep = (
            folder,
            model,
            converter,
            first,
            keep,
        )
        self.lists: dict[str, list[str]] = {}
        for key, pattern in keys:
            self.lists.setdefault(pattern, []).append(key)
        self.shapes = {
            name: value.shape for name, value in self._convert(folder.meta, None).items()
        }
        self._cached: dict[str, Tensor] | None = None
        self._by_rows = self._one_row_each()

    def _one_row_each(self) -> bool:
        """Is each row of the parameter made of one entry of each list? Then a part of the rows needs but these."""
        count = {len(keys) for keys in self.lists.values()}
        rows = [shape[0] if shape else 0 for shape in self.shapes.values()]
        if len(self.shapes) != 1 or count != set(rows):
            return False
        one = self._convert(self.folder.meta, slice(0, 1))
        return [value.shape for value in one.values()] == [
            (1, *shape[1:]) for shape in self.shapes.values()
        ]

    def read(self, name: str, box: Box) -> Tensor:
        if self._by_rows and box:
            return next(iter(self._convert(self.folder.read, box[0]).values()))[
                (slice(None), *box[1:])
            ]
        made = self._convert(self.folder.read, None) if self._cached is None else self._cached
        self._cached = made if self.keep else None
        return made[name][box]

    def _convert(self, read: Callable[[str], Tensor], rows: slice | None) -> dict[str, Tensor]:
        converter = copy.deepcopy(self.converter)
        for pattern, keys in self.lists.items():
            for key in keys[rows] if rows else keys:
                converter.add_tensor(self.first, key, pattern, read(key))
        given = converter.convert(self.first, model=self.model, config=self.model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in given.items()
        }


Made = dict[
    str, tuple[torch.Size, Callable[[Box], Tensor]]
]  # a parameter's shape, and a way to read a box of it


def parameters_in(model: Any, path: Path, keep: bool = True) -> Iterator[tuple[list[str], Made]]:
    """The parameters of a Hugging Face `model` that a folder has: entries of the files, and what they make together.

    `keep`: what is converted is kept until its group is dropped, for those who read a parameter box by box.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    folder = Folder(path)
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    known = dict(model.state_dict())
    groups: dict[str, list[tuple[str, str | None]]] = {}
    for key in sorted(folder, key=dot_natural_key):
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, known
        )
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, known)
        groups.setdefault(name, []).append((key, pattern))
    for name, keys in groups.items():
        key, pattern = keys[0]
        made: Made = {name: (folder.meta(key).shape, partial(folder.read, key))}
        if pattern is not None:
            lists = [(key, str(pattern)) for key, pattern in keys]
            converted = _Converted(folder, model, by_pattern[pattern], name, lists, keep)
            made = {
                target: (shape, partial(converted.read, target))
                for target, shape in converted.shapes.items()
            }
        yield [key for key, _ in keys], made


def load(model: Any, path: Path, params: Mapping[str, Tensor]) -> tuple[set[str], list[str]]:
    """Fill `params` (by their names in the Hugging Face `model`) from a folder; each rank its own part of them.

    Gives the names that were filled, and the entries of the files that nothing asked for.
    """
    loaded: set[str] = set()
    unused: list[str] = []
    by_tensor: dict[int, str] = {}  # the name under which a parameter was filled

    def fill(name: str, shape: torch.Size, read: Callable[[Box], Tensor]) -> None:
        param = params[name]
        first = by_tensor.setdefault(id(param), name)
        if first == name:
            _fill(name, param, shape, read, path)
        elif param.shape != shape or any(
            not torch.equal(p, read(shard_slices(o, p)).to(p)) for o, p in local_shards(param)
        ):
            raise UserError(
                f"{path}: its config ties {name} to {first}, but its files have both, and they differ. "
                "Set model.config.tie_word_embeddings=false to train them as they are"
            )
        loaded.add(name)

    for keys, made in parameters_in(model, path):
        for name in [name for name in made if name in params]:
            fill(name, *made[name])
        if not made.keys() & params.keys():
            unused += keys
    return loaded, unused


def fingerprint(path: Path) -> str:
    """Tells folders of other weights apart, by a few kilobytes of each file."""
    found = 0
    for file in sorted(Folder(path).files()):
        size = file.stat().st_size
        with open(file, "rb") as data:
            for place in range(16):
                data.seek(size * place // 16)
                found = crc32(data.read(4096), found)
        found = crc32(f"{file.name} {size}".encode(), found)
    return f"{found:08x}"


def load_plain(path: Path, params: Mapping[str, Tensor]) -> None:
    """Fill `params` from entries of the same names: what stands beside the Hugging Face model."""
    folder = Folder(path)
    for name, param in params.items():
        _fill(name, param, folder.meta(name).shape, partial(folder.read, name), path)


def _fill(
    name: str, param: Tensor, shape: torch.Size, read: Callable[[Box], Tensor], path: Path
) -> None:
    if param.shape != shape:
        raise UserError(
            f"{path}: {name} is {tuple(shape)} there and {tuple(param.shape)} in the model's config"
        )
    with torch.no_grad():
        for offset, part in local_shards(param):
            value = read(shard_slices(offset, part))
            if part.is_floating_point() and (not value.is_floating_point() or value.itemsize < 2):
                raise UserError(
                    f"{path}: {name} is quantised ({value.dtype}), which cannot be trained; take the original"
                )
            part.copy_(value)
