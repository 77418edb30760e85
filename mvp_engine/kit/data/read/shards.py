"""Shards: rows that are read in order, of files, parts of large files, fragments, or functions that yield rows.

A `Stream` is a list of shards, and knows which of them each lane of an epoch reads (`units`). A shard yields rows from
any position on, with the position after each row: files that can seek are not read before it. A damaged shard, or one
that is shorter than its index says, yields a bad row in the place of what cannot be read, and its other rows.

All files are opened by `open_file`.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import json
import lzma
import os
import stat
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from mvp_engine.data.loader import derived_seed
from mvp_engine.errors import UserError, similar_path
from mvp_engine.files import is_url
from mvp_engine.imports import load_spec
from mvp_engine.kit.data.read.media_source import require_package
from mvp_engine.kit.data.read.row_files import (
    SHARD,
    PreparedFile,
    StrictTarInfo,
    content_hash,
    is_link,
    is_sample_member,
    merge_sample,
    prepared_file,
    sample_key,
)
from mvp_engine.kit.data.read.row_types import BadRow, RowFormat, parse_object
from mvp_engine.kit.data.read.sources import absolute, expand_path

ReadRow = Callable[[], Any]
RowFunction = Callable[[], Iterable[Any]]
Owns = Callable[[int], bool]
STDIN = "-"
_LINES = (".jsonl", ".ndjson")
_TARS = (".tar", ".tgz")
_TABLES = (".parquet", ".arrow")
_COMPRESSED = (".gz", ".zst", ".zstd", ".bz2", ".xz")
_FILES = (*_LINES, *_TARS, *_TABLES, *_COMPRESSED)
MDS_INDEX = "index.json"
_SUPPORTED = (
    "jsonl (also .gz, .zst, .bz2, .xz), tar (also compressed), parquet, arrow, folders of MDS, Lance and prepared "
    "rows, a pipe, or a function"
)
CHUNK_BYTES = 1 << 26  # of a large file of lines, which is read as several shards
ROW_BITS = 40  # of a row's number in its shard; the bits above are the shard's number


class ShardRow(NamedTuple):
    number: int  # in its shard
    place: int  # where it begins, in the unit of its shard
    end: int  # where the next row begins
    where: str
    read: ReadRow


class Damaged(Exception):
    """The rest of a shard cannot be read."""


class Shard:
    """Rows in order. A place is a byte offset where the file can seek to rows, else the number of the row."""

    name: str

    def rows(self, number: int = 0, place: int = 0, owns: Owns | None = None) -> Iterator[ShardRow]:
        """The rows from here on of which `owns(number)` is true; in the place of damage a row that is a bad row."""
        after, end = number, place
        try:
            for row in self._rows(number, place, owns):
                after, end = row.number + 1, row.end
                yield row
        except _DAMAGE as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise UserError(f"data: {self.name} cannot be read: {error}") from None
            text = f"cannot be read from row {after} on: {str(error) or type(error).__name__}"
            if owns is None or owns(after):
                where = f"{self.name} (its rest)"
                yield ShardRow(after, end, end, where, _bad("corrupt_shard", text))

    def _rows(self, number: int, place: int, owns: Owns | None) -> Iterator[ShardRow]:
        raise NotImplementedError


def _bad(reason: str, text: str) -> ReadRow:
    return functools.partial(_raise, reason, text)


def _raise(reason: str, text: str) -> Any:
    raise BadRow(reason, text)


# What readers raise for damaged files; an OSError that has a number is of the file system.
_DAMAGE = (Damaged, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError)


def open_file(path: str, buffer: int = 1 << 20) -> IO[bytes]:
    """The bytes of a file, decompressed by its suffix."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix in (".zst", ".zstd"):
        # The package zstandard takes a file that is cut off for a whole one.
        pa = require_package("pyarrow", f"reading {path}")
        return io.BufferedReader(pa.CompressedInputStream(raw_file(path, buffer), "zstd"), buffer)
    if suffix in (".gz", ".tgz"):
        return gzip.open(raw_file(path, buffer))  # type: ignore[return-value]
    if suffix == ".bz2":
        return bz2.open(raw_file(path, buffer))
    if suffix == ".xz":
        return lzma.open(raw_file(path, buffer))
    return raw_file(path, buffer)


