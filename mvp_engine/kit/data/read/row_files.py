"""Files that give rows by index, and fingerprints of their content: JSON lines and lists, WebDataset shards, folders.

Samples that are several files: WebDataset shards, and folders of media with captions.

Files of one sample have the same name up to the first dot (shards) or the last dot (folders). The
`.json` is the row, the `.txt` is its `text`, and media are its `images`, `videos`, `audios`; they
replace what the row has under these names. Media are bytes from a shard, and paths from a folder. So
an image and a text are a caption. Other members of a shard are in the row as bytes, under their
extension.

Prepared rows: what `mvp data prepare` writes (tools/prepare.py) and a training reads without tokenizing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import mmap
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from mvp_engine.errors import UserError, count
from mvp_engine.kit.data.read.decoders import MediaInfo
from mvp_engine.kit.data.read.media_source import media_kind, require_package, suffix_of
from mvp_engine.kit.data.read.row_types import (
    MEDIA,
    BadRow,
    Message,
    ParsedRow,
    Part,
    Row,
    may_fit,
    parse_object,
    too_long,
    unique_keys,
)
from mvp_engine.kit.data.settings import MANIFEST, read_manifest

# Bytes at either end of a file that go into its fingerprint.
_EDGE_BYTES = 1 << 16


class RowFile:
    """Rows of one file (or folder) by index.

    Attributes with a leading underscore are not pickled, and are created again on use: a source
    pickles to a few arrays, and processes share no open file.
    """

    size: int
    fingerprint: str
    max_text: int | None = None  # characters of a row, where that is known before it is parsed

    def __init__(self, file: Path, name: str) -> None:
        self.file = file
        self.name = name

    def row(self, index: int) -> dict[str, Any]:
        """The raw row; BadRow if it cannot be parsed."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        """The place of a row, for error messages."""
        return f"{self.name}[{index}]"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}


def content_hash(data: bytes = b"") -> Any:
    """A hash object for fingerprints: `.update(...)`, `.hexdigest()`."""
    return hashlib.blake2b(data, digest_size=16)


def file_edges(file: Path) -> bytes:
    """Size, first and last bytes: these differ between versions of a format with an index or a footer."""
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        head = stream.read(_EDGE_BYTES)
        stream.seek(max(_EDGE_BYTES, size - _EDGE_BYTES))
        return b"%d " % size + head + stream.read(_EDGE_BYTES)


_CHUNK_BYTES = 1 << 24


class JsonLines(RowFile):
    """One JSON object per line. The file is scanned once for line ends; blank lines are no rows."""

    def __init__(self, file: Path, name: str) -> None:
        super().__init__(file, name)
        data = np.memmap(file, np.uint8, "r")
        digest = content_hash()
        newlines = []
        for offset in range(0, len(data), _CHUNK_BYTES):
            chunk = data[offset : offset + _CHUNK_BYTES]
            digest.update(chunk.data)
            newlines.append(np.flatnonzero(chunk == ord("\n")) + offset)
        ends = np.concatenate([*newlines, [len(data)]])
        starts = np.concatenate([[0], ends[:-1] + 1])
        lines = np.flatnonzero(_is_not_blank(data, starts, ends))
        self.size = len(lines)
        self.fingerprint = digest.hexdigest()
        self.starts = starts[lines]
        self.ends = ends[lines]
        # Line numbers, where blank lines make them differ from row numbers.
        has_blank_lines = len(lines) > 0 and lines[-1] >= len(lines)
        self.lines = lines if has_blank_lines else None

    def read_line(self, index: int) -> bytes:
        start = int(self.starts[index])
        end = int(self.ends[index])
        if not self.may_fit(start, end):
            raise too_long(f"the line of {end - start:,} bytes", self.max_text)
        # Opened for every row, because forked processes would share the position of an open file. Seek,
        # read and parse take 0.03 ms.
        with open(self.file, "rb") as stream:
            stream.seek(start)
            return stream.read(end - start)

    def may_fit(self, start: int, end: int) -> bool:
        """Whether the line from `start` to `end` is not too long to be read."""
        return may_fit(end - start, self.max_text, lambda mark: self._has(mark, start, end))

    def _has(self, mark: bytes, start: int, end: int) -> bool:
        with (
            open(self.file, "rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return data.find(mark, start, end) >= 0

    def row(self, index: int) -> dict[str, Any]:
        return parse_object(self.read_line(index), "the line")

    def where(self, index: int) -> str:
        line = index if self.lines is None else self.lines[index]
        return f"{self.name}:{line + 1}"


def _is_not_blank(
    data: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
) -> np.ndarray:
    """Which lines have more than a line end; a lone carriage return is a Windows line end."""
    lengths = ends - starts
    has_bytes = lengths > 0
    not_return = data[starts[has_bytes]] != ord("\r")
    full = has_bytes.copy()
    full[has_bytes] = (lengths[has_bytes] > 1) | not_return
    return full


class JsonList(RowFile):
    """One JSON list of objects. It is kept in memory; each process parses the file again."""

    def __init__(self, file: Path, name: str) -> None:
        super().__init__(file, name)
        self.fingerprint = content_hash(file.read_bytes()).hexdigest()
        try:
            self.size = len(self._rows)
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"data: {file} is not a JSON list: {error}") from None

    @functools.cached_property
    def _rows(self) -> list[Any]:
        """The entries; in the place of a bad one, its BadRow."""

        def object_of(pairs: list[tuple[str, Any]]) -> Any:
            try:
                return unique_keys(pairs)
            except BadRow as error:
                return error

        return json.loads(self.file.read_bytes(), object_pairs_hook=object_of)

    def row(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        values = [row]
        while values:
            value = values.pop()
            if isinstance(value, BadRow):
                raise BadRow(value.reason, value.detail)
            if isinstance(value, dict | list):
                values += value.values() if isinstance(value, dict) else value
        return dict(parse_object(row, "the entry"))


LOGGER = logging.getLogger("mvp_engine")
MAX_LINKS = 40  # from link to link, as in Linux


def sample_key(name: str) -> str:
    """The name of the sample that a member of a shard belongs to."""
    base_start = name.rfind("/") + 1
    return name[:base_start] + name[base_start:].partition(".")[0]


def is_sample_member(member: tarfile.TarInfo) -> bool:
    """Whether a member of a tar file is data: hidden files and those of macOS are not."""
    base = member.name.rpartition("/")[2]
    return (member.isreg() or is_link(member)) and not base.startswith((".", "__"))


def is_link(member: tarfile.TarInfo) -> bool:
    return member.islnk() or member.issym()


def _link_target(member: tarfile.TarInfo) -> str:
    """The name of the member that a link refers to: symbolic links are relative to their folder."""
    folder = os.path.dirname(member.name) if member.issym() else ""
    return os.path.normpath(os.path.join(folder, member.linkname))


def merge_sample(members: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """One row from the files of a sample, given as (name, content or path)."""
    row: dict[str, Any] = {}
    from_files: dict[str, Any] = {}
    for name, value in members:
        suffix = suffix_of(name)
        kind = media_kind(name)
        if suffix == "json":
            row = parse_object(value, "the .json file")
        elif suffix == "txt":
            from_files["text"] = _decode_text(value)
        elif kind is not None:
            from_files.setdefault(f"{kind}s", []).append(value)
        else:
            extension = name.rpartition("/")[2].partition(".")[2]
            from_files[extension] = value
    for kind in MEDIA:
        if f"{kind}s" in from_files:
            row.pop(kind, None)
    return row | from_files


def _decode_text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise BadRow("bad_text", f"the .txt file is not UTF-8: {error}") from None


class StrictTarInfo(tarfile.TarInfo):
    """A header of a tar file. tarfile takes one that it cannot read, or a missing one, for the end of the file."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise  # the mark of the end
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {tar.offset:,}") from None


