"""Reading and writing one checkpoint folder: a safetensors file for each rank that wrote.

A tensor lies there as boxes; each file says of which tensors its boxes are part and where in them they belong. So a
rank writes what it has without asking the others, and whoever reads takes the boxes that overlap its own, whatever the
layout was. What is no tensor travels as bytes inside a uint8 tensor. Nothing is unpickled freely: headers are JSON,
and bytes are read with `weights_only`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import time
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mvp_engine import __version__, files
from mvp_engine.checkpoint.safetensors_io import SafetensorsReader, write_safetensors
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.distributed.dtensor import local_shards
from mvp_engine.errors import UserError
from mvp_engine.files import fsync_path, temporary_path

META = "meta.json"  # a checkpoint that has it is complete

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape


class Piece(NamedTuple):
    """A box of a tensor, to be written."""

    name: str
    whole: torch.Size
    offset: tuple[int, ...]
    data: Tensor


class Entry(NamedTuple):
    """A tensor that a checkpoint holds."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: dict[Box, tuple[Path, str]]  # in which file, under which key


def cut(tensors: dict[str, Tensor]) -> Iterator[Piece]:
    """This rank's pieces of the tensors, as views."""
    for name, tensor in tensors.items():
        for offset, data in local_shards(tensor):
            yield Piece(name, tensor.shape, offset, data)


def write(folder: Path, parts: Iterable[Piece], group: dist.ProcessGroup | None) -> None:
    """Write this rank's file; returns when all ranks have written theirs. A failure on one rank raises on all."""
    rank, ranks = (group.rank(), group.size()) if group else (0, 1)
    with raise_on_all_ranks(group):
        data, about = {}, {}
        for name, whole, offset, tensor in parts:
            key = f"{name}@{','.join(map(str, offset))}"
            data[key] = tensor
            about[key] = {
                "name": name,
                "dtype": str(tensor.dtype),
                "shape": whole,
                "offset": offset,
            }
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {"ranks": str(ranks), "pieces": json.dumps(about)}
        write_safetensors(data, file_of(folder, rank), metadata)


class Reader:
    """One checkpoint folder. Opening it reads headers; of the data only what is asked for is read, from mapped files.

    Pieces that several ranks wrote count once. Distinct ones never overlap, so sizes tell whether all are there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._slices = SafetensorsReader()
        if not any(folder.glob("rank_*.safetensors")):
            raise UserError(f"{folder} is no checkpoint: it has no rank_*.safetensors")
        rank, ranks = 0, 1
        while rank < ranks:
            ranks, rank = self._open(file_of(folder, rank)), rank + 1
        for name, entry in self.entries.items():
            if sum(prod(shape) for _, shape in entry.pieces) != prod(entry.shape):
                raise UserError(
                    f"checkpoint {folder} has only parts of {name}. Resume from an older one."
                )

    def _open(self, path: Path) -> int:
        try:
            file = safe_open(path, "pt")
            about = file.metadata()
            for key, part in json.loads(about["pieces"]).items():
                dtype, size = (
                    getattr(torch, part["dtype"].removeprefix("torch.")),
                    file.get_slice(key).get_shape(),
                )
                entry = self.entries.setdefault(
                    part["name"], Entry(torch.Size(part["shape"]), dtype, {})
                )
                entry.pieces[tuple(part["offset"]), tuple(size)] = (path, key)
            return int(about["ranks"])
        except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            raise UserError(
                f"checkpoint file {path} cannot be read ({why}). Resume from an older one."
            ) from error

    def read(
        self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """A box of a tensor, or the whole, on the CPU."""
        entry = self.entries[name]
        box = torch.empty(torch.Size(entry.shape if shape is None else shape), dtype=entry.dtype)
        self._copy(entry, (0,) * box.ndim if offset is None else offset, box)
        return box

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Fill the tensors in place; of a DTensor the part that this rank holds."""
        for name, tensor in tensors.items():
            there, here = tuple(self.entries[name].shape), tuple(tensor.shape)
            if there != here:
                raise UserError(
                    f"checkpoint {self.folder}: {name} is {there} there and {here} here"
                )
            for offset, part in local_shards(tensor):
                self._copy(self.entries[name], offset, part)

    def _copy(self, entry: Entry, offset: Sequence[int], box: Tensor) -> None:
        ends = [o + n for o, n in zip(offset, box.shape, strict=True)]
        if any(end > size for end, size in zip(ends, entry.shape, strict=True)):
            raise IndexError(
                f"there is no {tuple(box.shape)} at {tuple(offset)} in {tuple(entry.shape)}"
            )
        for (start, size), (path, key) in entry.pieces.items():
            low = [max(o, s) for o, s in zip(offset, start, strict=True)]
            high = [min(end, s + n) for end, s, n in zip(ends, start, size, strict=True)]
            both = list(zip(low, high, strict=True))
            if all(a < b for a, b in both):
                here, there = (
                    tuple(slice(a - o, b - o) for (a, b), o in zip(both, origin, strict=True))
                    for origin in (offset, start)
                )
                box[here].copy_(self._slices.read(path, key, there))


def publish(temporary: Path, final: Path, meta: dict[str, Any]) -> None:
    """Write `meta.json`, which marks a checkpoint as complete, and give the checkpoint its name.

    An older checkpoint of the same name is replaced.
    """
    versions = {"mvp_engine": __version__, "torch": torch.__version__, "saved": time.time()}
    (temporary / META).write_text(json.dumps({**meta, **versions}, indent=2) + "\n")
    fsync_path(temporary / META)
    files.publish(temporary, final, replace_folder=True)


def publish_leftover(final: Path) -> None:
    """Give a checkpoint its name that was complete when its writer was killed before the rename."""
    temporary = temporary_path(final)
    # `meta.json` is written last; one that is cut short is not valid JSON.
    with contextlib.suppress(OSError, json.JSONDecodeError):
        json.loads((temporary / META).read_text())
        if not final.exists():
            os.replace(temporary, final)


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.safetensors"


def to_bytes(value: Any) -> Tensor:
    """Refuses what could not be read again, before it is written."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    try:
        from_bytes(data)
    except pickle.UnpicklingError as error:
        why = next(
            (line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line),
            str(error),
        )
        raise UserError(
            f"a checkpoint holds tensors, numbers, strings, lists and dicts; something in the state is neither: {why}. "
            "Look at extra_state() and at the loader's and scheduler's state_dict()."
        ) from None
    return data


def from_bytes(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)
