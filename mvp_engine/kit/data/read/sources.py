"""Where rows come from: files and folders of many kinds, all read by index.

A source opens without parsing its rows, pickles to a few arrays, and keeps no open file that processes could share. A
row that cannot be read is a `BadRow` when it is asked for; a file that cannot be used at all is a `UserError` at once.
What a row means is for `rows.py` to say, except for samples that are several files (WebDataset shards: the same name
up to the first dot; folders: up to the last). There the `.json` is the row, the `.txt` is its `text`, and the media are
its `images`, `videos`, `audios`, in the place of what the row has there: bytes from a shard, paths from a folder. So an
image and a text are a caption. Other members of a shard are in the row as bytes, under their extension.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.rows import MEDIA, BadRow

_SUFFIXES = (
    "jpg jpeg png webp gif bmp tif tiff",
    "mp4 mkv webm avi mov m4v mpg mpeg",
    "wav flac mp3 ogg opus m4a",
)
_KIND_OF = {
    suffix: kind for kind, known in zip(MEDIA, _SUFFIXES, strict=True) for suffix in known.split()
}
_EDGE = 1 << 16  # bytes at either end of a file that tell it from others


class _File:
    """Rows of one file (or folder) by index. Attributes that begin with _ are not pickled, but made again on use."""

    size: int
    fingerprint: str

    def __init__(self, file: Path, name: str) -> None:
        self.file, self.name = file, name

    def row(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def where(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}


class Source:
    """Rows of one or more files by index; `root` is the folder that their media paths are relative to."""

    def __init__(self, files: Sequence[_File], root: Path) -> None:
        self.files, self.root = list(files), root
        self.ends = np.cumsum([file.size for file in files])
        # Of the content: the same wherever the files lie, another when they change.
        self.fingerprint = _hash("".join(file.fingerprint for file in files).encode())

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, row = self._find(index)
        return file.row(row)

    def where(self, index: int) -> str:
        """`file.jsonl:17` (the line), `file.parquet[16]` (the row, from 0), `shard.tar:sample` or the file's name."""
        file, row = self._find(index)
        return (
            file.where(row).encode(errors="backslashreplace").decode()
        )  # names need not be valid Unicode

    def _find(self, index: int) -> tuple[_File, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = int(np.searchsorted(self.ends, index, side="right"))
        return self.files[which], index - int(self.ends[which] - self.files[which].size)


def open_source(path: str | Path | Sequence[str | Path], root: str | Path | None = None) -> Source:
    """A file, a folder, a glob pattern, or a list of these as one source.

    `root` is by default the folder itself, or the one that the file is in (of several: the one that they are all in).
    """
    found = []
    for each in [path] if isinstance(path, str | Path) else path:
        whole = os.path.abspath(os.path.expanduser(each))
        names = [whole] if os.path.exists(whole) else sorted(glob.glob(whole, recursive=True))
        found += [Path(name) for name in names]
        if not names or len(set(found)) < len(found):
            raise UserError(
                f"data: {'there is nothing at' if not names else 'files are named twice by'} {each}"
            )
    if not found:
        raise UserError("data: a source needs a file")
    above = Path(os.path.commonpath([file.parent for file in found]))
    inside = found[0] if len(found) == 1 and found[0].is_dir() else above
    root = Path(root).expanduser().absolute() if root else inside
    files = [part for file in found for part in _open(file, os.path.relpath(file, above), root)]
    if not files or not all(part.size for part in files):
        raise UserError(
            f"data: {next((part.file for part in files if not part.size), path)} has no rows"
        )
    return Source(files, root)


def _open(file: Path, name: str, root: Path) -> list[_File]:
    if file.is_dir():
        return _open_folder(file, name, root)
    with open(file, "rb") as stream:
        head = stream.read(512)
    if not head:
        raise UserError(f"data: {file} is empty")
    kind, first = file.suffix.lower(), head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if head[:2] == b"\x1f\x8b" or kind in (".gz", ".tgz", ".zst", ".bz2", ".xz", ".zip"):
        raise UserError(
            f"data: {file} is compressed, and rows are read in any order: unpack it first, or set stream: true"
        )
    if kind == ".parquet" or head[:4] == b"PAR1":
        return [_Arrow(file, name, parquet=True)]
    if kind == ".arrow" or head[:6] == b"ARROW1":
        return [_Arrow(file, name)]
    if kind == ".tar" or head[257:262] == b"ustar":
        return [_Shard(file, name)]
    if kind == ".json" and first != b"{":
        return [_JsonList(file, name)]
    if kind in (".jsonl", ".ndjson", ".json") or first == b"{":  # many .json files are JSON lines
        return [_JsonLines(file, name)]
    raise UserError(f"data: {file} is none of jsonl, json, parquet, arrow, tar")


def _open_folder(folder: Path, name: str, root: Path) -> list[_File]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(str(state.parent) for state in folder.glob("*/state.json"))
        raise UserError(f"data: {folder} has several splits: open one of {', '.join(splits)}")
    if (folder / "state.json").is_file():
        try:
            parts = [
                part["filename"]
                for part in json.loads((folder / "state.json").read_bytes())["_data_files"]
            ]
        except (ValueError, LookupError, TypeError):
            raise UserError(
                f"data: {folder / 'state.json'} is not what `datasets` writes"
            ) from None
        return [_Arrow(folder / part, f"{name}/{part}") for part in parts]
    if (folder / "metadata.jsonl").is_file():
        return [
            _JsonLines(
                folder / "metadata.jsonl", f"{name}/metadata.jsonl", os.path.relpath(folder, root)
            )
        ]
    return [_Folder(folder, name, root)]


class _JsonLines(_File):
    """One object a line. The file is passed over once to find the lines; blank ones do not count.

    With `folder` it is a metadata.jsonl as Hugging Face's imagefolder has it: `file_name` is the row's media, in there.
    """

    def __init__(self, file: Path, name: str, folder: str | None = None) -> None:
        super().__init__(file, name)
        self.folder = folder
        data, digest, newlines = np.memmap(file, np.uint8, "r"), hashlib.blake2b(digest_size=16), []
        for at in range(0, len(data), 1 << 24):
            chunk = data[at : at + (1 << 24)]
            digest.update(chunk.data)
            newlines.append(np.flatnonzero(chunk == ord("\n")) + at)
        ends = np.concatenate([*newlines, [len(data)]])
        starts = np.concatenate([[0], ends[:-1] + 1])
        full = ends > starts
        full[full] = (ends - starts > 1)[full] | (data[starts[full]] != ord("\r"))
        lines = np.flatnonzero(full)
        self.size, self.fingerprint = len(lines), digest.hexdigest()
        self.starts, self.ends = starts[lines], ends[lines]
        self.lines = lines if len(lines) and lines[-1] >= len(lines) else None

    def row(self, index: int) -> dict[str, Any]:
        with open(
            self.file, "rb"
        ) as stream:  # each time: it is quick, and forked processes share no position
            stream.seek(int(self.starts[index]))
            row = parse_object(stream.read(int(self.ends[index] - self.starts[index])), "the line")
        if self.folder is not None and "file_name" in row:
            name = row.pop("file_name")
            if not isinstance(name, str) or _suffix(name) not in _KIND_OF:
                raise BadRow(
                    "bad_media", "file_name is not the name of an image, video or audio file"
                )
            row[f"{_KIND_OF[_suffix(name)]}s"] = [os.path.normpath(f"{self.folder}/{name}")]
        return row

    def where(self, index: int) -> str:
        return f"{self.name}:{(index if self.lines is None else self.lines[index]) + 1}"


class _JsonList(_File):
    """A list of objects. It is kept in memory, and read again by each process that it is sent to."""

    def __init__(self, file: Path, name: str) -> None:
        super().__init__(file, name)
        self.fingerprint = _hash(file.read_bytes())
        try:
            self.size = len(self._rows)
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"data: {file} is not a JSON list: {error}") from None

    @functools.cached_property
    def _rows(self) -> list[Any]:
        return json.loads(self.file.read_bytes())

    def row(self, index: int) -> dict[str, Any]:
        return dict(parse_object(self._rows[index], "the entry"))


