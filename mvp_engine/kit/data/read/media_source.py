"""Access to the bytes of media: paths, data URIs and bytes. `Limits.allow_outside` says where paths may lead."""

from __future__ import annotations

import base64
import binascii
import importlib
import io
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from PIL import Image

from mvp_engine.errors import UserError
from mvp_engine.files import as_url, is_url
from mvp_engine.kit.data.read.row_types import BadRow, Limits, Part

_SUFFIXES = {
    "image": "jpg jpeg png webp gif bmp tif tiff",
    "video": "mp4 mkv webm avi mov m4v mpg mpeg",
    "audio": "wav flac mp3 ogg opus m4a",
}


def _kinds_by_suffix() -> dict[str, str]:
    kinds = {}
    for kind, suffixes in _SUFFIXES.items():
        kinds.update(dict.fromkeys(suffixes.split(), kind))
    return kinds


_KIND_OF_SUFFIX = _kinds_by_suffix()


def media_kind(name: str) -> str | None:
    """The media kind of a file by its name; None for other files."""
    return _KIND_OF_SUFFIX.get(suffix_of(name))


def suffix_of(name: str) -> str:
    return name.rpartition(".")[2].lower()


def require_package(module: str, what: str, extra: str = "data") -> Any:
    """The imported module of an optional package, or a UserError that says how to install it."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # the package is there, something that it imports is not
        raise UserError(
            f"{what} needs the package {package}: pip install 'mvp-engine[{extra}]'"
        ) from None


@contextmanager
def decoder_errors(what: str) -> Iterator[None]:
    """Turns any exception of a decoder into a BadRow: broken bytes make decoders raise nearly anything.

    Only calls into decoders belong inside, so that a bug of ours still raises.
    """
    try:
        yield
    except BadRow:
        raise
    except Image.DecompressionBombError as error:
        raise BadRow("too_large", f"{what}: {error}") from None
    except Exception as error:  # noqa: BLE001
        raise BadRow("corrupt", f"{what}: {type(error).__name__}: {error}"[:500]) from None


def describe(part: Part) -> str:
    """The kind and the path of an item, for error messages."""
    value = part.value
    if isinstance(value, Mapping):
        value = value.get("path")
    if isinstance(value, str | os.PathLike):
        return f"{part.kind} {str(value)[:200]}"
    return f"{part.kind} {type(part.value).__name__}"


def file_of(value: Any) -> str | None:
    """The path that a media value names; None where the value holds the item itself."""
    if isinstance(value, Mapping):
        holds_item = value.get("bytes") is not None or value.get("array") is not None
        value = None if holds_item else value.get("path")
    if not isinstance(value, str | os.PathLike):
        return None
    text = os.fspath(value)
    return None if text.startswith("data:") else text


def open_media(
    value: Any,
    limits: Limits,
    root: Path,
    what: str,
) -> Path | io.BytesIO:
    """The file or the bytes that a media value refers to; of a file below a URL, a copy in the cache.

    Rows fetch nothing from elsewhere, unless `allow_outside` is true: they could name any address that this machine
    reaches.
    """
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes | bytearray | memoryview):
        if not len(value):
            raise BadRow("corrupt", f"{what}: no bytes")
        return io.BytesIO(value)
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise BadRow(
            "wrong_type", f"{what} cannot be read from {type(value).__name__} {str(value)[:80]!r}"
        )
    text = os.fspath(value)
    if text.startswith("data:"):
        return _decode_data_uri(text, what)
    if text.startswith("file://"):
        text = unquote(urlsplit(text).path)
    elif "://" in text[:16] or (":/" in str(root) and is_url(root)):
        return _fetch(text, limits, root, what)
    return _resolve_file(text, limits, root, what)


def _fetch(text: str, limits: Limits, root: Path, what: str) -> Path:
    """A local copy of a file below the URL `root`. An outage is no bad row: it ends the training."""
    from mvp_engine import stores

    shown = stores.redacted(text[:200])
    try:
        if not is_url(text):
            text = stores.join_url(root, os.path.normpath(text))
        folder = as_url(root) if is_url(root) else None
        is_inside = folder is not None and text.startswith(f"{folder}/") and "/../" not in text
        if not is_inside and limits.allow_outside is not True:
            fix = "set the source's root to the URL of a folder above it, or data.limits.allow_outside=true"
            raise BadRow("unsupported", f"{what} {shown} is not below {folder or root}: {fix}")
        stores.refuse_credentials(text)
        return stores.local_copy(text, fresh=False)
    except stores.MissingUrl as error:
        raise BadRow("missing_file", f"{what}: {error}") from None
    except stores.StoreError:
        raise
    except UserError as error:
        raise BadRow("path_escape", f"{what}: {error}") from None


def _decode_data_uri(text: str, what: str) -> io.BytesIO:
    head = text.partition(",")[0]
    body = text[len(head) + 1 :]
    if not head.endswith(";base64"):
        return io.BytesIO(b"")  # which no decoder takes
    try:
        return io.BytesIO(base64.b64decode("".join(body.split()), validate=True))
    except (binascii.Error, ValueError) as error:
        raise BadRow("corrupt", f"{what}: data URI: {error}") from None


def path_escape(what: str, text: str, folder: str | Path) -> BadRow:
    fix = "set the source's root, or data.limits.allow_outside=true"
    return BadRow("path_escape", f"{what}: {text[:200]} leads out of {folder}: {fix}")


def _resolve_file(text: str, limits: Limits, root: Path, what: str) -> Path:
    try:
        path = (root / text).resolve()
        folder = root.resolve()
        if limits.allow_outside is False and not path.is_relative_to(folder):
            raise path_escape(what, text, folder)
        mode = path.stat().st_mode
    except FileNotFoundError:
        fix = "paths are relative to the folder of their rows, or to the source's root"
        raise BadRow("missing_file", f"{what}: no file {str(path)[:300]}; {fix}") from None
    except (OSError, ValueError, RuntimeError) as error:
        # Too long, with a NUL character, or a loop of symbolic links.
        raise BadRow("missing_file", f"{what}: {str(error)[:300]}") from None
    if not stat.S_ISREG(mode):  # reading from a pipe or a device might never end
        raise BadRow("unsupported", f"{what}: {path} is not a regular file")
    return path
