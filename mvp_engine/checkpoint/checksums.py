"""Checksums of a checkpoint: CRC-32 of each shard, computed from memory by a save, verified from disk before a load.

A disk or a network file system may return other bytes than were written, and weights with one wrong bit train on
without an error. CRC-32 runs at 4 GB/s on one core. Checkpoints without checksums, of earlier versions, are loaded
unverified.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mvp_engine.errors import UserError
from mvp_engine.files import is_inside, leads_out

CRC = "crc32"  # the key of a checksum in a header
OLDER = "Resume from an older one."
CHUNK_BYTES = 16 * 2**20
HEADER_SIZE_BYTES = 8  # a safetensors file begins with the size of its header


class CorruptCheckpoint(UserError):
    """A file of a checkpoint cannot be read, or is not what was written."""


_UNREADABLE = (
    OSError,
    SafetensorError,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A context in which an error of reading `path` becomes a `CorruptCheckpoint`."""
    try:
        yield
    except _UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}"
        raise CorruptCheckpoint(
            f"checkpoint file {path} cannot be read ({reason}). {OLDER}"
        ) from error


class Header(NamedTuple):
    entries: dict[str, Any]
    size: int  # bytes, until the data begins


def read_header(path: Path) -> Header:
    """The header of a safetensors file, without opening the file as a whole."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(HEADER_SIZE_BYTES), "little")
        return Header(json.loads(file.read(size)), HEADER_SIZE_BYTES + size)


def shard_checksum(header: dict[str, Any], data: Tensor) -> int:
    """The checksum of a shard: of its bytes, and of what the header says about them."""
    raw = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return zlib.crc32(raw, _seed(header, data.dtype, data.shape))


def header_checksum(ranks: str, shards: str) -> int:
    """The checksum of a file's own header, which holds those of its shards."""
    return zlib.crc32(f"{ranks} {shards}".encode())


def folder_checksums(folder: Path) -> dict[str, int]:
    """The checksums of the files in a checkpoint that have none of their own: tokenizer, config of the model."""
    found: dict[str, int] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.name.startswith("rank_"):
            found[str(file.relative_to(folder))] = _file_checksum(file)
    return found


def verify_rank_file(path: Path, names: Callable[[str], bool]) -> None:
    """Raise `CorruptCheckpoint` unless the entries that `names` accepts hold what was written."""
    with reading(path):
        problem = _problem(path, names)
    if problem is not None:
        raise CorruptCheckpoint(
            f"checkpoint file {path} is corrupt: the checksum of {problem} is wrong. {OLDER}"
        )


def verify_folder(folder: Path, expected: dict[str, int]) -> None:
    """As `verify_rank_file`, for the files of `folder_checksums`."""
    for file in folder.rglob("*"):
        if leads_out(file, folder):
            raise CorruptCheckpoint(
                f"checkpoint file {file} is a link to {file.resolve()}, which is not read. {OLDER}"
            )
    for name, checksum in expected.items():
        if not is_inside(name):
            raise CorruptCheckpoint(f"checkpoint {folder} names a file outside: {name}. {OLDER}")
        file = folder / name
        if not file.is_file() or _file_checksum(file) != checksum:
            state = "corrupt: its checksum is wrong" if file.is_file() else "missing"
            raise CorruptCheckpoint(f"checkpoint file {file} is {state}. {OLDER}")


def _problem(path: Path, names: Callable[[str], bool]) -> str | None:
    """The name of the first entry with a wrong checksum."""
    with safe_open(path, "pt") as file, open(path, "rb") as raw:
        places, header_size = read_header(path)
        metadata = places["__metadata__"]
        header = json.loads(metadata["pieces"])
        if CRC not in metadata:
            return None  # of an earlier version
        if header_checksum(metadata["ranks"], metadata["pieces"]) != int(metadata[CRC]):
            return "its header"
        for key, about in header.items():
            if not names(about["name"]):
                continue
            start, end = places[key]["data_offsets"]
            raw.seek(header_size + start)
            shape = places[key]["shape"]
            empty = file.get_slice(key)[:0] if shape else file.get_tensor(key)
            if _crc(raw, end - start, _seed(about, empty.dtype, shape)) != about[CRC]:
                return str(about["name"])
    return None


def _seed(header: dict[str, Any], dtype: torch.dtype, shape: Any) -> int:
    place = [header["name"], str(dtype), list(shape), list(header["shape"]), list(header["offset"])]
    return zlib.crc32(json.dumps(place).encode())


def _crc(file: BinaryIO, size: int, checksum: int = 0) -> int:
    """Continue a checksum with the next `size` bytes of a file."""
    while size > 0:
        chunk = file.read(min(size, CHUNK_BYTES))
        if not chunk:
            raise ValueError("the file is cut short")
        size -= len(chunk)
        checksum = zlib.crc32(chunk, checksum)
    return checksum


def _file_checksum(path: Path) -> int:
    with open(path, "rb") as file:
        return _crc(file, path.stat().st_size)
