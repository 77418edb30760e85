"""The on-disk format of a checkpoint: one safetensors file for each rank, an index, and `meta.json`, written last.

A file holds shards of tensors, and its header gives the tensor, the full shape and the offset of each. So each rank
writes what it has without a collective, and a reader on any layout reads the slices that overlap its own shards.
State that is no tensor is stored as bytes in a uint8 tensor. Reading never unpickles code: headers are JSON, bytes are
read with `weights_only`.

Safetensors files: writing one durably, reading slices of many with bounded memory.

Checkpoints and Hugging Face folders share this module; what the entries mean is the business of their own formats.

Checksums of a checkpoint: CRC-32 of each shard, computed from memory by a save, verified from disk before a load.

A disk or a network file system may return other bytes than were written, and weights with one wrong bit train on
without an error. CRC-32 runs at 4 GB/s on one core. Checkpoints without checksums, of earlier versions, are loaded
unverified.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mvp_engine import __version__, files
from mvp_engine.distributed.dtensor import local_shards
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import UserError
from mvp_engine.files import fsync_path, is_inside, leads_out


def write_safetensors(
    tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors of any device to one file and flush it to disk. CPU tensors that are contiguous are not copied."""
    data = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(data, file, metadata)
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors creates files as 0600
    fsync_path(file)


class SafetensorsReader:
    """Reads slices of safetensors files, which are memory-mapped.

    The pages that were read of a mapped file count as resident memory until it is closed, so all files are closed
    after `MAX_MAPPED_BYTES`.
    """

    MAX_MAPPED_BYTES = 64 * 2**20

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}
        self._mapped_bytes = 0

    def read(self, path: Path, key: str, index: tuple[slice, ...]) -> Tensor:
        """The slice `index` of one entry; an empty index reads all of it."""
        if self._mapped_bytes > self.MAX_MAPPED_BYTES:
            self._files = {}
            self._mapped_bytes = 0
        if path not in self._files:
            self._files[path] = safe_open(path, "pt")
        value: Tensor = self._files[path].get_slice(key)[index or ...]
        self._mapped_bytes += value.nbytes
        return value


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


META = "meta.json"  # a checkpoint folder with this file is complete
FILES = "files"  # in `meta.json`: the checksums of the other files, by path


class Shard(NamedTuple):
    """A contiguous slice of a tensor, to be written."""

    name: str
    full_shape: torch.Size
    offset: tuple[int, ...]
    data: Tensor


class Entry(NamedTuple):
    """A tensor in a checkpoint."""

    shape: torch.Size
    dtype: torch.dtype


def shards_of(tensors: dict[str, Tensor]) -> Iterator[Shard]:
    """This rank's shards of the tensors, as views."""
    for name, tensor in tensors.items():
        for offset, data in local_shards(tensor):
            yield Shard(name, tensor.shape, offset, data)


def write(folder: Path, shards: Iterable[Shard], group: dist.ProcessGroup | None) -> None:
    """Write this rank's file and wait for the other ranks. An error on one rank is raised on all."""
    rank = group.rank() if group else 0
    num_ranks = group.size() if group else 1
    with raise_on_all_ranks(group):
        tensors: dict[str, Tensor] = {}
        header: dict[str, dict[str, Any]] = {}
        for shard in shards:
            key = shard_key(shard.name, shard.offset)
            tensors[key] = shard.data
            header[key] = {
                "name": shard.name,
                "dtype": str(shard.data.dtype),
                "shape": shard.full_shape,
                "offset": shard.offset,
            }
            header[key][CRC] = shard_checksum(header[key], shard.data)
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {"ranks": str(num_ranks), "pieces": json.dumps(header)}
        metadata[CRC] = str(header_checksum(metadata["ranks"], metadata["pieces"]))
        write_safetensors(tensors, rank_file(folder, rank), metadata)


