"""Rows as users have them, read into one shape: who said what, with which media, and what carries loss.

Nothing is opened or decoded here: a row's media stay what the user gave. What cannot be trained on is a `BadRow` with a
reason and the place in the row, whatever junk the row holds. Rules that a reader would otherwise have to guess:

- `null` means "not there" everywhere, since Arrow fills the columns and fields that a row lacks with nulls.
- Placeholders. What is in a column (`images` or `image`, ...) goes to typed blocks without value (`{"type": "image"}`)
  and to `<image>` in text, in order of appearance. Three readings are tried; the first that uses the column up holds:
  typed blocks alone, if any; with them the text of everybody but the assistant; with them the assistant's too. So an
  `<image>` in an answer stays text when the questions have used the images up. If no reading fits, the row is bad.
  Without a column `<image>` is text and nothing else: `<video>` and `<audio>` are HTML, people ask about them.
- `image` and `audio` may be a list of items; a list under `video`, or inside `videos`, is one video as its frames.
- Strings for prompt and completion (chosen, rejected) are a user and an assistant turn. A prompt, and the turns that
  chosen and rejected share, carry no loss unless a message says so.
- `text` (or `caption`) beside media is a caption: the media are the user's turn, the text is the assistant's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mvp_engine.errors import UserError

MEDIA = ("image", "video", "audio")
ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "model", "bot", "chatgpt", "function_call", "tool_call"),
    "tool": ("tool", "function", "observation", "function_response", "tool_response"),
}
_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
# The keys that make a format, in the order in which they are looked for: the more particular first.
FORMATS = {
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
_BLOCKS = {f"{kind}{suffix}": kind for kind in MEDIA for suffix in ("", "_url")} | {
    "input_audio": "audio"
}
_ACTS = ("tool_calls", "reasoning_content")
_FROM_COLUMN = object()  # the value of a typed block that names none


class BadRow(Exception):
    """A row that cannot be trained on, with a short reason (a fixed word such as "missing_file") and a detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(
            reason, detail
        )  # both are args, so that it pickles on its way out of a worker
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True)
class Part:
    """A piece of a message's content."""

    kind: str  # "text", "image", "video", "audio"
    value: Any  # str for text; media as the user gave them: path, data URI, bytes, {"bytes", "path"}, PIL, array, frames
    options: Mapping[str, Any] = field(
        default_factory=dict
    )  # given beside the media, such as {"fps": 2}


@dataclass(frozen=True)
class Message:
    role: str  # "system", "user", "assistant", "tool"
    parts: tuple[Part, ...]
    loss: bool | None = None  # None: the default (assistant turns carry loss)
    extra: Mapping[str, Any] = field(
        default_factory=dict
    )  # tool_calls, name, ...: handed to the template as they are

    @property
    def text(self) -> str:
        return "".join(part.value for part in self.parts if part.kind == "text")


@dataclass(frozen=True)
class Row:
    messages: tuple[Message, ...] = ()
    text: str | None = None  # plain text for pre-training: everything carries loss
    tools: tuple[Any, ...] = ()  # tool declarations for the template
    rejected: tuple[Message, ...] = ()  # preference pairs: `messages` is the chosen conversation

    def media(self) -> list[Part]:
        """Images, videos and audio of the conversation (the chosen one), in order of appearance."""
        return [part for message in self.messages for part in message.parts if part.kind in MEDIA]


def read_row(raw: Mapping[str, Any], format: str | None = None) -> Row:
    """The row in our shape; `format` is one of FORMATS, or None to recognise it. BadRow if it cannot be trained on."""
    if format is not None and format not in FORMATS:
        raise UserError(
            f"there is no row format {format!r}; choose one of {', '.join(sorted(FORMATS))}"
        )
    row = _object(raw, "the row")
    name = format or recognise(row)
    if name is None or not _has(row, name):
        wanted = "; ".join(
            f"{n} wants {' and '.join(FORMATS[n])}" for n in ([name] if name else FORMATS)
        )
        keys = ", ".join([f"{key!r:.40}" + ("" if key in row else " (null)") for key in raw][:20])
        raise BadRow("unknown_format", f"the row has {keys or 'no keys'}; {wanted}")
    return _READERS[name](row)


def recognise(raw: Mapping[str, Any]) -> str | None:
    """The first of FORMATS whose keys are there."""
    row = _object(raw, "the row")
    return next((name for name in FORMATS if _has(row, name)), None)


def _has(row: Mapping[str, Any], format: str) -> bool:
    whole = all(key in row for key in FORMATS[format])
    return whole or (
        format == "text" and "caption" in row and any(k in row or f"{k}s" in row for k in MEDIA)
    )


