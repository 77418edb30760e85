"""Messages in the spellings that datasets use, read into `Message` and `Part`.

Media are checked for their type only. Whether a file exists and decodes is found out later (`probe.py`,
`decoders.py`).

Media columns of a row (`images`, `video`, ...), and their assignment to placeholders in messages.

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
from mvp_engine.kit.data.read.row_types import (
    MEDIA,
    ROLES,
    BadRow,
    Codes,
    Columns,
    Message,
    Part,
    check_json_serializable,
    check_list,
    check_object,
    check_text,
    parse_json,
    pop_first,
    type_name,
)

FROM_COLUMN = object()  # the value of a typed block without its own: it takes one of the column
# Message keys that make an assistant turn non-empty without any text.
ACTION_KEYS = ("tool_calls", "reasoning_content")
_TOOL_CALL_ROLES = ("function_call", "tool_call")
# Message keys that a reader or a chat template knows.
KNOWN_KEYS = {*ACTION_KEYS, "name", "tool_call_id", "thinking", "reasoning"}


def _role_spellings() -> dict[str, str]:
    spellings = {}
    for role, names in ROLES.items():
        spellings.update(dict.fromkeys(names, role))
    return spellings


def _media_block_types() -> dict[str, str]:
    """Block type -> media kind: `image`, `image_url`, ..., `input_audio`."""
    types = {}
    for kind in MEDIA:
        types[kind] = kind
        types[f"{kind}_url"] = kind
    types["input_audio"] = "audio"
    return types


WEIGHTS = ("weight", "loss_weight")  # columns of a row
MAX_WEIGHT = 100
_ROLE_OF = _role_spellings()
_MEDIA_BLOCKS = _media_block_types()
_BLOCK_TYPES = ("text", *_MEDIA_BLOCKS)


def has_actions(message: Message) -> bool:
    """Whether a turn has content other than text: a tool call, reasoning or media."""
    return message.has_media or any(message.extra.get(key) for key in ACTION_KEYS)


def text_message(role: str, text: Any, where: str) -> Message:
    """A message of one text; without parts if the text is empty."""
    parts = (Part("text", text),) if check_text(text, where) else ()
    return Message(role, parts)


def read_messages(value: Any, where: str) -> list[Message]:
    """A list of messages, which may be a JSON string, as csv files have it; an empty one is a bad row."""
    raw_messages = check_list(parse_json(value, where), where)
    messages = [read_message(raw, f"{where}[{i}]") for i, raw in enumerate(raw_messages)]
    if not messages:
        raise BadRow("empty", f"{where} has no messages")
    return messages


def read_turns(value: Any, key: str) -> list[Message]:
    """A string, one message or a list of messages.

    A string is the assistant's under `completion`, `chosen` and `rejected`, else the user's.
    """
    if isinstance(value, str):
        is_answer = key in ("completion", "chosen", "rejected")
        return [text_message("assistant" if is_answer else "user", value, key)]
    if isinstance(value, Mapping):
        return [read_message(value, key)]
    return read_messages(value, key)


def read_message(raw: Any, where: str) -> Message:
    """One message in OpenAI's spelling (role, content) or ShareGPT's (from, value)."""
    fields = check_object(raw, where)
    role_name = pop_first(fields, "role", "from")
    content = pop_first(fields, "content", "value")
    loss = pop_first(fields, "loss", "weight", "loss_weight", "loss_scale", "train")
    role = _ROLE_OF.get(role_name.lower()) if isinstance(role_name, str) else None
    if role is None:
        shown = f"{role_name!r:.40}" if isinstance(role_name, str) else type_name(role_name)
        raise BadRow("unknown_role", f"{where} has role {shown}; roles are {', '.join(ROLES)}")
    _refuse_media_keys(fields, where)
    if loss is not None and not isinstance(loss, bool):
        weight = check_weight(loss, f"{where}.loss")
        loss = bool(weight) if weight in (0, 1) else weight
    if role_name.lower() in _TOOL_CALL_ROLES:
        fields["tool_calls"] = _sharegpt_tool_calls(content, f"{where}.value")
        content = ""
    if isinstance(content, list | tuple):
        content = _take_actions(content, fields, f"{where}.content")
    for key in ("name", "tool_call_id", "reasoning_content"):  # texts that chat templates print
        check_text(fields.get(key, ""), f"{where}.{key}")
    if "tool_calls" in fields:
        tool_calls = _read_tool_calls(fields.pop("tool_calls"), f"{where}.tool_calls")
        if tool_calls:  # some templates take an empty list for a turn with tool calls
            fields["tool_calls"] = tool_calls
    if content is not None and not isinstance(content, str | Mapping | list | tuple):
        found = type_name(content)
        raise BadRow(
            "wrong_type", f"{where}.content is {found}, wanted a string or a list of parts"
        )
    blocks = [content] if isinstance(content, str | Mapping) else content or []
    parts = [_read_block(block, f"{where}.content[{i}]") for i, block in enumerate(blocks)]
    kept = tuple(part for part in parts if part.kind != "text" or part.value)
    message = Message(role, kept, loss, fields)
    if content is None and not has_actions(message):
        others = [key for key in fields if key not in KNOWN_KEYS]
        found = f", only {', '.join(others)[:80]}" if others else ""
        raise BadRow("missing_key", f"{where} has no content{found}")
    return message


def check_weight(value: Any, where: str) -> float:
    """A weight in the loss. Larger numbers than MAX_WEIGHT are taken for a column of another meaning."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow(
            "wrong_type",
            f"{where} is {type_name(value)}, wanted true, false or a weight in the loss",
        )
    if not 0 <= value <= MAX_WEIGHT:
        raise BadRow(
            "bad_weight",
            f"{where} is {value}, wanted a weight in the loss, from 0 to {MAX_WEIGHT}. A column of another meaning "
            "is dropped by `columns: {weight: null}` of the source",
        )
    return float(value)


