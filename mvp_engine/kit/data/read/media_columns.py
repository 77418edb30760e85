"""Media columns of a row (`images`, `video`, ...), and their assignment to placeholders in messages.

What a column holds goes to typed blocks without a value (`{"type": "image"}`) and to `<image>` in text,
in order of appearance. Three readings are tried; the first that uses up the column holds:

1. typed blocks alone, if the row has any;
2. typed blocks, and tags in the text of every role except the assistant;
3. typed blocks, and tags in all texts.

So an `<image>` in an answer stays text when the questions have used up the images. A row that fits no
reading is bad. Where messages have no place for any item, the items come first in the first user turn.

Without a column, `<image>` in a question is a bad row: the image is probably in a column of another
name. `<video>` and `<audio>` are HTML tags too: they are text if the row has no column that nothing
reads. In answers all of them are text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mvp_engine import plugins
from mvp_engine.errors import count
from mvp_engine.kit.data.read.messages import FROM_COLUMN, check_media_value
from mvp_engine.kit.data.read.row_format import Columns
from mvp_engine.kit.data.read.row_types import MEDIA, ROLES, BadRow, Codes, Message, Part


def read_media_columns(row: Mapping[str, Any]) -> dict[str, list[Part]]:
    """The media columns that the row has, by kind.

    A list is several items, except under `video` and inside `videos`: there it is one video as frames.
    """
    columns = {}
    for kind in MEDIA:
        keys = [key for key in (kind, f"{kind}s") if key in row]
        if len(keys) == 2:
            raise BadRow("bad_media", f"the row has both {kind} and {kind}s")
        if keys:
            columns[kind] = _read_column(kind, keys[0], row[keys[0]])
    return columns


def _read_column(kind: str, key: str, value: Any) -> list[Part]:
    is_list = isinstance(value, list | tuple) and key != "video"
    items = value if is_list else [value]
    parts = []
    for index, item in enumerate(items):
        parts.append(Part(kind, check_media_value(kind, item, f"{key}[{index}]")))
    return parts


def fill_placeholders(
    messages: Sequence[Message],
    row: Columns,
    media_tags: bool = True,
) -> list[Message]:
    """The messages with the media of the row's columns in place of typed blocks and tags.

    Without `media_tags`, tags are text.
    """
    columns = read_media_columns(row)
    messages = list(messages)
    # Kind -> the roles in which a tag such as <image> is a placeholder.
    roles: dict[str, set[str]] = {}
    first_items: list[Part] = []
    for kind in MEDIA:
        places = count_places(messages, kind, media_tags)
        items = columns.get(kind)
        if items is None:
            check_no_places(places, kind, row.unused())
            roles[kind] = set()
        elif items and not places.total and not _has_media(messages, kind):
            first_items += columns.pop(kind)
            roles[kind] = set()
        else:
            roles[kind] = _roles_with_tags(places, kind, len(items))
    remaining = {kind: iter(columns.get(kind, [])) for kind in MEDIA}
    filled = []
    for message in messages:
        tags = [f"<{kind}>" for kind in MEDIA if message.role in roles[kind]]
        parts = tuple(_filled_parts(message.parts, tags, remaining))
        filled.append(replace(message, parts=parts))
    return _with_first_items(filled, first_items)


def _has_media(messages: Sequence[Message], kind: str) -> bool:
    return any(part.kind == kind for message in messages for part in message.parts)


def _with_first_items(messages: list[Message], items: Sequence[Part]) -> list[Message]:
    """The messages with `items` at the beginning of the first user turn."""
    if not items:
        return messages
    for index, message in enumerate(messages):
        if message.role == "user":
            messages[index] = replace(message, parts=(*items, *message.parts))
            return messages
    raise BadRow("media_count", "the row has media, but no user turn to put them into")


def _filled_parts(
    parts: Sequence[Part],
    tags: Sequence[str],
    remaining: Mapping[str, Iterator[Part]],
) -> Iterator[Part]:
    for part in parts:
        if part.kind == "text":
            yield from _split_at_tags(part, tags, remaining)
        elif part.value is FROM_COLUMN:
            yield replace(part, value=next(remaining[part.kind]).value)
        else:
            yield part


def _split_at_tags(
    part: Part,
    tags: Sequence[str],
    remaining: Mapping[str, Iterator[Part]],
) -> Iterator[Part]:
    if not tags:
        if part.value:
            yield Part("text", part.value)
        return
    for piece in re.split(f"({'|'.join(tags)})", part.value):
        if piece in tags:
            yield next(remaining[piece[1:-1]])
        elif piece:
            yield Part("text", piece)


class Places(NamedTuple):
    """Where a conversation has room for media of one kind."""

    blocks: int  # typed blocks without a value
    in_questions: int  # tags
    in_answers: int

    @property
    def total(self) -> int:
        return sum(self)


def count_places(messages: Sequence[Message], kind: str, media_tags: bool) -> Places:
    blocks = 0
    in_questions = 0
    in_answers = 0
    for message in messages:
        blocks += sum(part.kind == kind and part.value is FROM_COLUMN for part in message.parts)
        texts = [part.value for part in message.parts if part.kind == "text"]
        tags = sum(text.count(f"<{kind}>") for text in texts) if media_tags else 0
        if message.role == "assistant":
            in_answers += tags
        else:
            in_questions += tags
    return Places(blocks, in_questions, in_answers)


def check_no_places(places: Places, kind: str, unused: Sequence[str]) -> None:
    """Raise if a conversation has places for media, but the row has no column of that kind."""
    if places.blocks:
        problem = f"{count(places.blocks, f'{kind} block')} without a value"
    elif places.in_questions and (kind == "image" or unused):
        problem = f"<{kind}> is {count(places.in_questions, 'time')} in the questions"
    else:
        return
    raise BadRow(
        "media_count",
        f"{problem}, but the row has no column {kind} or {kind}s. "
        f"Columns that nothing reads: {', '.join(unused) or 'none'}. Rename the column with "
        f"`columns: {{COLUMN: {kind}s}}` of the source, or set media_tags: false if <{kind}> is text",
    )


def _roles_with_tags(places: Places, kind: str, items: int) -> set[str]:
    """The roles in which tags are placeholders of `kind`: the three readings at the top."""
    if 0 < places.blocks == items:
        return set()
    if places.blocks + places.in_questions == items:
        return set(ROLES) - {"assistant"}
    if places.total == items:
        return set(ROLES)
    questions = f"{count(places.blocks + places.in_questions, 'place')} in the questions"
    raise BadRow(
        "media_count",
        f"{items} in the {kind} column, but {questions} and {places.in_answers} in the answers "
        f"(<{kind}>, or a block without value)",
    )


def take_targets(messages: Sequence[Message], targets: Collection[str]) -> list[Message]:
    """The messages with media that the model predicts as the `target` of assistant turns, not as a part of them.

    `targets` are the kinds that the model of this training predicts. Kits say what the others are, by kind.
    """
    found = []
    for index, message in enumerate(messages):
        kinds = {part.kind for part in message.parts} if message.role == "assistant" else set()
        for kind in sorted(kinds & plugins.names("target").keys()):
            message = plugins.load("target", kind)(message, index, kind in targets)
        if any(isinstance(part.value, Codes) for part in message.parts):
            raise BadRow(
                "bad_media",
                f"message {index} ({message.role}) has codes, which only an assistant may have, and a model that "
                "predicts them: give the audio itself",
            )
        found.append(message)
    return found
