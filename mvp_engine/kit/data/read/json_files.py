"""JSON lines and JSON lists."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.row_files import RowFile, content_hash
from mvp_engine.kit.data.read.value_checks import parse_object

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
        # Opened for every row, because forked processes would share the position of an open file. Seek,
        # read and parse take 0.03 ms.
        with open(self.file, "rb") as stream:
            stream.seek(start)
            return stream.read(end - start)

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
        return json.loads(self.file.read_bytes())

    def row(self, index: int) -> dict[str, Any]:
        return dict(parse_object(self._rows[index], "the entry"))