class _Arrow(_File):
    """Arrow streams and files by memory-mapped record batches; Parquet by row groups, quick where these are small."""

    def __init__(self, file: Path, name: str, parquet: bool = False) -> None:
        super().__init__(file, name)
        self.parquet = parquet
        try:
            self.ends = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        except ImportError:
            raise UserError(f"data: reading {file} needs pyarrow: pip install pyarrow") from None
        except (OSError, ValueError) as error:
            raise UserError(f"data: {file} cannot be read: {error}") from None
        self.size, self.fingerprint = int(self.ends[-1]), _hash(_edges(file))

    @functools.cached_property
    def _batches(self) -> list[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self.parquet:
            metadata = pq.read_metadata(self.file)
            return [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        data = pa.memory_map(str(self.file))
        if pa.memory_map(str(self.file)).read(6) != b"ARROW1":
            return list(pa.ipc.open_stream(data))
        reader = pa.ipc.open_file(data)
        return [reader.get_batch(index) for index in range(reader.num_record_batches)]

    def row(self, index: int) -> dict[str, Any]:
        which = int(np.searchsorted(self.ends, index, side="right")) - 1
        batch = (
            _row_group(self.file, self.fingerprint, which) if self.parquet else self._batches[which]
        )
        try:
            return dict(batch.slice(index - int(self.ends[which]), 1).to_pylist()[0])
        except UnicodeDecodeError as error:
            raise BadRow("bad_text", f"the row is not valid Unicode: {error}") from None


@functools.lru_cache(maxsize=8)  # for all files of a process
def _row_group(file: Path, fingerprint: str, index: int) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(file).read_row_group(index)


class _Shard(_File):
    """A WebDataset tar. Its headers are passed over once; a sample is then known by where those of its members lie."""

    def __init__(self, file: Path, name: str) -> None:
        super().__init__(file, name)
        samples: dict[str, list[int]] = {}
        digest = hashlib.blake2b(_edges(file), digest_size=16)
        try:
            with tarfile.open(file, "r:") as tar:
                for member in tar:
                    if member.isreg() and not member.name.rpartition("/")[2].startswith(
                        (".", "__")
                    ):
                        samples.setdefault(sample_key(member.name), []).append(member.offset)
                        digest.update(
                            f"{member.name} {member.size}\n".encode(errors="backslashreplace")
                        )
        except tarfile.TarError as error:
            raise UserError(f"data: {file} is no whole tar file: {error}") from None
        self.headers = np.array(
            [offset for offsets in samples.values() for offset in offsets], np.int64
        )
        self.ends = np.cumsum([0, *map(len, samples.values())])
        self.size, self.fingerprint = len(samples), digest.hexdigest()

    def _members(self, index: int) -> Iterator[tuple[str, IO[bytes]]]:
        with open(self.file, "rb") as stream:
            for offset in self.headers[self.ends[index] : self.ends[index + 1]]:
                stream.seek(int(offset))
                with tarfile.open(fileobj=stream, mode="r:") as tar:
                    member = next(iter(tar))
                    data = tar.extractfile(member)
                    assert data is not None, f"{self.file} changed after it was opened"
                    yield member.name, data

    def row(self, index: int) -> dict[str, Any]:
        return sample_of((name, data.read()) for name, data in self._members(index))

    def where(self, index: int) -> str:
        return f"{self.name}:{sample_key(next(self._members(index))[0])}"


class _Folder(_File):
    """Media files and what lies beside them under the same name; without any media, `.txt` files as documents."""

    def __init__(self, folder: Path, name: str, root: Path) -> None:
        super().__init__(folder, name)
        self.root, groups, digest = root, dict[Path, list[str]](), hashlib.blake2b(digest_size=16)
        for path in sorted(folder.rglob("*")):
            inside, suffix = path.relative_to(folder), _suffix(path.name)
            if any(part.startswith(".") for part in inside.parts) or not path.is_file():
                continue
            if suffix in ("jsonl", "parquet", "arrow", "tar"):
                raise UserError(
                    f"data: {folder} holds {inside}: name such files one by one, or by a glob"
                )
            if suffix in (*_KIND_OF, "txt", "json"):
                groups.setdefault(path.with_suffix(""), []).append(os.path.relpath(path, root))
                digest.update(f"{inside} {path.stat().st_size}\n".encode(errors="backslashreplace"))
                digest.update(b"" if suffix in _KIND_OF else _edges(path))
        self.samples = [
            names for names in groups.values() if any(_suffix(name) in _KIND_OF for name in names)
        ]
        self.samples = self.samples or [
            names for names in groups.values() if _suffix(names[-1]) == "txt"
        ]
        self.size, self.fingerprint = len(self.samples), digest.hexdigest()

    def row(self, index: int) -> dict[str, Any]:
        names = self.samples[index]
        return sample_of(
            (name, name if _suffix(name) in _KIND_OF else (self.root / name).read_bytes())
            for name in names
        )

    def where(self, index: int) -> str:
        return self.samples[index][0]


def sample_of(members: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A row from several files: see the rule at the top."""
    row: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, value in members:
        suffix = _suffix(name)
        if suffix == "json":
            row = parse_object(value, "the .json file")
        elif suffix == "txt":
            try:
                own["text"] = value.decode("utf-8-sig").strip()
            except UnicodeDecodeError as error:
                raise BadRow("bad_text", f"the .txt file is not UTF-8: {error}") from None
        elif suffix in _KIND_OF:
            own.setdefault(f"{_KIND_OF[suffix]}s", []).append(value)
        else:
            own[name.rpartition("/")[2].partition(".")[2]] = value
    return {
        key: value for key, value in row.items() if not (key in MEDIA and f"{key}s" in own)
    } | own


def parse_object(value: Any, what: str) -> dict[str, Any]:
    try:
        value = json.loads(value) if isinstance(value, bytes) else value
    except (ValueError, RecursionError) as error:
        raise BadRow("bad_json", f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRow("wrong_type", f"{what} is {type(value).__name__}, wanted an object")
    return value


def sample_key(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _suffix(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _edges(file: Path) -> bytes:
    """Size, beginning and end: they differ between versions of formats that keep an index or a footer."""
    with open(file, "rb") as stream:
        size, head = os.fstat(stream.fileno()).st_size, stream.read(_EDGE)
        stream.seek(max(_EDGE, size - _EDGE))
        return b"%d " % size + head + stream.read(_EDGE)