class Reader:
    """Reads one checkpoint folder. Opening it reads the index only; data is read slice by slice.

    A folder without an index, of an earlier version, is opened by reading the headers of all its files. Shards that
    several ranks wrote count once. Different shards of a tensor never overlap, so their sizes add up to the size of
    the tensor if all are present.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._files = SafetensorsReader()
        self._index: Index | None = None
        self._scanned: dict[str, dict[tuple[Any, Any], SavedShard]] = {}  # without an index
        if (folder / INDEX).is_file():
            with reading(folder / INDEX):
                self._index = Index(folder)
                for name, row in self._index.tensors.items():
                    self.entries[name] = Entry(torch.Size(row.shape), dtype_of(row.dtype))
        elif any(folder.glob("rank_*.safetensors")):
            self._scan()
        else:
            raise CorruptCheckpoint(f"{folder} is not a checkpoint: it has no rank_*.safetensors")

    def shards(self, name: str) -> list[SavedShard]:
        """All shards of a tensor. Raises `CorruptCheckpoint` if some are missing."""
        with reading(self.folder / INDEX):
            shards = self._index.shards(name) if self._index else [*self._scanned[name].values()]
        if sum(prod(shard.shape) for shard in shards) != prod(self.entries[name].shape):
            raise CorruptCheckpoint(
                f"checkpoint {self.folder} has only some shards of {name}. {OLDER}"
            )
        return shards

    def _scan(self) -> None:
        """Read the headers of all files."""
        rank = 0
        num_ranks = 1  # until the first file has been read
        while rank < num_ranks:
            num_ranks = self._read_header(rank)
            rank += 1
        for name in self.entries:
            self.shards(name)  # raises if some are missing

    def _read_header(self, rank: int) -> int:
        """Add the shards of one rank's file; returns the number of files."""
        path = rank_file(self.folder, rank)
        with reading(path):
            file = safe_open(path, "pt")
            metadata = file.metadata()
            for key, shard in json.loads(metadata["pieces"]).items():
                name = shard["name"]
                self.entries.setdefault(
                    name, Entry(torch.Size(shard["shape"]), dtype_of(shard["dtype"]))
                )
                offset = tuple(shard["offset"])
                shape = tuple(file.get_slice(key).get_shape())
                found = self._scanned.setdefault(name, {})
                found[offset, shape] = SavedShard(rank, offset, shape)
            return int(metadata["ranks"])

    def read(
        self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """A slice of a tensor, or the full tensor, on the CPU."""
        entry = self.entries[name]
        out = torch.empty(torch.Size(entry.shape if shape is None else shape), dtype=entry.dtype)
        self._copy(name, self.shards(name), (0,) * out.ndim if offset is None else offset, out)
        return out

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors in place; of a DTensor the shards of this rank."""
        for name, tensor in tensors.items():
            entry = self.entries[name]
            if entry.shape != tensor.shape:
                raise UserError(
                    f"checkpoint {self.folder}: {name} has the shape {tuple(entry.shape)} there and "
                    f"{tuple(tensor.shape)} in this model"
                )
            saved = self.shards(name)
            for offset, shard in local_shards(tensor):
                self._copy(name, saved, offset, shard)

    def _copy(self, name: str, saved: list[SavedShard], offset: Sequence[int], out: Tensor) -> None:
        """Fill `out`, which begins at `offset` in the full tensor, from all saved shards that overlap it."""
        entry = self.entries[name]
        ends = [start + size for start, size in zip(offset, out.shape, strict=True)]
        if any(end > size for end, size in zip(ends, entry.shape, strict=True)):
            raise IndexError(
                f"a slice {tuple(out.shape)} at {tuple(offset)} exceeds the shape {tuple(entry.shape)}"
            )
        for shard in saved:
            overlap = _overlap(offset, out.shape, shard.offset, shard.shape)
            if overlap is not None:
                path = rank_file(self.folder, shard.rank)
                with reading(path):
                    part = _relative(overlap, shard.offset)
                    source = self._files.read(path, shard_key(name, shard.offset), part)
                out[_relative(overlap, offset)].copy_(source)


def _overlap(
    offset: Sequence[int],
    shape: Sequence[int],
    other_offset: Sequence[int],
    other_shape: Sequence[int],
) -> list[slice] | None:
    """The elements that two slices of one tensor have in common, or None."""
    common: list[slice] = []
    for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True):
        start = max(a, b)
        stop = min(a + n, b + m)
        if start >= stop:
            return None
        common.append(slice(start, stop))
    return common


def _relative(slices: Sequence[slice], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(s.start - o, s.stop - o) for s, o in zip(slices, origin, strict=True))


def publish(temporary: Path, final: Path, meta: dict[str, Any]) -> None:
    """Write the index, then `meta.json`, which marks a checkpoint as complete, and give the checkpoint its name.

    `meta`: has at least the `world_size`. An older checkpoint of the same name is replaced.
    """
    write_index(temporary, [rank_file(temporary, rank) for rank in range(meta["world_size"])])
    files.fsync_path(temporary / INDEX)
    versions = {"mvp_engine": __version__, "torch": torch.__version__, "saved": time.time()}
    checksums = {FILES: folder_checksums(temporary)}
    (temporary / META).write_text(json.dumps({**meta, **versions, **checksums}, indent=2) + "\n")
    files.fsync_path(temporary / META)
    files.publish(temporary, final, replace_folder=True)


def verify(
    folder: Path,
    rank: int = 0,
    num_ranks: int = 1,
    names: Callable[[str], bool] = lambda _: True,
) -> None:
    """Raise `CorruptCheckpoint` for a file that is not what was written. Each rank reads every `num_ranks`-th file.

    `names`: which entries of the files will be read; the others are not verified.
    """
    found = set(folder.glob("rank_*.safetensors"))
    with contextlib.suppress(FileNotFoundError):  # written by hand; the reader names missing files
        try:
            meta = json.loads((folder / META).read_text())
        except ValueError:
            raise CorruptCheckpoint(
                f"checkpoint file {folder / META} is not valid JSON. {OLDER}"
            ) from None
        verify_folder(folder, meta.get(FILES, {}) if rank == 0 else {})
        found |= {rank_file(folder, writer) for writer in range(meta.get("world_size", 0))}
    for file in sorted(found)[rank::num_ranks]:
        verify_rank_file(file, names)


def publish_leftover(final: Path) -> None:
    """Rename a checkpoint that was complete when its writer was killed, just before the rename."""
    temporary = files.temporary_path(final)
    # `meta.json` is written last; one that is cut short is not valid JSON.
    with contextlib.suppress(OSError, json.JSONDecodeError):
        json.loads((temporary / META).read_text())
        if not final.exists():
            os.replace(temporary, final)


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.safetensors"


def to_bytes(value: Any) -> Tensor:
    """State as a uint8 tensor; raises `UserError` if `from_bytes` could not read it again."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    try:
        _load(data)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"a checkpoint holds tensors, numbers, strings, lists and dicts; the state has something else: "
            f"{_reason(error)}. Look at extra_state() and at the loader's and scheduler's state_dict()."
        ) from None
    return data