def row_weight(value: Any, key: str) -> float:
    """The weight of a row in the loss."""
    weight = check_weight(value, key)
    if not weight:
        raise BadRow("nothing_to_learn", f"the {key} of the row is 0")
    return weight


def _refuse_media_keys(fields: Mapping[str, Any], where: str) -> None:
    for kind in MEDIA:
        key = next((key for key in (kind, f"{kind}s") if key in fields), None)
        if key is not None:
            raise BadRow(
                "bad_media",
                f"{where}.{key}: media belong into the content of the message "
                f'({{"type": "{kind}", "{kind}": ...}}) or into a column {kind}s of the row',
            )


def _take_actions(blocks: Sequence[Any], fields: dict[str, Any], where: str) -> list[Any]:
    """The blocks that are content; reasoning and tool call blocks become fields of the message."""
    content = []
    for index, block in enumerate(blocks):
        kind = str(block.get("type")) if isinstance(block, Mapping) else None
        place = f"{where}[{index}]"
        if kind in ("reasoning", "thinking"):
            text = check_text(pop_first(dict(block), kind, "value", "text"), place)
            fields["reasoning_content"] = f"{fields.get('reasoning_content', '')}{text}"
        elif kind == "tool_call":
            calls = _sharegpt_tool_calls(pop_first(dict(block), kind, "value"), place)
            fields["tool_calls"] = check_list(fields.get("tool_calls", []), place) + calls
        else:
            content.append(block)
    return content


def _sharegpt_tool_calls(content: Any, where: str) -> list[dict[str, Any]]:
    """ShareGPT writes calls as JSON in the text of a turn with a role of its own."""
    calls = parse_json(content, where)
    if not isinstance(calls, list):
        calls = [calls]
    return [{"type": "function", "function": call} for call in calls]