def _alpaca_prompt(row: Mapping[str, Any]) -> list[Message]:
    messages = []
    for index, pair in enumerate(_list(row.get("history", []), "history")):
        where = f"history[{index}]"
        if len(_list(pair, where)) != 2:
            raise BadRow(
                "wrong_type", f"{where} has {len(pair)} entries, wanted a question and an answer"
            )
        messages += [
            _turn("user", pair[0], f"{where}[0]"),
            _turn("assistant", pair[1], f"{where}[1]"),
        ]
    texts = [_text(row[key], key) for key in ("instruction", "input") if key in row]
    return [*messages, _turn("user", "\n".join(text for text in texts if text), "instruction")]


def _read_preference(row: Mapping[str, Any]) -> Row:
    prompt, chosen, rejected = list[Message](), row["chosen"], row["rejected"]
    asked = next((key for key in ("prompt", "messages", "conversations") if key in row), None)
    if asked or "instruction" in row:
        prompt = _turns(row[asked], asked) if asked else _alpaca_prompt(row)
    elif isinstance(chosen, str) and isinstance(rejected, str):
        same = len(os.path.commonprefix([chosen, rejected]))  # noqa: RUF071  (characters are what is meant)
        same = max(chosen.rfind(space, 0, same) for space in " \n\t") + 1  # whole words
        prompt, chosen, rejected = (
            _turns(chosen[:same].strip(), "prompt"),
            chosen[same:],
            rejected[same:],
        )
        if not prompt[0].text:
            raise BadRow(
                "no_prompt", "chosen and rejected do not begin alike, and there is no prompt"
            )
    pair = [
        _after(prompt, _turns(answer, key), key)
        for answer, key in ((chosen, "chosen"), (rejected, "rejected"))
    ]
    keys = [
        [(m.role, m.text, *(m.extra.get(key) for key in _ACTS)) for m in messages]
        for messages in pair
    ]
    if keys[0] == keys[1] and not any(
        part.kind in MEDIA for message in pair[0] for part in message.parts
    ):
        raise BadRow("equal_pair", "chosen and rejected are the same")
    shared = 0  # turns that both begin with; never the last one, which is the answer
    while shared < min(map(len, pair)) - 1 and keys[0][shared] == keys[1][shared]:
        shared += 1
    good, bad = (_chat_row(row, messages[:shared], messages[shared:]) for messages in pair)
    return replace(good, rejected=bad.messages)


def _after(prompt: list[Message], answer: list[Message], key: str) -> list[Message]:
    """The whole conversation. Some datasets have it in chosen and rejected already, and the prompt once more beside."""
    if not prompt or answer[0].role in ("assistant", "tool"):
        return prompt + answer
    asked = [message.text for message in prompt if message.role == "user"]
    if asked and asked[-1] not in [message.text for message in answer]:
        raise BadRow(
            "prompt_mismatch", f"{key} is a whole conversation, but does not contain the prompt"
        )
    return answer


def _read_text(row: Mapping[str, Any]) -> Row:
    key = "text" if "text" in row else "caption"
    text, columns = _text(row[key], key), _columns(row)
    if not text.strip():
        raise BadRow("empty", f"{key} is empty")
    media = tuple(part for kind in MEDIA for part in columns.get(kind, []))
    if not media:
        return Row(text=text)
    if any(f"<{part.kind}>" in text for part in media):
        raise BadRow(
            "media_count", f"{key} has placeholders: write interleaved documents as messages"
        )
    return Row(messages=(Message("user", media), Message("assistant", (Part("text", text),))))


_READERS: dict[str, Callable[[Mapping[str, Any]], Row]] = {
    "preference": _read_preference,
    "messages": lambda row: _chat_row(row, [], _conversation(row["messages"], "messages")),
    "sharegpt": lambda row: _chat_row(
        row, [], _conversation(row["conversations"], "conversations")
    ),
    "prompt_completion": lambda row: _chat_row(
        row, *(_turns(row[key], key) for key in ("prompt", "completion"))
    ),
    "alpaca": lambda row: _chat_row(
        row, [], [*_alpaca_prompt(row), _turn("assistant", row["output"], "output")]
    ),
    "text": _read_text,
}


def _chat_row(row: Mapping[str, Any], prompt: list[Message], answer: list[Message]) -> Row:
    """What all conversations share: system and tools beside the messages, media in their places, something to learn."""
    if not any(m.role == "assistant" and (m.text.strip() or _acts(m)) for m in answer):
        raise BadRow("no_answer", "no assistant turn has anything in it")
    messages = [replace(m, loss=m.loss or False) for m in prompt] + answer
    if _text(row.get("system", ""), "system"):
        if messages[0].role == "system":
            raise BadRow("two_systems", "there is a system column and a system message")
        messages.insert(0, _turn("system", row["system"], "system"))
    tools = _list(_json(row.get("tools", "[]"), "tools"), "tools")
    for index, tool in enumerate(tools):
        _check_json(_object(tool, f"tools[{index}]"), f"tools[{index}]")
    return Row(messages=tuple(_place(messages, _columns(row))), tools=tuple(tools))


