"""Row formats: a raw row of any supported format, read into a `Row`.

Nothing is opened or decoded here. A row that cannot be trained on raises `BadRow`, whatever it holds.
Rules that the formats share:

- `null` means absent everywhere: Arrow fills the columns and fields that a row lacks with nulls.
- Strings for prompt and completion (chosen, rejected) are a user and an assistant turn. A prompt, and
  the turns that chosen and rejected share, carry no loss unless a message says so.
- `text` (or `caption`) together with media is a caption: the media are the user's turn, the text is the
  assistant's.
- Media columns fill placeholders as described in `media_columns.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.media_columns import fill_placeholders, read_media_columns
from mvp_engine.kit.data.read.messages import (
    has_actions,
    read_messages,
    read_turns,
    text_message,
)
from mvp_engine.kit.data.read.preference import (
    common_prompt_length,
    join_prompt_and_answer,
    num_shared_turns,
)
from mvp_engine.kit.data.read.row_types import MEDIA, BadRow, Message, Part, Row
from mvp_engine.kit.data.read.value_checks import (
    check_json_serializable,
    check_list,
    check_object,
    check_text,
    parse_json,
)

RawRow = Mapping[str, Any]
# Format -> the keys that identify it, in the order of detection: the more specific formats first.
FORMATS = {
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}


def read_row(raw: RawRow, format: str | None = None) -> Row:
    """The parsed row; `format` is one of FORMATS, or None to detect it. Raises BadRow."""
    if format is not None and format not in FORMATS:
        raise UserError(
            f"unknown row format {format!r}; choose one of {', '.join(sorted(FORMATS))}"
        )
    row = check_object(raw, "the row")
    name = format or detect_format(row)
    if name is None or not _has_format(row, name):
        raise BadRow("unknown_format", _unknown_format_detail(raw, row, name))
    return _READERS[name](row)


def detect_format(raw: RawRow) -> str | None:
    """The first of FORMATS that the row has all keys of."""
    row = check_object(raw, "the row")
    return next((name for name in FORMATS if _has_format(row, name)), None)


def _has_format(row: RawRow, format: str) -> bool:
    if all(key in row for key in FORMATS[format]):
        return True
    if format != "text" or "caption" not in row:
        return False
    return any(kind in row or f"{kind}s" in row for kind in MEDIA)


def _unknown_format_detail(raw: RawRow, row: RawRow, name: str | None) -> str:
    keys = []
    for key in list(raw)[:20]:
        keys.append(f"{key!r:.40}" + ("" if key in row else " (null)"))
    wanted = []
    for format in [name] if name else FORMATS:
        wanted.append(f"{format} wants {' and '.join(FORMATS[format])}")
    return f"the row has {', '.join(keys) or 'no keys'}; {'; '.join(wanted)}"


def _read_messages_format(row: RawRow) -> Row:
    return _conversation_row(row, [], read_messages(row["messages"], "messages"))


def _read_sharegpt(row: RawRow) -> Row:
    return _conversation_row(row, [], read_messages(row["conversations"], "conversations"))


def _read_prompt_completion(row: RawRow) -> Row:
    prompt = read_turns(row["prompt"], "prompt")
    completion = read_turns(row["completion"], "completion")
    return _conversation_row(row, prompt, completion)


def _read_alpaca(row: RawRow) -> Row:
    turns = _alpaca_prompt(row)
    turns.append(text_message("assistant", row["output"], "output"))
    return _conversation_row(row, [], turns)


def _alpaca_prompt(row: RawRow) -> list[Message]:
    """The turns before the answer: `history` pairs, then `instruction` and `input`."""
    turns = []
    for index, pair in enumerate(check_list(row.get("history", []), "history")):
        where = f"history[{index}]"
        size = len(check_list(pair, where))
        if size != 2:
            raise BadRow(
                "wrong_type", f"{where} has {size} entries, wanted a question and an answer"
            )
        turns.append(text_message("user", pair[0], f"{where}[0]"))
        turns.append(text_message("assistant", pair[1], f"{where}[1]"))
    texts = [check_text(row[key], key) for key in ("instruction", "input") if key in row]
    question = "\n".join(text for text in texts if text)
    return [*turns, text_message("user", question, "instruction")]


def _read_preference(row: RawRow) -> Row:
    chosen = row["chosen"]
    rejected = row["rejected"]
    prompt: list[Message] = []
    prompt_key = next((key for key in ("prompt", "messages", "conversations") if key in row), None)
    if prompt_key:
        prompt = read_turns(row[prompt_key], prompt_key)
    elif "instruction" in row:
        prompt = _alpaca_prompt(row)
    elif isinstance(chosen, str) and isinstance(rejected, str):
        end = common_prompt_length(chosen, rejected)
        prompt = read_turns(chosen[:end].strip(), "prompt")
        if not prompt[0].text:
            raise BadRow(
                "no_prompt", "the row has no prompt, and chosen and rejected share no first words"
            )
        chosen = chosen[end:]
        rejected = rejected[end:]
    chosen_turns = join_prompt_and_answer(prompt, read_turns(chosen, "chosen"), "chosen")
    rejected_turns = join_prompt_and_answer(prompt, read_turns(rejected, "rejected"), "rejected")
    shared = num_shared_turns(chosen_turns, rejected_turns)
    good = _conversation_row(row, chosen_turns[:shared], chosen_turns[shared:])
    bad = _conversation_row(row, rejected_turns[:shared], rejected_turns[shared:])
    return replace(good, rejected=bad.messages)


def _read_text(row: RawRow) -> Row:
    key = "text" if "text" in row else "caption"
    text = check_text(row[key], key)
    columns = read_media_columns(row)
    if not text.strip():
        raise BadRow("empty", f"{key} is empty")
    media: list[Part] = []
    for kind in MEDIA:
        media += columns.get(kind, [])
    if not media:
        return Row(text=text)
    if any(f"<{part.kind}>" in text for part in media):
        raise BadRow(
            "media_count", f"{key} has placeholders: write interleaved documents as messages"
        )
    caption = Message("assistant", (Part("text", text),))
    return Row(messages=(Message("user", tuple(media)), caption))


_READERS: dict[str, Callable[[RawRow], Row]] = {
    "preference": _read_preference,
    "messages": _read_messages_format,
    "sharegpt": _read_sharegpt,
    "prompt_completion": _read_prompt_completion,
    "alpaca": _read_alpaca,
    "text": _read_text,
}


def _conversation_row(
    row: RawRow,
    prompt: Sequence[Message],
    answer: Sequence[Message],
) -> Row:
    """A row with the system and tools columns, media in their places, and a non-empty answer."""
    if not any(_is_answer(message) for message in answer):
        raise BadRow("no_answer", "no assistant turn has any content")
    messages = [replace(message, loss=message.loss or False) for message in prompt]
    messages += answer
    if check_text(row.get("system", ""), "system"):
        if messages[0].role == "system":
            raise BadRow("two_systems", "the row has a system column and a system message")
        messages.insert(0, text_message("system", row["system"], "system"))
    tools = check_list(parse_json(row.get("tools", "[]"), "tools"), "tools")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        check_json_serializable(check_object(tool, where), where)
    filled = fill_placeholders(messages, read_media_columns(row))
    return Row(messages=tuple(filled), tools=tuple(tools))


def _is_answer(message: Message) -> bool:
    return message.role == "assistant" and bool(message.text.strip() or has_actions(message))
