"""The data model of a row: messages made of text and media parts, and the error for an unusable row.

Every row format is read into these types (`rows.py`). Media stay undecoded, as the user gave them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    loss: bool | None = None  # None: the default, by which assistant turns carry loss
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


@dataclass(frozen=True)
class Row:
    """One row of a dataset: a conversation, a preference pair, or a plain text."""

    messages: tuple[Message, ...] = ()
    text: str | None = None  # plain text for pre-training: every token carries loss
    tools: tuple[Any, ...] = ()  # tool declarations for the chat template
    rejected: tuple[Message, ...] = ()  # preference pairs: `messages` is the chosen conversation
    # The parts of `text` with loss, as (first, end) characters; empty: all of it, with BOS and EOS.
    text_loss: tuple[tuple[int, int], ...] = ()
    prompt_only: bool = False  # a conversation without an answer: no token carries loss
    fields: Mapping[str, float] = field(default_factory=dict)  # numbers, by column (`mllm.fields`)
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