class TarShard(RowFile):
    """A WebDataset tar file. Its headers are scanned once; a sample is the offsets of its headers."""

    def __init__(self, file: Path, name: str) -> None:
        super().__init__(file, name)
        samples: dict[str, list[tarfile.TarInfo]] = {}
        targets: dict[str, tarfile.TarInfo] = {}  # what links may refer to, by name
        digest = content_hash(file_edges(file))
        try:
            with tarfile.open(file, "r:", tarinfo=StrictTarInfo) as tar:
                for member in tar:
                    targets[os.path.normpath(member.name)] = member
                    if is_sample_member(member):
                        samples.setdefault(sample_key(member.name), []).append(member)
                        digest.update(_name_and_size(member.name, member.size))
        except tarfile.TarError as error:
            raise UserError(f"data: {file} is not a complete tar file: {error}") from None
        offsets: list[int] = []
        self.link_names: dict[int, str] = {}  # by index in `headers`
        for member in chain.from_iterable(samples.values()):
            if is_link(member):
                self.link_names[len(offsets)] = member.name
            offsets.append(_resolve_link(file, member, targets).offset)
        self.headers = np.array(offsets, np.int64)
        self.ends = np.cumsum([0, *map(len, samples.values())])
        self.size = len(samples)
        self.fingerprint = digest.hexdigest()

    def _members(self, index: int) -> Iterator[tuple[str, IO[bytes]]]:
        with open(self.file, "rb") as stream:
            for header in range(self.ends[index], self.ends[index + 1]):
                stream.seek(int(self.headers[header]))
                with tarfile.open(fileobj=stream, mode="r:") as tar:
                    member = next(iter(tar))
                    data = tar.extractfile(member)
                    assert data is not None, f"{self.file} changed after it was opened"
                    yield self.link_names.get(header, member.name), data

    def row(self, index: int) -> dict[str, Any]:
        return merge_sample((name, data.read()) for name, data in self._members(index))

    def where(self, index: int) -> str:
        first_name, _ = next(self._members(index))
        return f"{self.name}:{sample_key(first_name)}"


