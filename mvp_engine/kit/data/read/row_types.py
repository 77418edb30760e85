"""The data model of a row: messages made of text and media parts, their limits, and checks of untrusted values.

Every row format is read into these types (`rows.py`). Media stay undecoded, as the user gave them.

Type checks of untrusted values: each returns the value, or raises a `BadRow` that says where it was.

`where` is the place in the row, such as `messages[1].content[0].text`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict

# Of all decoded frames of a video in memory: above this, frames are scaled down.
CLIP_PIXELS = 2**28


# Guards without a key, since rows past them are broken or have to be cut anyway.
MAX_FILE_PIXELS = 89_478_485  # of an image or frame in its file; PIL itself stops at twice this
MAX_TEXT = 4_000_000  # characters of a row, before it is tokenized: about a million tokens


@dataclass(frozen=True)
class Limits:
    """Budgets for what the model sees, and guards against media and texts that are too large.

    Budgets go into the exported processor; None keeps what the processor has. Past a guard, the row is
    bad.
    """

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    # Budgets

    min_pixels: int | None = None
    """The fewest pixels of an image, as the model sees it."""
    max_pixels: int | None = None
    """The most pixels of an image, as the model sees it."""
    video_min_pixels: int | None = None
    """The fewest pixels of a video, as the family counts: of one frame, or (Qwen3-VL) of all frames."""
    video_max_pixels: int | None = None
    """The most pixels of a video, counted alike."""
    fps: float | None = None
    """Frames per second of video that the model sees."""
    min_frames: int | None = None
    """The fewest frames of a video."""
    max_frames: int | None = None
    """The most frames of a video."""
    chunk_seconds: int | None = None
    """Audio is padded to this, where the encoder takes any length (Qwen2.5-Omni)."""

    # Guards

    max_seconds: float | None = None
    """The longest video or audio, in seconds; null: an hour of video, ten minutes of audio."""
    timeout: float = 30.0
    """Seconds to probe one item, and to decode it. Workers that stay at the same rows for twenty times as long, and for
    at least 600 s, stop the run."""
    allow_outside: bool | None = None
    """Whether paths of media may lead out of the folder of their rows, or of the source's `root`; null: in local files
    they may, in a dataset of the Hub they may not."""


MEDIA = ("image", "video", "audio")
# Our role names, each with the spellings that datasets use for it.
ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "model", "bot", "chatgpt", "function_call", "tool_call"),
    "tool": ("tool", "function", "observation", "function_response", "tool_response"),
}


class BadRow(Exception):
    """A row that cannot be trained on: a fixed reason code such as "missing_file", and a detail."""

    def __init__(self, reason: str, detail: str) -> None:
        # Both are `args`, so that the exception pickles on its way out of a DataLoader worker.
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class Codes(NamedTuple):
    """The value of a media part that is given as discrete codes: lists, an array or a .npy file."""

    codes: Any


@dataclass(frozen=True)
class Part:
    """One content part of a message: a text, or one image, video or audio clip.

    The value of a media part is what the user gave: a path, a data URI, bytes, {"bytes", "path"}, a
    PIL image, an array, or a list of frames.
    """

    kind: str  # "text", "image", "video", "audio"
    value: Any
    options: Mapping[str, Any] = field(default_factory=dict)  # of this item, such as {"fps": 2}


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str  # "system", "user", "assistant", "tool"
    parts: tuple[Part, ...]
    # None: the default, by which assistant turns carry loss. A number is the weight of its tokens in the loss.
    loss: bool | float | None = None
    # tool_calls, name, ...: passed to the chat template unchanged.
    extra: Mapping[str, Any] = field(default_factory=dict)
    target: Part | None = None  # of an assistant turn: media that the model learns to predict

    @property
    def text(self) -> str:
        """All text parts, joined."""
        return "".join(part.value for part in self.parts if part.kind == "text")

    @property
    def has_media(self) -> bool:
        return any(part.kind in MEDIA for part in self.parts)


class TokenIds(NamedTuple):
    """A row that was tokenized before: the ids of the model's tokenizer, and which of them carry loss."""

    ids: list[int]
    loss: list[bool]