def from_bytes(data: Tensor) -> Any:
    """The state in a uint8 tensor. Only tensors and plain values are read: anything else could run code."""
    try:
        return _load(data)
    except pickle.UnpicklingError as error:
        raise UserError(
            "the checkpoint holds more than tensors, numbers, strings, lists and dicts, and is not loaded, since that "
            f"could run code: {_reason(error)}. Do not trust it"
        ) from None


def _load(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return named[0] if named else str(error)


# The index of a checkpoint: which file holds which shard, so that a reader opens only the files that it needs.
#
# Without it every rank reads the headers of all files: at 1,024 writers of 850 shards 8.5 CPU seconds and 356 MiB for
# each rank, and a million opened files for all. With it: 1.6 s, 12 MiB, 4 files (`benchmarks/checkpoint_index.py`).
# Line 1 of the file is a table of all tensors; each further line holds the shards of one tensor, and a reader parses
# only the lines of its own tensors.

INDEX = "index.jsonl"
VERSION = 1


class IndexedTensor(NamedTuple):
    """A row of the table: a tensor, and where its line lies after the table."""

    dtype: str
    shape: list[int]
    start: int
    size: int


class SavedShard(NamedTuple):
    """A shard of a tensor in a checkpoint, and the rank whose file holds it."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def shard_key(name: str, offset: Sequence[int]) -> str:
    """The name of a shard in its safetensors file."""
    return f"{name}@{','.join(str(start) for start in offset)}"


def write_index(folder: Path, rank_files: Sequence[Path]) -> None:
    """Write the index of a folder with these files, one of each rank. Shards that several ranks wrote are listed once.

    It takes 12 CPU seconds for 1,024 files of 850 shards, in the thread that writes checkpoints.
    """
    about: dict[str, tuple[str, list[int]]] = {}
    shards: dict[str, dict[str, list[Any]]] = {}  # by tensor and key
    for rank, path in enumerate(rank_files):
        header = read_header(path).entries
        for key, shard in json.loads(header["__metadata__"]["pieces"]).items():
            name = shard["name"]
            if name not in shards:
                shards[name] = {}
                about[name] = (shard["dtype"], shard["shape"])
            shards[name][key] = [rank, shard["offset"], header[key]["shape"]]
    table: dict[str, IndexedTensor] = {}
    lines: list[bytes] = []
    start = 0
    for name, places in shards.items():
        line = json.dumps([*places.values()], separators=(",", ":")).encode() + b"\n"
        table[name] = IndexedTensor(*about[name], start, len(line))
        lines.append(line)
        start += len(line)
    first = {"version": VERSION, "ranks": len(rank_files), "tensors": table}
    with open(folder / INDEX, "wb") as file:
        file.write(json.dumps(first, separators=(",", ":")).encode() + b"\n")
        file.writelines(lines)


class Index:
    """The index of a checkpoint folder, opened: the table in memory, the shards of a tensor on request."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / INDEX, "rb")  # noqa: SIM115 - as long as the reader
        first = json.loads(self._file.readline())
        self._first_line = self._file.tell()
        if first["version"] != VERSION:
            raise ValueError(f"version {first['version']} of the index is newer than this program")
        self.num_ranks = int(first["ranks"])
        self.tensors: Mapping[str, IndexedTensor] = {
            name: IndexedTensor(*row) for name, row in first["tensors"].items()
        }

    def shards(self, name: str) -> list[SavedShard]:
        """All shards of a tensor."""
        row = self.tensors[name]
        self._file.seek(self._first_line + row.start)
        shards: list[SavedShard] = []
        for rank, offset, shape in json.loads(self._file.read(row.size)):
            shards.append(SavedShard(int(rank), tuple(offset), tuple(shape)))
        return shards


def dtype_of(text: str) -> torch.dtype:
    """The dtype of a header, such as `torch.float32`."""
    dtype = getattr(torch, text.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{text} is no dtype")
    return dtype