def _resolve_link(
    file: Path,
    member: tarfile.TarInfo,
    targets: Mapping[str, tarfile.TarInfo],
) -> tarfile.TarInfo:
    """The member with the content of `member`. Links may refer to links, but not to themselves."""
    found = member
    for _ in range(MAX_LINKS):
        if not is_link(found):
            return found
        target = targets.get(_link_target(found))
        if target is None or target.isdir():
            break
        found = target
    raise UserError(
        f"data: {file}: {member.name} is a link to {found.linkname}, which the file does not contain. "
        "Pack it again with tar --dereference --hard-dereference"
    )


class Metadata(RowFile):
    """The metadata.csv, .jsonl or .parquet of Hugging Face's imagefolder and its relatives.

    `file_name` is the row's image, video or audio file, in `folder`.
    """

    def __init__(self, table: RowFile, folder: str) -> None:
        super().__init__(table.file, table.name)
        self.table = table
        self.folder = folder
        self.size = table.size
        self.fingerprint = table.fingerprint

    def row(self, index: int) -> dict[str, Any]:
        row = self.table.row(index)
        if "file_name" in row:
            name = row.pop("file_name")
            kind = media_kind(name) if isinstance(name, str) else None
            if kind is None:
                raise BadRow(
                    "bad_media", "file_name is not the name of an image, video or audio file"
                )
            row[f"{kind}s"] = [os.path.normpath(f"{self.folder}/{name}")]
        return row

    def where(self, index: int) -> str:
        return self.table.where(index)