@dataclass(frozen=True)
class Row:
    """One row of a dataset: a conversation, a preference pair, a plain text, or token ids."""

    messages: tuple[Message, ...] = ()
    text: str | None = None  # plain text for pre-training: every token carries loss
    tools: tuple[Any, ...] = ()  # tool declarations for the chat template
    rejected: tuple[Message, ...] = ()  # preference pairs: `messages` is the chosen conversation
    # The parts of `text` with loss, as (first, end) characters; empty: all of it, with BOS and EOS.
    text_loss: tuple[tuple[int, int], ...] = ()
    tokens: TokenIds | None = None  # of a source with `tokenized_by`
    prompt_only: bool = False  # a conversation without an answer: no token carries loss
    weight: float = 1.0  # of the row in the loss: multiplies that of each of its tokens
    fields: Mapping[str, float] = field(default_factory=dict)  # numbers, by column (`data.fields`)
    format: str = field(default="", compare=False)
    unused: tuple[str, ...] = field(default=(), compare=False)  # columns that nothing read
    # "prompt" and "media", where the row has such a column without a value.
    nulls: frozenset[str] = field(default=frozenset(), compare=False)

    def num_characters(self) -> int:
        """Characters of all texts that a chat template may write, of both sides of a pair."""
        values: list[Any] = [self.text, self.tools]
        for message in (*self.messages, *self.rejected):
            values += [message.text, message.extra]
        total = 0
        while values:
            value = values.pop()
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, Mapping):
                values += value.values()
            elif isinstance(value, list | tuple):
                values += value
        return total

    def media(self) -> list[Part]:
        """Media parts of the conversation (the chosen one), in order of appearance."""
        parts: list[Part] = []
        for message in self.messages:
            parts += [part for part in message.parts if part.kind in MEDIA]
        return parts


class ParsedRow(dict[str, Any]):
    """A raw row whose source knows what it means, such as a frame of a recording: no column is read."""

    def parsed(self) -> Row:
        raise NotImplementedError


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
        "too_long", f"{what}; {max_text:,} characters are allowed: split the text into several rows"
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


FieldType = Literal["int", "float"]
OPTIONAL = "?"  # after a name in `columns`: the column may be null or empty


@dataclass(frozen=True)
class RowFormat:
    """The settings of a source that say what its columns mean."""

    name: str | None = None  # one of FORMATS; None: detected for each row
    columns: Mapping[str, str | None] = field(default_factory=dict)  # old name -> new; None: drop
    media_tags: bool = True  # <image> in a text stands for an image
    fields: Mapping[str, FieldType] = field(default_factory=dict)  # columns of numbers
    # True: rows need no answer. "always": the answers that they have are left out.
    prompt_only: bool | Literal["always"] = False
    targets: tuple[str, ...] = ()  # media of assistant turns that the model predicts
    max_text: int = MAX_TEXT
    downloaded: bool = False  # media may not be paths that lead out of the dataset's folder

    @cached_property
    def drops_answers(self) -> bool:
        return self.prompt_only == "always"

    def read_columns(self, raw: Any) -> Columns:
        """The columns of a raw row under their new names."""
        row = check_object(raw, "the row")
        renamed = {}
        for old, new in self.columns.items():
            value = row.pop(old, None)
            if value is not None and new is not None:
                renamed[column_name(new)] = value
        twice = sorted(renamed.keys() & row.keys())
        if twice:
            raise BadRow("two_columns", f"columns maps another column to {twice[0]!r}: map both")
        return Columns(row | renamed)

    @cached_property
    def optional(self) -> set[str]:
        """The columns that may be null or empty."""
        return {column_name(new) for new in self.columns.values() if new and new.endswith(OPTIONAL)}

    def null_columns(self, raw: Mapping[str, Any]) -> set[str]:
        """The columns, under their new names, that a raw row has without a value."""
        nulls = [key for key, value in raw.items() if value is None and isinstance(key, str)]
        named = {column_name(self.columns.get(key, key) or "") for key in nulls}
        return named - self.optional

    def take_fields(self, row: Columns) -> dict[str, float]:
        """The numbers of the row, by column. These columns mean nothing else then."""
        return {
            name: _number(row.pop(name, None), name, kind) for name, kind in self.fields.items()
        }


def column_name(new: str) -> str:
    """The name of a column in a value of `columns`, without the mark of an optional one."""
    return new.removesuffix(OPTIONAL)


class Columns(dict[str, Any]):
    """The columns of a row, and which of them nothing has read."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        super().__init__(columns)
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def unused(self) -> list[str]:
        return [key for key in self if key not in self._read]


def _number(value: Any, name: str, kind: FieldType) -> float:
    where = f"the column {name!r} of data.fields"
    if value is None:
        raise BadRow("missing_field", f"the row has no value in {where}")
    try:
        number = float(value)  # also of bool, and of text as csv files have it
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        number = float(value.strip().lower() == "true")
    if not math.isfinite(number) or (kind == "int" and number != int(number)):
        shown = f"{value!r:.40}" if isinstance(value, str | int | float) else type_name(value)
        raise BadRow("bad_field", f"{where} is {shown}, wanted a finite {kind}")
    return int(number) if kind == "int" else number