def _acts(message: Message) -> bool:
    """Whether there is more to a turn than text: it may consist of a call, a thought or an image alone."""
    media = any(part.kind in MEDIA for part in message.parts)
    return media or any(message.extra.get(key) for key in _ACTS)


def _turns(value: Any, key: str) -> list[Message]:
    """A string, one message or a list of messages."""
    if isinstance(value, str):
        return [
            _turn(
                "assistant" if key in ("completion", "chosen", "rejected") else "user", value, key
            )
        ]
    return [_message(value, key)] if isinstance(value, Mapping) else _conversation(value, key)


def _turn(role: str, text: Any, where: str) -> Message:
    return Message(role, (Part("text", text),) if _text(text, where) else ())


def _conversation(value: Any, where: str) -> list[Message]:
    messages = [
        _message(message, f"{where}[{index}]") for index, message in enumerate(_list(value, where))
    ]
    if not messages:
        raise BadRow("empty", f"{where} has no messages")
    return messages


def _message(raw: Any, where: str) -> Message:
    rest = _object(raw, where)
    name, content, loss = (
        _pop(rest, *keys) for keys in (("role", "from"), ("content", "value"), ("loss", "weight"))
    )
    role = _ROLE_OF.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise BadRow(
            "unknown_role",
            f"{where} has role {name if isinstance(name, str) else _type(name)!r:.40}",
        )
    if loss is not None and not (isinstance(loss, bool | int | float) and loss in (0, 1)):
        raise BadRow("wrong_type", f"{where}.loss is {_type(loss)}, wanted true or false")
    if name.lower() in ("function_call", "tool_call"):
        calls = _json(content, f"{where}.value")
        calls = calls if isinstance(calls, list) else [calls]
        rest["tool_calls"], content = [{"type": "function", "function": call} for call in calls], ""
    _check_extra(rest, where)
    if content is not None and not isinstance(content, str | Mapping | list | tuple):
        raise BadRow(
            "wrong_type", f"{where}.content is {_type(content)}, wanted a string or a list of parts"
        )
    blocks = [content] if isinstance(content, str | Mapping) else content or []
    parts = [_block(block, f"{where}.content[{index}]") for index, block in enumerate(blocks)]
    kept = tuple(part for part in parts if part.kind != "text" or part.value)
    message = Message(role, kept, None if loss is None else bool(loss), rest)
    if content is None and not _acts(message):
        raise BadRow("missing_key", f"{where} has no content")
    return message


def _check_extra(extra: Mapping[str, Any], where: str) -> None:
    """What templates print or take apart must be of the right type; other keys are nobody's concern."""
    for key in ("name", "tool_call_id", "reasoning_content"):
        _text(extra.get(key, ""), f"{where}.{key}")
    for index, call in enumerate(_list(extra.get("tool_calls", []), f"{where}.tool_calls")):
        place = f"{where}.tool_calls[{index}]"
        call = _object(call, place)
        function = _object(call.get("function", call), place)
        _text(function.get("name"), f"{place}.name")
        _check_json(function, place)


def _block(block: Any, where: str) -> Part:
    if isinstance(block, str):
        return Part("text", _text(block, where))
    rest = _object(block, where)
    name = rest.pop("type", next((key for key in ("text", *_BLOCKS) if key in rest), None))
    if not isinstance(name, str) or name not in ("text", *_BLOCKS):
        raise BadRow(
            "unknown_block",
            f"{where} has type {name if isinstance(name, str) else _type(name)!r:.40}",
        )
    if name == "text":
        return Part("text", _text(rest.get("text"), f"{where}.text"))
    kind = _BLOCKS[name]
    if isinstance(rest.get("base64"), str):
        rest[kind] = f"data:{kind}/*;base64,{rest.pop('base64')}"
    value = _pop(rest, name, kind, "bytes", "path", "url")
    if isinstance(value, Mapping) and (
        "url" in value or "data" in value
    ):  # as in image_url and input_audio
        inner = _object(value, where)
        data = None if "url" in inner else _text(inner.pop("data", None), f"{where}.data")
        value = inner.pop("url") if data is None else f"data:{kind}/*;base64,{data}"
        rest |= inner
    return Part(kind, _FROM_COLUMN if value is None else _media(kind, value, where), rest)


