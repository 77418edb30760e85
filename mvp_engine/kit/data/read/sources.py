"""Sources: rows of files and folders, read by index.

A source opens without parsing its rows. A row that cannot be read raises `BadRow` when it is accessed;
a file that cannot be used at all raises `UserError` when it is opened. What a row means is decided in
`rows.py`.
"""

from __future__ import annotations

import copy
import csv
import functools
import glob
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mvp_engine import plugins
from mvp_engine.errors import UserError, similar_path
from mvp_engine.files import is_url, url_of
from mvp_engine.kit.data.read.media_source import require_package
from mvp_engine.kit.data.read.row_files import (
    JsonLines,
    JsonList,
    MediaFolder,
    Metadata,
    PreparedFile,
    RowFile,
    TarShard,
    content_hash,
    file_edges,
    prepared_file,
)
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.settings import METADATA_FILES

_DATASET_ID = re.compile(r"[\w.-]+/[\w:@-]+")  # without a dot, which file names have
_COMPRESSED = (".gz", ".tgz", ".zst", ".bz2", ".xz", ".zip")
_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


class Source:
    """Rows of one or more files by index; media paths are relative to `root`."""

    def __init__(self, files: Sequence[RowFile], root: Path) -> None:
        self.files = list(files)
        self.root = root
        self.ends = np.cumsum([file.size for file in files])
        # Of the content: the same wherever the files lie, another one when they change.
        fingerprints = "".join(file.fingerprint for file in files)
        self.fingerprint = content_hash(fingerprints.encode()).hexdigest()
        if self.prepared is not None:  # that of the rows it was made from
            self.fingerprint = self.prepared.fingerprint
        self._chosen: np.ndarray | None = None  # the rows of a subset

    @property
    def prepared(self) -> PreparedFile | None:
        """The rows, if they are prepared."""
        first = self.files[0]
        return first if isinstance(first, PreparedFile) and len(self.files) == 1 else None

    def __len__(self) -> int:
        return int(self.ends[-1]) if self._chosen is None else len(self._chosen)

    def subset(self, rows: np.ndarray) -> Source:
        """A source of only these rows, in this order."""
        chosen = copy.copy(self)
        chosen._chosen = rows
        key = self.fingerprint.encode() + rows.tobytes()
        chosen.fingerprint = content_hash(key).hexdigest()
        return chosen

    def split(self, hold_out: float, held_out: bool, name: str) -> Source:
        """The rows that are held out, or the others; see `split_rows`."""
        if len(self) == 1:
            raise UserError(
                f"data: {name} has one row, and hold_out needs two: set its hold_out to null"
            )
        chosen, others = split_rows(len(self), hold_out)
        return self.subset(chosen if held_out else others)

    def chosen_rows(self) -> np.ndarray:
        """The index of each row in the files; of a subset, those of its rows."""
        return np.arange(len(self)) if self._chosen is None else self._chosen

    def rare_rows(self, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Those of `rows` whose file has few of them: one, or a tenth of its `others`. Both are masks."""
        files = np.searchsorted(self.ends, self.chosen_rows(), side="right")
        counts = np.bincount(files[rows], minlength=len(self.files))
        others_of = np.bincount(files[others], minlength=len(self.files))
        is_rare = (counts < others_of) & (counts <= np.maximum(1, others_of // 10))
        return np.flatnonzero(rows & is_rare[files])

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, row = self._find(index)
        return file.row(row)

    def where(self, index: int) -> str:
        """The place of a row, for error messages and bad_rows.jsonl.

        `file.jsonl:17` (the line), `file.parquet[16]` (the row, from 0), `shard.tar:sample`, or the
        name of a file in a folder.
        """
        file, row = self._find(index)
        # File names need not be valid Unicode.
        return file.where(row).encode(errors="backslashreplace").decode()

    def _find(self, index: int) -> tuple[RowFile, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._chosen is not None:
            index = int(self._chosen[index])
        number = int(np.searchsorted(self.ends, index, side="right"))
        file = self.files[number]
        start = int(self.ends[number] - file.size)
        return file, index - start


def open_source(
    path: str | Path | Sequence[str | Path],
    root: str | Path | None = None,
    max_text: int | None = None,
) -> Source:
    """A file, a folder, a glob pattern, or a list of these as one source.

    The default `root` is the folder itself, or the folder of the file (of several: the one that
    contains all of them). Lines of more than `max_text` characters are not read.
    """
    found = _find_files([path] if isinstance(path, str | Path) else path)
    origins = [_origin(file) for file in found]
    parent = Path(os.path.commonpath([origin.parent for origin in origins]))
    is_one_folder = len(found) == 1 and found[0].is_dir()
    default_root = found[0] if is_one_folder else parent
    given_root = root
    root = absolute(root) if root else default_root
    files: list[RowFile] = []
    for file, origin in zip(found, origins, strict=True):
        files += _open_path(file, os.path.relpath(origin, parent), root)
    if not files or not all(file.size for file in files):
        empty = next((file.file for file in files if not file.size), path)
        raise UserError(f"data: {empty} has no rows")
    for row_file in files:
        row_file.max_text = max_text
    if isinstance(files[0], PreparedFile) and len(files) == 1 and not given_root:
        root = Path(files[0].entry["root"])
    return Source(files, root)


def _origin(file: Path) -> Path:
    """Where a file is from: the URL of one in the cache of stores, else its own path."""
    return Path(url_of(file) or file)


def absolute(folder: str | Path) -> Path:
    return Path(folder) if is_url(folder) else Path(folder).expanduser().absolute()


def split_rows(size: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """The held-out rows and the others: one of every 1 / fraction rows is held out, at a scattered place.

    The places depend on the row's index alone: rows that are appended to a file move no row into the other part, save
    those of the last, incomplete group.
    """
    group = min(round(1 / fraction), size)
    starts = np.arange(0, size - group + 1, group)
    # Multiples of an odd constant modulo 2^64 are scattered evenly: no period of the rows is met again and again.
    scattered = np.arange(len(starts), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    places = (scattered >> np.uint64(32)) % np.uint64(group)
    is_held_out = np.zeros(size, dtype=bool)
    is_held_out[starts + places.astype(np.int64)] = True
    return np.flatnonzero(is_held_out), np.flatnonzero(~is_held_out)


def expand_path(path: str | Path) -> list[str]:
    """The absolute path itself if it exists, else what it matches as a glob pattern, sorted; of a URL, URLs."""
    if is_url(path):
        from mvp_engine.stores import list_url

        return list_url(path)
    absolute = os.path.abspath(os.path.expanduser(path))
    if os.path.exists(absolute):
        return [absolute]
    return sorted(glob.glob(absolute, recursive=True))


def _find_files(paths: Sequence[str | Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        names = _local_copies(path) if is_url(path) else expand_path(path)
        if not names:
            is_id = _DATASET_ID.fullmatch(str(path)) and not Path(path).parent.is_dir()
            hint = f" For a dataset of the Hub, write hf://{path}" if is_id else similar_path(path)
            raise UserError(f"data: nothing at {path}.{hint}")
        found += map(Path, names)
        if len(set(found)) < len(found):
            raise UserError(f"data: files are named twice by {path}")
    if not found:
        raise UserError("data: a source needs a file")
    return found


def _local_copies(url: str | Path) -> list[str]:
    from mvp_engine.stores import local_paths

    return list(map(str, local_paths(url)))


def _open_path(path: Path, name: str, root: Path) -> list[RowFile]:
    if path.is_dir():
        return _open_folder(path, name, root)
    file = _open_file(path, name)
    return [Metadata(file, _relative(path.parent, root)) if path.name in METADATA_FILES else file]


def _relative(folder: Path, root: Path) -> str:
    return os.path.relpath(_origin(folder / "x").parent if is_url(root) else folder, root)


def _open_file(file: Path, name: str) -> RowFile:
    """A file by its suffix or its first bytes."""
    with open(file, "rb") as stream:
        head = stream.read(512)
    if not head:
        raise UserError(f"data: {file} is empty")
    suffix = file.suffix.lower()
    if head.startswith(_GZIP_MAGIC) or suffix in _COMPRESSED:
        raise UserError(
            f"data: {file} is compressed, and rows are read in any order: unpack it first, "
            "or set stream: true"
        )
    if suffix == ".parquet" or head.startswith(b"PAR1"):
        return ArrowFile(file, name, parquet=True)
    if suffix == ".arrow" or head.startswith(b"ARROW1"):
        return ArrowFile(file, name)
    if suffix == ".tar" or head[257:262] == b"ustar":
        return TarShard(file, name)
    if head.startswith(_UTF16_BOMS):
        raise UserError(f"data: {file} is UTF-16: iconv -f UTF-16 -t UTF-8 converts it")
    if suffix in (".csv", ".tsv"):
        return CsvFile(file, name, "\t" if suffix == ".tsv" else ",")
    if suffix == ".txt":
        return TextLines(file, name)
    text = head.removeprefix(_UTF8_BOM).lstrip()
    is_object = text.startswith(b"{")
    if text.startswith(b"[") or (suffix == ".json" and not is_object):
        return JsonList(file, name)
    if is_object and text.partition(b"\n")[0].strip() == b"{":
        raise UserError(
            f"data: {file} has JSON objects over several lines: write one object per line "
            "(jq -c . FILE), or one list of them"
        )
    if suffix in (".jsonl", ".ndjson", ".json") or is_object:  # many .json files are JSON lines
        return JsonLines(file, name)
    raise UserError(f"data: {file} is none of jsonl, json, csv, tsv, txt, parquet, arrow, tar")


def _open_folder(folder: Path, name: str, root: Path) -> list[RowFile]:
    """A dataset saved by `datasets`, an imagefolder with its metadata, or a folder of media."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(str(state.parent) for state in folder.glob("*/state.json"))
        raise UserError(f"data: {folder} has several splits: open one of {', '.join(splits)}")
    if (folder / "state.json").is_file():
        files = _saved_dataset_files(folder / "state.json")
        return [ArrowFile(folder / file, f"{name}/{file}") for file in files]
    if (prepared := prepared_file(folder)) is not None:
        return [prepared]
    if (of_kit := plugins.data_folder(folder)) is not None:
        raise UserError(f"data: {folder} {of_kit.reader}")
    for metadata in METADATA_FILES:
        if (folder / metadata).is_file():
            return _open_path(folder / metadata, f"{name}/{metadata}", root)
    return [MediaFolder(folder, name, root)]


def _saved_dataset_files(state: Path) -> list[str]:
    """The Arrow files that `Dataset.save_to_disk` lists in its state.json."""
    try:
        return [file["filename"] for file in json.loads(state.read_bytes())["_data_files"]]
    except (ValueError, LookupError, TypeError):
        raise UserError(f"data: {state} is not what `datasets` writes") from None


# Arrow and Parquet files by row number.


class ArrowFile(RowFile):
    """Arrow streams and files by memory-mapped record batches; Parquet files by row groups.

    Random access to Parquet is fast where row groups are small: a whole group is read for one row.
    """

    def __init__(self, file: Path, name: str, parquet: bool = False) -> None:
        super().__init__(file, name)
        self.parquet = parquet
        require_package("pyarrow", f"reading {file}")
        try:
            batch_sizes = [batch.num_rows for batch in self._batches]
        except (OSError, ValueError) as error:
            raise UserError(f"data: {file} cannot be read: {error}") from None
        self.ends = np.cumsum([0, *batch_sizes])
        self.size = int(self.ends[-1])
        self.fingerprint = content_hash(file_edges(file)).hexdigest()

    @functools.cached_property
    def _batches(self) -> list[Any]:
        """Record batches, or the metadata of row groups."""
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
        number = int(np.searchsorted(self.ends, index, side="right")) - 1
        batch = self._batches[number]
        if self.parquet:
            batch = _read_row_group(self.file, self.fingerprint, number)
        try:
            rows = batch.slice(index - int(self.ends[number]), 1).to_pylist()
        except UnicodeDecodeError as error:
            raise BadRow("bad_text", f"the row is not valid Unicode: {error}") from None
        return dict(rows[0])


@functools.lru_cache(maxsize=8)  # for all files of a process
def _read_row_group(file: Path, fingerprint: str, index: int) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(file).read_row_group(index)


# Files of plain lines and tables: .txt with one text per line, .csv and .tsv with a header.


class TextLines(JsonLines):
    """One text per line, as the text loader of `datasets` reads it; blank lines are no rows."""

    def may_fit(self, start: int, end: int) -> bool:
        return self.max_text is None or end - start <= 4 * self.max_text  # bytes of a character

    def row(self, index: int) -> dict[str, Any]:
        line = self.read_line(index)
        try:
            return {"text": line.decode("utf-8-sig").rstrip("\r\n")}
        except UnicodeDecodeError as error:
            raise BadRow("bad_text", f"the line is not UTF-8: {error}") from None


class _Record(NamedTuple):
    line: int  # of the file, from 1; a record may have several
    cells: list[str]


class CsvFile(RowFile):
    """A table with a header. It is kept in memory; each process parses the file again.

    An empty cell is an absent value. All others are text.
    """

    def __init__(self, file: Path, name: str, delimiter: str = ",") -> None:
        super().__init__(file, name)
        self.delimiter = delimiter
        self.fingerprint = content_hash(file.read_bytes()).hexdigest()
        try:
            self.size = len(self._table) - 1
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"data: {file} is not a table in UTF-8: {error}") from None
        names = self._table[0].cells
        if len(set(names)) < len(names) or not all(names):
            raise UserError(f"data: {file}: each column needs a name of its own, not {names}")

    @functools.cached_property
    def _table(self) -> list[_Record]:
        """The header, then the records."""
        text = io.StringIO(self.file.read_bytes().decode("utf-8-sig"), newline="")
        reader = csv.reader(text, delimiter=self.delimiter, strict=True)
        records = []
        start = 1
        for cells in reader:
            if cells:
                records.append(_Record(start, cells))
            start = reader.line_num + 1
        return records

    def row(self, index: int) -> dict[str, Any]:
        names = self._table[0].cells
        cells = self._table[index + 1].cells
        if len(cells) != len(names):
            raise BadRow("bad_csv", f"{len(cells)} cells, but the header has {len(names)}")
        return {name: cell or None for name, cell in zip(names, cells, strict=True)}

    def where(self, index: int) -> str:
        return f"{self.name}:{self._table[index + 1].line}"