class MediaFolder(RowFile):
    """A folder of media files with captions; a folder without media is `.txt` files as documents."""

    def __init__(self, folder: Path, name: str, root: Path) -> None:
        super().__init__(folder, name)
        self.root = root
        groups: dict[Path, list[str]] = {}
        digest = content_hash()
        for path in _visible_files(folder):
            inside = path.relative_to(folder)
            suffix = suffix_of(path.name)
            if suffix in ("jsonl", "parquet", "arrow", "tar"):
                raise UserError(
                    f"data: {folder} holds {inside}: name such files one by one, or by a glob"
                )
            is_media = media_kind(path.name) is not None
            if not is_media and suffix not in ("txt", "json"):
                continue
            groups.setdefault(path.with_suffix(""), []).append(os.path.relpath(path, root))
            digest.update(_name_and_size(str(inside), path.stat().st_size))
            if not is_media:
                digest.update(file_edges(path))
        self.samples = [names for names in groups.values() if any(map(media_kind, names))]
        without_media = len(groups) - len(self.samples)
        if self.samples and without_media:
            LOGGER.warning(
                "data: %s: left out %s without an image, video or audio file of that name",
                folder,
                count(without_media, "text or json file"),
            )
        if not self.samples:
            self.samples = [names for names in groups.values() if suffix_of(names[-1]) == "txt"]
        self.size = len(self.samples)
        self.fingerprint = digest.hexdigest()

    def row(self, index: int) -> dict[str, Any]:
        members: list[tuple[str, Any]] = []
        for name in self.samples[index]:
            content = name if media_kind(name) else self._read_text(name)
            members.append((name, content))
        return merge_sample(members)

    def _read_text(self, name: str) -> bytes:
        """A caption or a document; media are opened, and checked, by `open_media`."""
        file = (self.root / name).resolve()
        if not file.is_relative_to(self.root.resolve()):
            raise BadRow("path_escape", f"{name} is a link that leads out of {self.root}")
        return file.read_bytes()

    def where(self, index: int) -> str:
        return self.samples[index][0]


def _visible_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in inside.parts)
        if not is_hidden and path.is_file():
            yield path


def _name_and_size(name: str, size: int) -> bytes:
    return f"{name} {size}\n".encode(errors="backslashreplace")


# Prepared rows: Arrow files with token ids, loss masks and references to media, next to the costs of all rows.

COSTS = "costs.npz"
SHARD = "shard-{:05d}.arrow"


class PreparedSide(NamedTuple):
    """A sequence as it was tokenized: of a preference pair one of two, else the only one."""

    ids: list[int]
    loss: list[bool]
    parts: list[Part]  # its media,
    infos: list[MediaInfo]  # their sizes,
    spans: list[tuple[int, int]]  # and the tokens of each


class PreparedRow(ParsedRow):
    """A row that is tokenized already; the row encoder takes its sides as they are."""

    def __init__(self, sides: list[PreparedSide], numbers: Mapping[str, float]) -> None:
        super().__init__()
        self.sides = sides
        self.numbers = numbers

    def parsed(self) -> Row:
        """Its media and its numbers: the text is not kept."""
        turns = []
        for side in self.sides:
            turns.append(Message("assistant", tuple(side.parts)))
        return Row((turns[0],), rejected=tuple(turns[1:]), fields=self.numbers, format="prepared")


def prepared_file(folder: Path) -> PreparedFile | None:
    """The rows of one source of prepared data, of which `folder` is OUT/SPLIT/NAME; None for other folders."""
    top = folder.parent.parent
    manifest = read_manifest(top) if (top / MANIFEST).is_file() else None
    inside = folder.relative_to(top).as_posix()
    found = [one for one in (manifest or {}).get("sources", ()) if one["folder"] == inside]
    return PreparedFile(folder, manifest, found[0]) if manifest and found else None


