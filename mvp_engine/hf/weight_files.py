"""The weight files of a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mvp_engine.checkpoint.safetensors_io import SafetensorsReader
from mvp_engine.errors import UserError
from mvp_engine.files import is_inside

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADS = "heads.safetensors"  # weights of a model type that transformers has no class for

Index = tuple[slice, ...]


class WeightFiles:
    """The tensors of a folder by the names of their entries. Opening it reads the headers only."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}  # by entry
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
        """An entry's shape as a tensor on the meta device."""
        return torch.empty(self._shapes[key], device="meta")

    def read(self, key: str, index: Index = ()) -> Tensor:
        """An entry, or the slice `index` of it."""
        return self._reader.read(self._files[key], key, index)


def weight_paths(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Where it has a single file and an index, transformers reads the file."""
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
    """A hash of a folder's weights, from 16 samples of 4 KiB of each file and its size."""
    found = 0
    for file in sorted(WeightFiles(folder).paths()):
        size = file.stat().st_size
        with open(file, "rb") as data:
            for i in range(16):
                data.seek(size * i // 16)
                found = crc32(data.read(4096), found)
        found = crc32(f"{file.name} {size}".encode(), found)
    return f"{found:08x}"
