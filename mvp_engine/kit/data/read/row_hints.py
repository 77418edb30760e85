"""What is probably meant by a row that has the columns of no format, or one of media that nothing reads."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mvp_engine.kit.data.read.media_names import media_kind
from mvp_engine.kit.data.read.row_types import MEDIA, BadRow, Row

if TYPE_CHECKING:
    import numpy as np

    from mvp_engine.kit.data.read.sources import Source

Formats = Mapping[str, Sequence[str]]  # name -> the columns that it wants
MEDIA_MASK = 15  # the bits of media in the costs of a row


class _Null(NamedTuple):
    bit: int  # of cached files: never change it
    reason: str
    detail: str


_KEEP = "nearly all rows of the file have one. `columns: {COLUMN: COLUMN?}` of the source keeps such rows"
_NULLS = {
    "media": _Null(16, "null_media", f"the row's column of media is null, and {_KEEP}"),
    "prompt": _Null(32, "null_prompt", f"the row's prompt is null, and {_KEEP}"),
}
_MAX_NAME = 1024  # a longer string is no file name


def describe_columns(raw: Mapping[str, Any], formats: Formats) -> str:
    """What a row of no format has, what is wanted, and the likely `columns` of its source."""
    found = [key for key in raw if isinstance(key, str) and raw[key] is not None]
    shown = [f"{key!r:.40}" + (" (null)" if raw[key] is None else "") for key in list(raw)[:20]]
    if found and all(key.removesuffix("s") in MEDIA for key in found):
        has = " and ".join(found)
        return f"the row has {has}, and no text. A caption is a column text, or a .txt file of the same name"
    text = f"the row has {', '.join(shown) or 'no columns'}"
    for wanted in formats.values():
        renamed = _similar_columns(found, wanted)
        if renamed:
            pairs = ", ".join(f"{old}: {new}" for old, new in renamed.items())
            return f"{text}. Did you mean `columns: {{{pairs}}}` of the source?"
    names = ", ".join(dict.fromkeys(" and ".join(wanted) for wanted in formats.values()))
    return (
        f"{text}; wanted: {names}. Rename columns with `columns: {{YOURS: WANTED}}` of the source; "
        "mllm.prompt_only=true is for rows without an answer"
    )


def _similar_columns(found: Sequence[str], wanted: Sequence[str]) -> dict[str, str]:
    """The columns to rename, old name first; none unless all that are wanted have one of a similar name."""
    renamed: dict[str, str] = {}
    for name in wanted:
        if name in found:
            continue
        old = next((key for key in found if key not in renamed and _is_similar(key, name)), None)
        if old is None:
            return {}
        renamed[old] = name
    return renamed


def _is_similar(key: str, name: str) -> bool:
    words = re.split(r"[\W_]+", key.lower())
    if name in words and (name != "text" or len(words) == 1):
        return True
    return difflib.SequenceMatcher(None, key.lower(), name).ratio() > 0.85


def refuse_unread_media(row: Mapping[str, Any], unused: Sequence[str]) -> None:
    """Raise if a row without media has files of them in a column that nothing reads: it would train on text alone."""
    for key in unused:
        kind = None if key == "id" else _kind_of_value(row[key])
        if kind is not None:
            raise BadRow(
                "bad_media",
                f"the row's only {kind} is in the column {key!r}, which nothing reads: rename it with "
                f"`columns: {{{key}: {kind}}}` of the source, or drop it with {{{key}: null}}",
            )


def null_bits(row: Row) -> int:
    """Which columns of the row have no value, for `null_rows`."""
    return sum(_NULLS[kind].bit for kind in row.nulls)


def null_rows(source: Source, bits: np.ndarray) -> dict[int, tuple[str, str]]:
    """The rows without a prompt or media in a file whose other rows have them, with the reason and a detail.

    `bits` are the kinds of media of each good row of the source and its `null_bits`; 0 for bad rows.
    A file in which many rows have none is a mixture: its rows are as they should be.
    """
    bad = {}
    for kind, null in _NULLS.items():
        without = (bits & null.bit) > 0
        others = (bits & MEDIA_MASK) > 0 if kind == "media" else ~without
        for row in source.rare_rows(without, others).tolist():
            bad[row] = null.reason, null.detail
    return bad


def _kind_of_value(value: Any) -> str | None:
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if isinstance(value, Mapping):  # as `datasets` stores media
        if not value.keys() <= {"bytes", "path"}:
            return None
        path = value.get("path")
        return (media_kind(path) if isinstance(path, str) else None) or "image"
    is_name = isinstance(value, str) and len(value) < _MAX_NAME and "." in value
    return media_kind(value) if is_name and "\n" not in value else None
