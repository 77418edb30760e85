"""Type checks of untrusted values: each returns the value, or raises a `BadRow` that says where it was.

`where` is the place in the row, such as `messages[1].content[0].text`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from mvp_engine.kit.data.read.row_types import BadRow

MAX_ESCAPE = 12  # bytes of one character in JSON: a pair of \\uXXXX
_MEDIA_MARKS = (b"base64", b"input_audio", b'"codes"')  # of lines that may be long without text
_JSON_TYPE_NAMES = {
    "NoneType": "null",
    "str": "a string",
    "dict": "an object",
    "list": "a list",
}


def type_name(value: Any) -> str:
    """The type of a value in JSON terms, for error messages."""
    name = type(value).__name__
    return _JSON_TYPE_NAMES.get(name, name)


def check_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRow("wrong_type", f"{where} is {type_name(value)}, wanted a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        # JSON can hold half a surrogate pair; tokenizers and files cannot.
        raise BadRow("bad_text", f"{where} is not valid Unicode") from None
    return value


def check_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise BadRow("wrong_type", f"{where} is {type_name(value)}, wanted a list")
    return list(value)


def check_object(value: Any, where: str) -> dict[str, Any]:
    """A copy of a mapping without null fields: Arrow fills the fields that a row lacks with nulls."""
    if not isinstance(value, Mapping):
        raise BadRow("wrong_type", f"{where} is {type_name(value)}, wanted an object")
    fields = {}
    for key, inner in value.items():
        if inner is not None and isinstance(key, str):
            fields[key] = inner
    return fields


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. BadRow if it has a key twice: one of the values would be lost.

    As a hook of the decoder it costs nothing for chats, and 0.6 us for each object of a list of small ones.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadRow("duplicate_key", f"an object has the key {twice!r:.40} twice")
    return found


def may_fit(size: int, max_text: int | None, has: Callable[[bytes], bool]) -> bool:
    """Whether JSON of `size` bytes, in which `has` finds bytes, may hold at most `max_text` characters of text."""
    if max_text is None or size <= max_text * MAX_ESCAPE:
        return True
    return any(map(has, _MEDIA_MARKS))


def too_long(what: str, max_text: int | None) -> BadRow:
    return BadRow(
        "too_long", f"{what}; {max_text:,} characters are allowed (mllm.limits.text_characters)"
    )


def parse_json(value: Any, where: str) -> Any:
    """The value itself, or what it encodes if it is a JSON string.

    Some columns hold JSON as a string, because Arrow wants one type for all rows.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value or "[]", object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        raise BadRow("bad_json", f"{where} is a string that is not JSON") from None


def check_json_serializable(value: Any, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        raise BadRow("wrong_type", f"{where} cannot be serialized to JSON") from None


def pop_first(fields: dict[str, Any], *keys: str) -> Any:
    """The first value among `keys` that is not null; all of these keys are removed."""
    values = [fields.pop(key, None) for key in keys]
    return next((value for value in values if value is not None), None)


def parse_object(value: Any, what: str, max_text: int | None = None) -> dict[str, Any]:
    """A raw row: an object, or the bytes of one in JSON, of which more than `max_text` characters are not parsed."""
    if isinstance(value, bytes):
        if not may_fit(len(value), max_text, value.__contains__):
            raise too_long(f"{what} of {len(value):,} bytes", max_text)
        try:
            value = json.loads(value, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise BadRow("bad_json", f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRow("wrong_type", f"{what} is {type(value).__name__}, wanted an object")
    return value
