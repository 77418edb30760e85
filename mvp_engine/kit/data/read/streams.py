"""Streams: rows that can only be read in order, from pipes, compressed files, tar shards or functions.

A stream yields, for each row, its place and a function that reads it, so that the rows of other ranks
are skipped unread.
"""

from __future__ import annotations

import functools
import gzip
import os
import stat
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError, similar_path
from mvp_engine.imports import load_spec
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.sample_files import (
    is_link,
    is_sample_member,
    merge_sample,
    sample_key,
)
from mvp_engine.kit.data.read.sources import expand_path
from mvp_engine.kit.data.read.value_checks import parse_object

ReadRow = Callable[[], dict[str, Any]]
RowFunction = Callable[[], Iterable[Any]]
_JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_STDIN = "-"


class Stream:
    """One named stream of rows; each `iter` starts it from the beginning."""

    def __init__(
        self,
        name: str,
        path: str | Sequence[str],
        root: str | None = None,
        format: RowFormat | str | None = None,
    ) -> None:
        self.name = name
        self.format = format
        self.max_text = format.max_text if isinstance(format, RowFormat) else None
        self.parts: list[str | RowFunction] = []
        for each in [path] if isinstance(path, str) else path:
            self.parts += _open_parts(each)
        first = self.parts[0]
        folder = Path.cwd()
        if isinstance(first, str) and first != _STDIN:
            folder = Path(first).absolute().parent
        self.root = Path(root).expanduser().absolute() if root else folder

    @property
    def is_pipe(self) -> bool:
        """Whether a part of it is a pipe, which one process can read, once."""
        return any(_is_pipe_part(part) for part in self.parts)

    def __iter__(self) -> Iterator[tuple[str, ReadRow]]:
        for part in self.parts:
            if not isinstance(part, str):
                yield from _function_rows(part, self.name)
            elif part.lower().endswith(_TARS):
                yield from _tar_rows(Path(part))
            else:
                yield from _json_line_rows(part, self.max_text)


def _open_parts(path: str) -> Sequence[str | RowFunction]:
    """The files that a path names, or the function of `module:function`."""
    if path == _STDIN:
        return [path]
    names = expand_path(path)
    for name in names:
        if not name.lower().endswith(_JSON_LINES + _TARS) and not _is_fifo(name):
            supported = ", ".join(_JSON_LINES + _TARS)
            raise UserError(f"data: {name} cannot be read as a stream; supported are {supported}")
    if names:
        return names
    if ":" not in path:
        raise UserError(f"data: nothing at {path}.{similar_path(path)}")
    module, function_name = load_spec(path, Path.cwd(), "data: the stream")
    function = getattr(module, function_name or "", None)
    if not callable(function):
        raise UserError(f"data: {path} is not a function that returns rows")
    return [function]


def _is_fifo(path: str) -> bool:
    return stat.S_ISFIFO(os.stat(path).st_mode)


def _is_pipe_part(part: str | RowFunction) -> bool:
    return isinstance(part, str) and (part == _STDIN or _is_fifo(part))


def _function_rows(function: RowFunction, name: str) -> Iterator[tuple[str, ReadRow]]:
    for number, row in enumerate(function()):
        yield f"{name}[{number}]", functools.partial(_copy_mapping, row)


def _copy_mapping(row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise BadRow("wrong_type", f"the row is {type(row).__name__}, wanted a mapping")
    return dict(row)


def _json_line_rows(path: str, max_text: int | None) -> Iterator[tuple[str, ReadRow]]:
    name = "stdin" if path == _STDIN else os.path.basename(path)
    try:
        with _open_lines(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    read = functools.partial(parse_object, line, "the line", max_text)
                    yield f"{name}:{number}", read
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"data: {path} cannot be read to its end: {error}") from None


def _open_lines(path: str) -> AbstractContextManager[Iterable[bytes]]:
    if path == _STDIN:
        return nullcontext(sys.stdin.buffer)
    return gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb")


def _tar_rows(path: Path) -> Iterator[tuple[str, ReadRow]]:
    """Samples of a WebDataset shard, in which the members of a sample are adjacent.

    An uncompressed tar can seek, so its skipped rows are not read at all.
    """
    can_seek = path.suffix == ".tar"
    try:
        with tarfile.open(path, "r:" if can_seek else "r|*") as tar:
            members = (_without_link(member) for member in filter(is_sample_member, tar))
            for key, group in groupby(members, key=lambda member: sample_key(member.name)):
                read: ReadRow
                if can_seek:
                    read = functools.partial(_read_sample, tar, list(group))
                else:
                    contents = [(member.name, _read_member(tar, member)) for member in group]
                    read = functools.partial(merge_sample, contents)
                yield f"{path.name}:{key}", read
                # TarFile keeps the headers of all members: memory would grow with the stream.
                tar.members = []  # type: ignore[attr-defined]
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"data: {path} is not a complete tar file: {error}") from None


def _without_link(member: tarfile.TarInfo) -> tarfile.TarInfo:
    if is_link(member):
        raise UserError(
            f"data: {member.name} is a link, which a stream cannot follow: set stream: false, or "
            "pack the file again with tar --dereference --hard-dereference"
        )
    return member


def _read_sample(tar: tarfile.TarFile, members: list[tarfile.TarInfo]) -> dict[str, Any]:
    return merge_sample((member.name, _read_member(tar, member)) for member in members)


def _read_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    data = tar.extractfile(member)
    assert data is not None
    return data.read()


class StreamMixture:
    """Several streams interleaved by weight: each row comes once, from the stream most behind its weight."""

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float]) -> None:
        self.streams = list(streams)
        self.weights = list(weights)
        names = [stream.name for stream in streams]
        if len(set(names)) < len(names):
            raise UserError(f"data: streams need different names, not {names}")

    def rows(self) -> Iterator[tuple[int, str, ReadRow]]:
        """(index of the stream, place of the row, function that reads it)."""
        remaining = {index: iter(stream) for index, stream in enumerate(self.streams)}
        taken = dict.fromkeys(remaining, 0)
        while remaining:
            index = min(remaining, key=lambda one: (taken[one] + 1) / self.weights[one])
            taken[index] += 1
            row = next(remaining[index], None)
            if row is None:
                del remaining[index]
            else:
                yield index, *row
