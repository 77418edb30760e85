"""Rows that can only be read one after the other: pipes, compressed files, tar shards, functions that give rows.

A stream gives, for each row, where it is and a function that reads it: rows of other ranks are passed over unread.
"""

from __future__ import annotations

import functools
import glob
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

from mvp_engine.errors import UserError
from mvp_engine.imports import load_spec
from mvp_engine.kit.data.read.rows import BadRow
from mvp_engine.kit.data.read.sources import parse_object, sample_key, sample_of

Read = Callable[[], dict[str, Any]]
_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


class Stream:
    """One named stream of rows, begun anew by each `iter`."""

    def __init__(
        self,
        name: str,
        path: str | Sequence[str],
        root: str | None = None,
        format: str | None = None,
    ) -> None:
        self.name, self.format = name, format
        self.parts = [
            part for each in ([path] if isinstance(path, str) else path) for part in _parts(each)
        ]
        first = self.parts[0]
        folder = Path.cwd() if callable(first) or first == "-" else Path(first).absolute().parent
        self.root = Path(root).expanduser().absolute() if root else folder

    @property
    def once(self) -> bool:
        """Whether it is a pipe, which one process can read, once."""
        return any(isinstance(part, str) and (part == "-" or _is_pipe(part)) for part in self.parts)

    def __iter__(self) -> Iterator[tuple[str, Read]]:
        for part in self.parts:
            if callable(part):
                yield from _called(part, self.name)
            elif part.lower().endswith(_TARS):
                yield from _tar(Path(part))
            else:
                yield from _lines(part)


def _parts(path: str) -> list[Any]:
    if path == "-":
        return [path]
    whole = os.path.abspath(os.path.expanduser(path))
    names = [whole] if os.path.exists(whole) else sorted(glob.glob(whole, recursive=True))
    if names:
        for name in names:
            if not name.lower().endswith(_LINES + _TARS) and not _is_pipe(name):
                raise UserError(
                    f"data: {name} cannot be read as a stream: that takes {', '.join(_LINES + _TARS)}"
                )
        return names
    if ":" not in path:
        raise UserError(f"data: there is nothing at {path}")
    module, function_name = load_spec(path, Path.cwd(), "data: the stream")
    function = getattr(module, function_name or "", None)
    if not callable(function):
        raise UserError(f"data: {path} is not a function that gives rows")
    return [function]


def _is_pipe(path: str) -> bool:
    return stat.S_ISFIFO(os.stat(path).st_mode)


def _called(function: Callable[[], Iterable[Any]], name: str) -> Iterator[tuple[str, Read]]:
    for number, row in enumerate(function()):
        yield f"{name}[{number}]", functools.partial(_mapping, row)


def _mapping(row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise BadRow("wrong_type", f"the row is {type(row).__name__}, wanted a mapping")
    return dict(row)


def _lines(path: str) -> Iterator[tuple[str, Read]]:
    name = "stdin" if path == "-" else os.path.basename(path)
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{name}:{number}", functools.partial(parse_object, line, "the line")
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"data: {path} cannot be read to its end: {error}") from None


def _opened(path: str) -> AbstractContextManager[Iterable[bytes]]:
    if path == "-":
        return nullcontext(sys.stdin.buffer)
    return gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb")


def _tar(path: Path) -> Iterator[tuple[str, Read]]:
    """Members of a sample lie side by side, as WebDataset has it. Of a plain tar, rows passed over are not read."""
    plain = path.suffix == ".tar"
    try:
        with tarfile.open(path, "r:" if plain else "r|*") as tar:
            members = (
                m
                for m in tar
                if m.isreg() and not m.name.rpartition("/")[2].startswith((".", "__"))
            )
            for key, group in groupby(members, key=lambda member: sample_key(member.name)):
                if plain:
                    yield f"{path.name}:{key}", functools.partial(_sample, tar, list(group))
                else:
                    read = [(member.name, _bytes(tar, member)) for member in group]
                    yield f"{path.name}:{key}", functools.partial(sample_of, read)
                tar.members = []  # type: ignore[attr-defined]  # it remembers all that it passed
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"data: {path} is no whole tar file: {error}") from None


def _sample(tar: tarfile.TarFile, members: list[tarfile.TarInfo]) -> dict[str, Any]:
    return sample_of((member.name, _bytes(tar, member)) for member in members)


def _bytes(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    data = tar.extractfile(member)
    assert data is not None
    return data.read()


class Streams:
    """Several streams in one order: each row comes once, the next from the stream that is most behind its weight."""

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float]) -> None:
        self.streams, self.weights = list(streams), list(weights)
        if len({stream.name for stream in streams}) < len(streams):
            raise UserError(
                f"data: streams want different names, not {[stream.name for stream in streams]}"
            )

    def rows(self) -> Iterator[tuple[int, str, Read]]:
        """Which stream, where, and how to read it."""
        left = {which: iter(stream) for which, stream in enumerate(self.streams)}
        taken = dict.fromkeys(left, 0)
        while left:
            which = min(left, key=lambda one: (taken[one] + 1) / self.weights[one])
            taken[which] += 1
            row = next(left[which], None)
            if row is None:
                del left[which]
            else:
                yield which, *row