class PreparedFile(RowFile):
    """The rows of one source of prepared data. A row is read from a memory-mapped file, without the rows around it."""

    def __init__(self, folder: Path, manifest: dict[str, Any], entry: dict[str, Any]) -> None:
        super().__init__(folder, entry["name"])
        self.manifest = manifest
        self.entry = entry
        self.ends = np.cumsum([0, *(rows for rows, _ in entry["shards"])])
        self.size = int(self.ends[-1])
        self.fingerprint = entry["fingerprint"]

    def row(self, index: int) -> dict[str, Any]:
        columns, place = self._find(index)

        def cell(name: str) -> Any:
            return columns[name][place].as_py()

        if reason := cell("bad"):
            raise BadRow(*json.loads(reason))
        ids = columns["input_ids"][place].values.to_numpy().tolist()
        runs = columns["loss"][place].values.to_numpy()
        loss = (np.repeat(np.arange(len(runs)), runs) % 2 == 1).tolist()
        media = read_media(cell("media"), cell("blobs"))
        start = 0
        sides = []
        for end, items in zip(cell("ends"), media, strict=False):
            sides.append(PreparedSide(ids[start:end], loss[start:end], *items))
            start = end
        return PreparedRow(sides, json.loads(cell("fields") or "{}"))

    def cost(self, index: int) -> int:
        """The tokens of a row; 0: it is left out."""
        columns, place = self._find(index)
        return int(columns["tokens"][place].as_py())

    def where(self, index: int) -> str:
        columns, place = self._find(index)
        return str(columns["where"][place].as_py())

    def _find(self, index: int) -> tuple[Any, int]:
        shard = int(np.searchsorted(self.ends, index, side="right")) - 1
        return open_shard(self.file / SHARD.format(shard)), index - int(self.ends[shard])


@functools.lru_cache(maxsize=256)  # each of them keeps a file open
def open_shard(file: Path) -> dict[str, Any]:
    """The columns of a shard, memory-mapped."""
    pa = require_package("pyarrow", f"reading {file}")
    try:
        batch = pa.ipc.open_file(pa.memory_map(str(file))).get_batch(0)
    except (OSError, ValueError) as error:
        raise UserError(
            f"data: {file} cannot be read: {error}. Remove it, and start mvp data prepare again"
        ) from None
    return dict(zip(batch.schema.names, batch.columns, strict=True))


def write_media(sides: Iterable[Any]) -> tuple[str | None, list[bytes] | None]:
    """The media of sequences as JSON, and the bytes that it refers to by number; None without media."""
    blobs: list[bytes] = []

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            blobs.append(value)
            return {"blob": len(blobs) - 1}
        if isinstance(value, Mapping):
            return {"object": {key: plain(inner) for key, inner in value.items()}}
        if isinstance(value, list | tuple):
            return [plain(inner) for inner in value]
        if value is None or isinstance(value, str | int | float):
            return value
        raise BadRow("unsupported", f"media of type {type(value).__name__} cannot be written")

    found = []
    for side in sides:
        items = []
        for part, info, span in zip(side.parts, side.infos, side.spans, strict=True):
            known = {name: value for name, value in vars(info).items() if name != "kind" and value}
            items.append([part.kind, plain(part.value), plain(dict(part.options)), known, *span])
        found.append(items)
    return (json.dumps(found), blobs or None) if any(found) else (None, None)


def read_media(text: str | None, blobs: list[bytes] | None) -> list[Any]:
    """Parts, sizes and token spans of the media of each sequence, as `write_media` was given them."""

    def value_of(plain: Any) -> Any:
        if isinstance(plain, list):
            return [value_of(one) for one in plain]
        if isinstance(plain, dict):
            inner = plain.get("object")
            return value_of_object(inner) if inner is not None else (blobs or [])[plain["blob"]]
        return plain

    def value_of_object(fields: dict[str, Any]) -> dict[str, Any]:
        return {key: value_of(inner) for key, inner in fields.items()}

    if text is None:
        return [([], [], []), ([], [], [])]
    found = []
    for items in json.loads(text):
        parts = [
            Part(kind, value_of(value), value_of(options)) for kind, value, options, *_ in items
        ]
        infos = [MediaInfo(item[0], **item[3]) for item in items]
        found.append((parts, infos, [(item[4], item[5]) for item in items]))
    return found
