"""JSON lines and JSON lists."""

from __future__ import annotations

import functools
import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.row_files import RowFile, content_hash
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.value_checks import may_fit, parse_object, too_long, unique_keys

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