def raw_file(path: str, buffer: int = 1 << 20) -> IO[bytes]:
    """A file for reading; one at a URL by ranges."""
    if is_url(path):
        from mvp_engine.stores import open_url

        file: IO[bytes] = open_url(path)
        return file
    return open(path, "rb", buffering=buffer)


def _exists(path: str) -> bool:
    return bool(expand_path(path)) if is_url(path) else os.path.exists(path)


def _size(path: str) -> int:
    if not is_url(path):
        return os.path.getsize(path)
    from mvp_engine.stores import size_and_etag

    return size_and_etag(path).size or 0  # 0: the store does not say


class Lines(Shard):
    """JSON lines of a file, of stdin or of a pipe, or the lines that begin in a range of bytes of a file."""

    def __init__(
        self, path: str, name: str, max_text: int | None, start: int = 0, stop: int | None = None
    ) -> None:
        self.path = path
        self.name = name if not start else f"{name} from byte {start:,} on"
        self.file_name = name
        self.max_text = max_text
        self.start = start
        self.stop = stop

    def _open(self) -> AbstractContextManager[IO[bytes]]:
        return nullcontext(sys.stdin.buffer) if self.path == STDIN else open_file(self.path)

    def _rows(self, number: int, place: int, owns: Owns | None) -> Iterator[ShardRow]:
        can_seek = not self.path.lower().endswith(_COMPRESSED) and (
            is_url(self.path) or not is_pipe(self.path)
        )
        with self._open() as file:
            line_number, begin = 0, self.start
            if can_seek and place:
                line_number, begin = number, place
                file.seek(begin)
            elif self.start:  # the line that begins before belongs to the chunk before
                file.seek(self.start - 1)
                begin = self.start - 1 + len(file.readline())
            for line in file:
                if self.stop is not None and begin >= self.stop:
                    return
                end = begin + len(line)
                if line_number >= number and line.strip() and (owns is None or owns(line_number)):
                    where = f"{self.file_name}:{line_number + 1}"
                    if self.start:
                        where = f"{self.file_name}:byte {begin}"
                    read = functools.partial(parse_object, line, "the line", self.max_text)
                    yield ShardRow(line_number, begin, end, where, read)
                begin = end
                line_number += 1