def _media(kind: str, value: Any, where: str) -> Any:
    """`value`, if it can be media of that kind at all; whether it can be opened is for the handlers to find out."""
    if isinstance(value, str):
        fine = value != "" and "\0" not in _text(value, where)
    elif isinstance(value, bytes | bytearray | memoryview):
        fine = len(value) > 0
    elif isinstance(
        value, Mapping
    ):  # as `datasets` stores them: {"bytes", "path"}, {"array", "sampling_rate"}
        inner = next(
            (value[key] for key in ("bytes", "path", "array") if value.get(key) is not None), None
        )
        fine = inner is not None and not isinstance(inner, Mapping)
        fine = fine and ("array" in value or _media(kind, inner, where) is inner)
    elif isinstance(value, list | tuple):
        fine = (
            kind == "video"
            and [_media("image", frame, f"{where}[{i}]") for i, frame in enumerate(value)] != []
        )
    else:  # a PIL image, an array, a decoder
        fine = value is not None and not isinstance(value, int | float | complex)
    if not fine:
        raise BadRow("bad_media", f"{where} is {_type(value)} that cannot be {kind}")
    return value


def _columns(row: Mapping[str, Any]) -> dict[str, list[Part]]:
    """The media columns that the row has, by kind."""
    columns = {}
    for kind in MEDIA:
        keys = [key for key in (kind, f"{kind}s") if key in row]
        if len(keys) == 2:
            raise BadRow("bad_media", f"the row has both {kind} and {kind}s")
        for key in keys:
            items = (
                row[key] if isinstance(row[key], list | tuple) and key != "video" else [row[key]]
            )
            columns[kind] = [
                Part(kind, _media(kind, item, f"{key}[{i}]")) for i, item in enumerate(items)
            ]
    return columns


def _place(messages: Sequence[Message], columns: Mapping[str, list[Part]]) -> list[Message]:
    """The messages with the columns' media where typed blocks and placeholders are: see the rule at the top."""
    if not columns and not any(
        part.value is _FROM_COLUMN for message in messages for part in message.parts
    ):
        return list(messages)
    roles = {kind: _reading(messages, kind, columns.get(kind)) for kind in MEDIA}
    left = {kind: iter(columns.get(kind, [])) for kind in MEDIA}

    def placed(message: Message) -> Iterable[Part]:
        marks = [f"<{kind}>" for kind in MEDIA if message.role in roles[kind]]
        for part in message.parts:
            if part.kind != "text":
                yield (
                    replace(part, value=next(left[part.kind]).value)
                    if part.value is _FROM_COLUMN
                    else part
                )
                continue
            for piece in re.split(f"({'|'.join(marks)})", part.value) if marks else [part.value]:
                if piece in marks:
                    yield next(left[piece[1:-1]])
                elif piece:
                    yield Part("text", piece)

    return [replace(message, parts=tuple(placed(message))) for message in messages]


def _reading(messages: Sequence[Message], kind: str, items: list[Part] | None) -> set[str]:
    """Whose text holds placeholders of `kind`."""
    blocks, asked, answered = 0, 0, 0
    for message in messages:
        blocks += sum(part.kind == kind and part.value is _FROM_COLUMN for part in message.parts)
        marks = sum(part.value.count(f"<{kind}>") for part in message.parts if part.kind == "text")
        asked, answered = (
            (asked, answered + marks) if message.role == "assistant" else (asked + marks, answered)
        )
    if items is None and blocks:
        raise BadRow(
            "media_count", f"{blocks} {kind} block(s) name no {kind}, and there is no {kind} column"
        )
    if items is None or 0 < blocks == len(items):
        return set()
    if blocks + asked == len(items):
        return set(ROLES) - {"assistant"}
    if blocks + asked + answered == len(items):
        return set(ROLES)
    found = f"{blocks + asked} place(s) in the questions and {answered} in the answers"
    raise BadRow(
        "media_count",
        f"{len(items)} in the {kind} column, but {found} (<{kind}>, or a block without value)",
    )


def _pop(fields: dict[str, Any], *keys: str) -> Any:
    """The value of the first of `keys` that is there; all of them leave."""
    return next(
        (value for value in [fields.pop(key, None) for key in keys] if value is not None), None
    )


def _type(value: Any) -> str:
    names = {"NoneType": "null", "str": "a string", "dict": "an object", "list": "a list"}
    return names.get(type(value).__name__, type(value).__name__)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRow("wrong_type", f"{where} is {_type(value)}, wanted a string")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can write half a surrogate pair; tokenizers and files cannot
        raise BadRow("bad_text", f"{where} is not valid Unicode") from None
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise BadRow("wrong_type", f"{where} is {_type(value)}, wanted a list")
    return list(value)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadRow("wrong_type", f"{where} is {_type(value)}, wanted an object")
    return {
        key: inner for key, inner in value.items() if inner is not None and isinstance(key, str)
    }


def _json(value: Any, where: str) -> Any:
    """Some columns hold JSON as a string, since Arrow wants one type for all rows."""
    try:
        return json.loads(value or "[]") if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise BadRow("bad_json", f"{where} is a string that is not JSON") from None


def _check_json(value: Any, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        raise BadRow("wrong_type", f"{where} holds what cannot be written as JSON") from None
