"""SizeCache: the sizes of media files that were read before, so that these files are not opened again.

A size does not depend on the model, its processor or any pixel budget. An entry is valid as long as the file has the
same length and modification time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mvp_engine.kit.data.read.limits import Limits
from mvp_engine.kit.data.read.media_source import file_of, open_media
from mvp_engine.kit.data.read.row_types import Part

# One entry of a cache file: never change it, take another file name instead.
SIZE_RECORD = np.dtype(
    [
        ("file", "V16"),  # a hash of kind, path, length and modification time
        ("width", "<i8"),
        ("height", "<i8"),
        ("length", "<i8"),
        ("rate", "<f8"),
    ]
)


class MediaSize(NamedTuple):
    """Width and height; frames and frames per second of a video; samples and sampling rate of audio."""

    width: int
    height: int
    length: int = 0
    rate: float = 0.0


class SizeCache:
    """Sizes by file. `take_new` returns those that were found since, for the cache file."""

    def __init__(self, known: np.ndarray | None = None) -> None:
        """`known` has the dtype SIZE_RECORD."""
        self._known: dict[bytes, MediaSize] = {}
        self._new: list[tuple[Any, ...]] = []
        self._keys: dict[tuple[str, str], bytes] = {}  # by kind and path: a file is looked up once
        if known is not None:
            for file, *size in known.tolist():
                self._known[bytes(file)] = MediaSize(*size)

    def file_key(self, kind: str, value: Any, limits: Limits, root: Path) -> bytes | None:
        """A hash of an item's file and its stamp; None for an item without a file. Raises what `open_media` raises."""
        path = file_of(value)
        if path is None:
            return None
        if (kind, path) not in self._keys:
            opened = open_media(path, limits, root, kind)
            assert isinstance(opened, Path)
            found = opened.stat()
            stamp = f"{found.st_size} {found.st_mtime_ns}"  # changes when the file is replaced
            self._keys[kind, path] = _hash(f"{kind} {opened} {stamp}")
        return self._keys[kind, path]

    def knows(self, kind: str, value: Any, limits: Limits, root: Path) -> bool:
        return self.file_key(kind, value, limits, root) in self._known

    def find(
        self, kind: str, value: Any, limits: Limits, root: Path, read: Callable[[], MediaSize]
    ) -> MediaSize:
        """The size of an item, by `read` if it is not known."""
        key = self.file_key(kind, value, limits, root)
        if key is None:
            return read()
        size = self._known.get(key)
        if size is None:
            size = read()
            self._known[key] = size
            self._new.append((key, *size))
        return size

    def take_new(self) -> np.ndarray:
        found = np.array(self._new, SIZE_RECORD)
        self._new = []
        return found


def row_key(raw: Any, parts: Iterable[Part], sizes: SizeCache, limits: Limits, root: Path) -> bytes:
    """A hash of a row and of its media files. Raises BadRow for a missing file."""
    text = [repr(raw)]
    for part in parts:
        values = part.value if isinstance(part.value, list | tuple) else [part.value]
        text += [repr(sizes.file_key(part.kind, value, limits, root)) for value in values]
    return _hash("\0".join(text))


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