class Tar(Shard):
    """Samples of a WebDataset shard, in which the members of a sample are adjacent."""

    def __init__(self, path: str, name: str) -> None:
        self.path = path
        self.name = name

    def _rows(self, number: int, place: int, owns: Owns | None) -> Iterator[ShardRow]:
        can_seek = self.path.lower().endswith(".tar")
        # A lane that has all rows reads through the file. Others seek from header to header.
        buffer = 1 << 20 if owns is None else 1 << 12
        with open_file(self.path, buffer) as file:
            if can_seek:
                file.seek(place)
            # As a stream, the file is only read forwards.
            mode: Any = "r:" if can_seek and owns is not None else "r|"
            with tarfile.open(fileobj=file, mode=mode, tarinfo=StrictTarInfo) as tar:
                base = place if can_seek and mode == "r|" else 0  # a stream counts from its start
                members = (_without_link(member) for member in filter(is_sample_member, tar))
                sample = number if can_seek else 0
                begin = place
                for key, group in groupby(members, key=lambda member: sample_key(member.name)):
                    is_own = sample >= number and (owns is None or owns(sample))
                    contents = []
                    for member in group:
                        if is_own:
                            contents.append((member.name, _read_member(tar, member)))
                        end = base + member.offset_data + -(-member.size // 512) * 512
                    if is_own:
                        read = functools.partial(merge_sample, contents)
                        where = f"{self.name}:{key}"
                        yield ShardRow(sample, begin, end, where, read)
                    begin = end
                    sample += 1
                    # TarFile keeps the headers of all members: memory would grow with the stream.
                    tar.members = []  # type: ignore[attr-defined]


def _without_link(member: tarfile.TarInfo) -> tarfile.TarInfo:
    if is_link(member):
        raise UserError(
            f"data: {member.name} is a link, which a stream cannot follow: set stream: false, or "
            "pack the file again with tar --dereference --hard-dereference"
        )
    return member


def _read_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    data = tar.extractfile(member)
    assert data is not None
    content = data.read()
    if len(content) < member.size:
        raise Damaged(f"{member.name} has {len(content)} of {member.size} bytes")
    return content


class _Batch(NamedTuple):
    size: int
    read: Callable[[], Any]  # as a pyarrow batch or table


class Table(Shard):
    """Rows of a Parquet or Arrow file by row groups or record batches, of which the file knows the sizes."""

    def __init__(self, path: str, name: str) -> None:
        self.path = path
        self.name = name

    def _batches(self, file: IO[bytes]) -> list[_Batch]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self.path.lower().endswith(".parquet"):
            table = pq.ParquetFile(file)
            groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
            sizes = [group.num_rows for group in groups]
            reads = [functools.partial(table.read_row_group, i) for i in range(len(groups))]
        else:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            if not is_file:
                batches = list(pa.ipc.open_stream(file))
                return [_Batch(one.num_rows, one.slice) for one in batches]
            reader = pa.ipc.open_file(file)
            reads = [
                functools.partial(reader.get_batch, i) for i in range(reader.num_record_batches)
            ]
            sizes = [read().num_rows for read in reads]
        return list(map(_Batch, sizes, reads))

    def _rows(self, number: int, place: int, owns: Owns | None) -> Iterator[ShardRow]:
        pa = require_package("pyarrow", f"reading {self.path}")
        with raw_file(self.path) as file:
            try:
                batches = self._batches(file)
            except pa.ArrowException as error:
                raise Damaged(str(error)) from None
            start = 0
            for size, read in batches:
                own = range(max(start, number), start + size)
                if owns is not None:
                    own = [index for index in own if owns(index)]  # type: ignore[assignment]
                if len(own):
                    yield from self._of_batch(own, start, read)
                start += size

    def _of_batch(self, own: Sequence[int], start: int, read: Callable[[], Any]) -> Iterator[Any]:
        try:
            batch = read()
            broken = None
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            broken = str(error)
        for index in own:
            get = _bad("corrupt_shard", broken or "")
            if broken is None:
                get = functools.partial(_table_row, batch, index - start)
            yield ShardRow(index, index, index + 1, f"{self.name}[{index}]", get)


def _table_row(batch: Any, index: int) -> dict[str, Any]:
    try:
        return dict(batch.slice(index, 1).to_pylist()[0])
    except UnicodeDecodeError as error:
        raise BadRow("bad_text", f"the row is not valid Unicode: {error}") from None


class Lance(Shard):
    """A fragment of a Lance dataset."""

    BATCH_ROWS = 256

    def __init__(self, path: str, name: str, fragment: int) -> None:
        self.path = path
        self.fragment = fragment
        self.name = f"{name}/{fragment}"

    def _rows(self, number: int, place: int, owns: Owns | None) -> Iterator[ShardRow]:
        fragment = open_lance(self.path).get_fragment(self.fragment)
        size = fragment.count_rows()
        for start in range(number, size, self.BATCH_ROWS):
            rows = range(start, min(start + self.BATCH_ROWS, size))
            if owns is not None and not any(map(owns, rows)):
                continue
            try:
                batch = fragment.to_table(offset=start, limit=len(rows))
                found, why = batch.num_rows, "the fragment ends before"
            except (OSError, ValueError) as error:
                found, why = 0, str(error)
            for index in rows:
                if owns is None or owns(index):
                    get = _bad("corrupt_shard", why)
                    if index - start < found:
                        get = functools.partial(_table_row, batch, index - start)
                    yield ShardRow(index, index, index + 1, f"{self.name}[{index}]", get)


@functools.lru_cache(maxsize=8)
def open_lance(path: str) -> Any:
    lance = require_package("lance", f"reading {path}", extra="lance")
    return lance.dataset(path)


class Mds(Shard):
    """A shard of MosaicML's streaming format, of which index.json says the columns and the number of samples.

    The file has the number of samples, the offset of each and of the end, the columns as JSON, then the samples: the
    sizes of the columns that have no fixed one, and their values.
    """

    def __init__(self, folder: str, name: str, entry: dict[str, Any]) -> None:
        if entry.get("format") != "mds" or entry.get("version") != 2:
            raise UserError(
                f"data: {folder}/index.json has shards of the format {entry.get('format')}, version "
                f"{entry.get('version')}; supported is mds, version 2"
            )
        self.folder = folder
        self.entry = entry
        self.size = int(entry["samples"])
        self.name = f"{name}/{entry['raw_data']['basename']}"
        unknown = [kind for kind in entry["column_encodings"] if kind not in _MDS]
        if unknown:
            raise UserError(
                f"data: {folder} has a column of the MDS encoding {unknown[0]}; supported are {', '.join(_MDS)}"
            )

    def _open(self) -> IO[bytes]:
        raw = os.path.join(self.folder, self.entry["raw_data"]["basename"])
        kind = (self.entry.get("compression") or "").partition(":")[0]
        if not kind or _exists(raw):
            return raw_file(raw)
        if kind not in ("zstd", "gz", "bz2"):
            raise UserError(
                f"data: {self.folder} is compressed by {kind}; supported are zstd, gz and bz2"
            )
        with open_file(os.path.join(self.folder, self.entry["zip_data"]["basename"])) as file:
            return io.BytesIO(file.read())

    def _rows(self, number: int, place: int, owns: Owns | None) -> Iterator[ShardRow]:
        why = f"index.json has {self.size} samples, and the file ends before"
        file: IO[bytes] = io.BytesIO()
        try:
            file = self._open()
        except _DAMAGE as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            why = str(error)
        with file:
            found = int.from_bytes(file.read(4), "little")
            ends = np.frombuffer(file.read(4 * (found + 1)), np.uint8)
            ends = ends[: len(ends) // 4 * 4].view(np.uint32)
            for index in range(number, self.size):
                if owns is not None and not owns(index):
                    continue
                data = b""
                if index + 1 < len(ends):
                    begin, end = ends[index : index + 2].tolist()
                    file.seek(begin)
                    data = file.read(end - begin)
                get = functools.partial(self._decode, data) if data else _bad("corrupt_shard", why)
                yield ShardRow(index, index, index + 1, f"{self.name}[{index}]", get)

    def _decode(self, data: bytes) -> dict[str, Any]:
        place = 0
        sizes = []
        for size in self.entry["column_sizes"]:
            if not size:
                size = int.from_bytes(data[place : place + 4], "little")
                place += 4
            sizes.append(size)
        row = {}
        columns = zip(
            self.entry["column_names"], self.entry["column_encodings"], sizes, strict=True
        )
        for name, encoding, size in columns:
            value = data[place : place + size]
            place += size
            try:
                if len(value) < size:
                    raise ValueError(f"{len(value)} of {size} bytes")
                row[name] = _MDS[encoding](value)
            except ValueError as error:
                raise BadRow("corrupt_shard", f"{name}: {error}") from None
        return row


def _pil(data: bytes) -> Any:
    from PIL import Image

    width, height, mode_size = np.frombuffer(data[:12], np.uint32).tolist()
    mode = data[12 : 12 + mode_size].decode()
    return Image.frombytes(mode, (width, height), data[12 + mode_size :])


def _bytes(data: bytes) -> bytes:
    return data


def _number(dtype: str, data: bytes) -> Any:
    return np.frombuffer(data, dtype)[0].item()


# MDS encodings; pkl is none of them, since it runs code.
_MDS: dict[str, Callable[[bytes], Any]] = {
    "bytes": _bytes,
    "jpeg": _bytes,
    "png": _bytes,
    "str": bytes.decode,
    "json": json.loads,
    "str_int": int,
    "str_float": float,
    "int": functools.partial(_number, "int64"),
    "pil": _pil,
}
for _bits in (8, 16, 32, 64):
    for _kind in ("int", "uint", "float")[: 3 if _bits > 8 else 2]:
        _MDS[f"{_kind}{_bits}"] = functools.partial(_number, f"{_kind}{_bits}")


class Prepared(Shard):
    """A shard of what `mvp data prepare` wrote."""

    def __init__(self, file: PreparedFile, number: int) -> None:
        self.file = file
        self.number = number
        self.name = f"{file.name}/{SHARD.format(number)}"

    def _rows(self, number: int, place: int, owns: Owns | None) -> Iterator[ShardRow]:
        start, end = self.file.ends[self.number : self.number + 2].tolist()
        for index in range(start + number, end):
            row = index - start
            if owns is None or owns(row):
                read: ReadRow = functools.partial(self._read, index)
                try:
                    where = self.file.where(index)
                except UserError as error:
                    where = f"{self.name}[{row}]"
                    read = _bad("corrupt_shard", str(error))
                yield ShardRow(row, row, row + 1, where, read)

    def _read(self, index: int) -> Any:
        row = self.file.row(index)
        if not self.file.cost(index):
            raise BadRow("overlong", "left out when it was prepared: too long, or nothing to learn")
        return row


class Function(Shard):
    """Rows that a function yields: each lane calls it, and takes its own rows."""

    def __init__(self, function: RowFunction, name: str) -> None:
        self.function = function
        self.name = name

    def rows(self, number: int = 0, place: int = 0, owns: Owns | None = None) -> Iterator[ShardRow]:
        for index, row in enumerate(self.function()):
            if index >= number and (owns is None or owns(index)):
                read = functools.partial(_copy_mapping, row)
                yield ShardRow(index, index, index + 1, f"{self.name}[{index}]", read)


def _copy_mapping(row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise BadRow("wrong_type", f"the row is {type(row).__name__}, wanted a mapping")
    return dict(row)


class Unit(NamedTuple):
    """What a lane reads at a time: the rows n of a shard with n % stride == offset."""

    shard: int
    stride: int
    offset: int


class Stream:
    """One named list of shards; each `iter` reads all of them in order."""

    def __init__(
        self,
        name: str,
        path: str | Sequence[str],
        root: str | None = None,
        format: RowFormat | str | None = None,
    ) -> None:
        self.name = name
        self.format = format
        self.is_pipe = False
        self.prepared: PreparedFile | None = None
        paths: list[str] = []
        self.shards: list[Shard] = []
        for each in [path] if isinstance(path, str) else path:
            paths += [each] if each == STDIN or _is_mds(each) else expand_path(each) or [each]
        folder = _common_folder(paths)
        for each in paths:
            self.shards += self._open(each, folder)
        self.root = absolute(root) if root else folder
        if self.prepared is not None and not root:
            self.root = Path(self.prepared.entry["root"])

    def _open(self, path: str, folder: Path) -> Sequence[Shard]:
        name = os.path.relpath(path, folder) if os.path.isabs(path) else path
        if is_url(path):
            name = path.rpartition("/")[2]
        lower = path.lower()
        plain = os.path.splitext(lower)[0] if lower.endswith(_COMPRESSED) else lower
        max_text = self.format.max_text if isinstance(self.format, RowFormat) else None
        if path == STDIN or (not is_url(path) and os.path.exists(path) and is_pipe(path)):
            self.is_pipe = True
            return [Lines(path, "stdin" if path == STDIN else name, max_text)]
        if _is_mds(path):
            return _mds_shards(path, name)
        if not is_url(path) and not os.path.exists(path):
            return [self._function(path)]
        if os.path.isdir(path):
            return self._folder(path, name)
        if plain.endswith(_LINES):
            size = _size(path)
            if plain != lower or size <= CHUNK_BYTES:
                return [Lines(path, name, max_text)]
            starts = range(0, size, CHUNK_BYTES)
            return [Lines(path, name, max_text, start, start + CHUNK_BYTES) for start in starts]
        if plain.endswith(_TARS):
            return [Tar(path, name)]
        if lower.endswith(_TABLES):
            return [Table(path, name)]
        raise UserError(f"data: {path} cannot be read as a stream; supported are {_SUPPORTED}")

    def _folder(self, path: str, name: str) -> Sequence[Shard]:
        self.prepared = prepared_file(Path(path)) or self.prepared
        if prepared_file(Path(path)) is not None:
            assert self.prepared is not None
            return [Prepared(self.prepared, i) for i in range(len(self.prepared.entry["shards"]))]
        if os.path.isdir(os.path.join(path, "_versions")):
            fragments = open_lance(path).get_fragments()
            return [Lance(path, name, fragment.fragment_id) for fragment in fragments]
        raise UserError(
            f"data: {path} is a folder that is no MDS, Lance or prepared one: name its files by a glob, such as "
            f"{path}/*.tar"
        )

    def _function(self, path: str) -> Shard:
        """The function of `module:function`."""
        if ":" not in path:
            raise UserError(f"data: nothing at {path}.{similar_path(path)}")
        module, function_name = load_spec(path, Path.cwd(), "data: the stream")
        function = getattr(module, function_name or "", None)
        if not callable(function):
            raise UserError(f"data: {path} is not a function that returns rows")
        return Function(function, self.name)

    def __iter__(self) -> Iterator[tuple[str, ReadRow]]:
        for shard in self.shards:
            for row in shard.rows():
                yield row.where, row.read

    @property
    def fingerprint(self) -> str:
        """A hash of the names of the shards."""
        return str(
            content_hash("\n".join(shard.name for shard in self.shards).encode()).hexdigest()
        )

    @property
    def num_bytes(self) -> int | None:
        """The size of all shards, if it is known."""
        if self.prepared is not None:
            return sum(size for _, size in self.prepared.entry["shards"])
        sizes = {}
        for shard in self.shards:
            if isinstance(shard, Mds):
                entry = shard.entry["zip_data"] or shard.entry["raw_data"]
                sizes[shard.name] = int(entry["bytes"])
            elif isinstance(shard, Lines | Tar | Table) and not self.is_pipe:
                sizes[shard.path] = _size(shard.path)
            else:
                return None
        return sum(sizes.values())

    def units(self, lanes: int, order_seed: tuple[Any, ...] | None) -> list[Unit]:
        """All units of an epoch: unit i is read by the lane i modulo `lanes`, so that each has about as many rows.

        Shards come in an order that the seed gives, and whole, as far as all lanes get as many; the others are divided
        by rows. A function is divided by rows, since each lane has to call it.
        """
        shards = np.arange(len(self.shards))
        if order_seed is not None:
            seed = derived_seed(*order_seed, "shards", self.name)
            shards = np.random.default_rng(seed).permutation(shards)
        order = shards.tolist()
        files = [shard for shard in order if not isinstance(self.shards[shard], Function)]
        whole = len(files) - len(files) % lanes
        units = [Unit(shard, 1, 0) for shard in files[:whole]]
        rest = files[whole:]
        ways = -(-lanes // max(1, len(rest)))
        units += [Unit(shard, ways, way) for way in range(ways) for shard in rest]
        for shard in order:
            if isinstance(self.shards[shard], Function):
                units += [Unit(shard, lanes, (way + len(units)) % lanes) for way in range(lanes)]
        return units

    def row_name(self, sample: int) -> str:
        """Where a row is, by the value of `sample` in `sequence_fields`."""
        return f"{self.shards[sample >> ROW_BITS].name}, row {sample & (1 << ROW_BITS) - 1}"


def _is_mds(path: str) -> bool:
    is_folder = "*" not in path and not path.lower().endswith(_FILES)
    return is_folder and _exists(os.path.join(path, MDS_INDEX))


def _mds_shards(path: str, name: str) -> Sequence[Shard]:
    with raw_file(os.path.join(path, MDS_INDEX)) as file:
        return [Mds(path, name, entry) for entry in json.load(file)["shards"]]


def _common_folder(paths: Sequence[str]) -> Path:
    if paths and is_url(paths[0]):
        return Path(paths[0]).parent
    found = [os.path.dirname(path) for path in paths if os.path.isabs(path)]
    return Path(os.path.commonpath(found)) if found else Path.cwd()


def is_pipe(path: str) -> bool:
    return path == STDIN or stat.S_ISFIFO(os.stat(path).st_mode)
