"""Media columns of a row (`images`, `video`, ...), and their assignment to placeholders in messages.

What a column holds goes to typed blocks without a value (`{"type": "image"}`) and to `<image>` in text,
in order of appearance. Three readings are tried; the first that uses up the column holds:

1. typed blocks alone, if the row has any;
2. typed blocks, and tags in the text of every role except the assistant;
3. typed blocks, and tags in all texts.

So an `<image>` in an answer stays text when the questions have used up the images. A row that fits no
reading is bad. Without a column, `<image>` is plain text: `<video>` and `<audio>` are HTML tags too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mvp_engine.kit.data.read.messages import FROM_COLUMN, check_media_value
from mvp_engine.kit.data.read.row_types import MEDIA, ROLES, BadRow, Message, Part

Columns = Mapping[str, list[Part]]


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


def fill_placeholders(messages: Sequence[Message], columns: Columns) -> list[Message]:
    """The messages with the columns' media in place of typed blocks and tags."""
    if not columns and not any(_takes_from_column(message) for message in messages):
        return list(messages)
    # Kind -> the roles in which a tag such as <image> is a placeholder.
    roles = {kind: _roles_with_tags(messages, kind, columns.get(kind)) for kind in MEDIA}
    remaining = {kind: iter(columns.get(kind, [])) for kind in MEDIA}
    filled = []
    for message in messages:
        tags = [f"<{kind}>" for kind in MEDIA if message.role in roles[kind]]
        parts = tuple(_filled_parts(message.parts, tags, remaining))
        filled.append(replace(message, parts=parts))
    return filled


def _takes_from_column(message: Message) -> bool:
    return any(part.value is FROM_COLUMN for part in message.parts)


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


def _roles_with_tags(
    messages: Sequence[Message],
    kind: str,
    column: Sequence[Part] | None,
) -> set[str]:
    """The roles in which tags are placeholders of `kind`: the three readings at the top."""
    blocks = 0
    tags_in_questions = 0
    tags_in_answers = 0
    for message in messages:
        blocks += sum(part.kind == kind and part.value is FROM_COLUMN for part in message.parts)
        texts = [part.value for part in message.parts if part.kind == "text"]
        tags = sum(text.count(f"<{kind}>") for text in texts)
        if message.role == "assistant":
            tags_in_answers += tags
        else:
            tags_in_questions += tags
    if column is None:
        if blocks:
            raise BadRow(
                "media_count",
                f"{blocks} {kind} block(s) have no value, and the row has no {kind} column",
            )
        return set()
    items = len(column)
    if 0 < blocks == items:
        return set()
    if blocks + tags_in_questions == items:
        return set(ROLES) - {"assistant"}
    if blocks + tags_in_questions + tags_in_answers == items:
        return set(ROLES)
    questions = f"{blocks + tags_in_questions} place(s) in the questions"
    raise BadRow(
        "media_count",
        f"{items} in the {kind} column, but {questions} and {tags_in_answers} in the answers "
        f"(<{kind}>, or a block without value)",
    )
