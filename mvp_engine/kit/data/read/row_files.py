"""RowFile: the base of files that give rows by index, and fingerprints of their content."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

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