def _read_tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: OpenAI writes these as a JSON string."""
    calls = []
    for index, raw in enumerate(check_list(value, where)):
        place = f"{where}[{index}]"
        call = check_object(raw, place)
        given = call.get("function", call)
        function = check_object(given, place)
        check_text(function.get("name"), f"{place}.name")
        if "arguments" in given:
            place = f"{place}.arguments"
            arguments = parse_json(function.get("arguments") or "{}", place)
            if not isinstance(arguments, Mapping):
                found = type_name(arguments)
                raise BadRow("wrong_type", f"{place} holds {found}, wanted a JSON object")
            function["arguments"] = arguments
        check_json_serializable(function, place)
        calls.append({**call, "function": function} if "function" in call else function)
    return calls


def _read_block(block: Any, where: str) -> Part:
    """A content block: a string, a typed text, or typed media."""
    if isinstance(block, str):
        return Part("text", check_text(block, where))
    fields = check_object(block, where)
    # A block without `type` is of the first type that it has a key for.
    inferred = next((key for key in _BLOCK_TYPES if key in fields), None)
    name = fields.pop("type", inferred)
    if not isinstance(name, str) or name not in _BLOCK_TYPES:
        shown = name if isinstance(name, str) else type_name(name)
        known = ", ".join(_BLOCK_TYPES)
        raise BadRow("unknown_block", f"{where} has type {shown!r:.40}; known types: {known}")
    if name == "text":
        return Part("text", check_text(pop_first(fields, "text", "value"), f"{where}.text"))
    return _read_media_block(name, fields, where)


def _read_media_block(name: str, fields: dict[str, Any], where: str) -> Part:
    """Media with their options, as `transformers`, OpenAI or `datasets` write them."""
    kind = _MEDIA_BLOCKS[name]
    if isinstance(fields.get("base64"), str):
        fields[kind] = _data_uri(kind, fields.pop("base64"))
    value = pop_first(fields, name, kind, "source", "bytes", "path", "url", "value")
    if isinstance(value, Mapping) and ("url" in value or "data" in value):
        # OpenAI's image_url and input_audio nest the value, and options with it; so does Anthropic's
        # source, with its encoding and media type.
        inner = check_object(value, where)
        pop_first(inner, "type", "media_type")
        if "url" in inner:
            value = inner.pop("url")
        else:
            data = check_text(inner.pop("data", None), f"{where}.data")
            value = _data_uri(kind, data)
        fields |= inner
    if kind == "audio" and fields.get("codes") is not None:
        return Part(kind, Codes(fields.pop("codes")), fields)
    if value is None:
        return Part(kind, FROM_COLUMN, fields)
    return Part(kind, check_media_value(kind, value, where), fields)


def _data_uri(kind: str, base64_text: str) -> str:
    return f"data:{kind}/*;base64,{base64_text}"


def check_media_value(kind: str, value: Any, where: str) -> Any:
    """`value`, if its type can hold media of that kind at all."""
    if not _may_be_media(kind, value, where):
        raise BadRow("bad_media", f"{where} is {type_name(value)} that cannot be {kind}")
    return value


def _may_be_media(kind: str, value: Any, where: str) -> bool:
    if isinstance(value, str):
        return value != "" and "\0" not in check_text(value, where)
    if isinstance(value, bytes | bytearray | memoryview):
        return len(value) > 0
    if isinstance(value, Mapping):
        return _may_be_media_mapping(kind, value, where)
    if isinstance(value, list | tuple):
        if kind != "video":
            return False
        for index, frame in enumerate(value):
            check_media_value("image", frame, f"{where}[{index}]")
        return len(value) > 0
    # A PIL image, an array or a decoder object.
    return value is not None and not isinstance(value, int | float | complex)


def _may_be_media_mapping(kind: str, value: Mapping[str, Any], where: str) -> bool:
    """As `datasets` stores media: {"bytes", "path"}, or {"array", "sampling_rate"}."""
    keys = ("bytes", "path", "array")
    inner = next((value[key] for key in keys if value.get(key) is not None), None)
    if inner is None or isinstance(inner, Mapping):
        return False
    if "array" not in value:
        check_media_value(kind, inner, where)
    return True


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
            if sum(places):
                check_no_places(places, kind, row.unused())
            roles[kind] = set()
        elif items and not sum(places) and not _has_media(messages, kind):
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
    return _with_first_items(filled, first_items) if first_items else filled


def _has_media(messages: Sequence[Message], kind: str) -> bool:
    return any(part.kind == kind for message in messages for part in message.parts)


def _with_first_items(messages: list[Message], items: Sequence[Part]) -> list[Message]:
    """The messages with `items` at the beginning of the first user turn."""
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
            pieces = re.split(f"({'|'.join(tags)})", part.value) if tags else [part.value]
            for piece in pieces:
                if piece in tags:
                    yield next(remaining[piece[1:-1]])
                elif piece:
                    yield Part("text", piece)
        elif part.value is FROM_COLUMN:
            yield replace(part, value=next(remaining[part.kind]).value)
        else:
            yield part


class Places(NamedTuple):
    """Where a conversation has room for media of one kind."""

    blocks: int  # typed blocks without a value
    in_questions: int  # tags
    in_answers: int


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
    if sum(places) == items:
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
