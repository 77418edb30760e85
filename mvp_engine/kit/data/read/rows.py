"""Row formats: a raw row of any supported format, read into a `Row`.

Nothing is opened or decoded here. A row that cannot be trained on raises `BadRow`, whatever it holds.
Rules that the formats share:

- `null` means absent everywhere: Arrow fills the columns and fields that a row lacks with nulls.
- Strings for prompt and completion (chosen, rejected) are a user and an assistant turn. A prompt, and
  the turns that chosen and rejected share, carry no loss unless a message says so.
- `text` (or `caption`) together with media is a caption: the media are the user's turn, the text is the
  assistant's.
- Media columns fill placeholders as described in `messages.py`.
- Columns that nothing reads are listed in `Row.unused`. A column that would change what is learnt is
  never left unread: its row is bad.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

from mvp_engine.errors import UserError
from mvp_engine.files import is_inside
from mvp_engine.kit.data.read.media_source import file_of, media_kind, path_escape
from mvp_engine.kit.data.read.messages import (
    ACTION_KEYS,
    KNOWN_KEYS,
    WEIGHTS,
    check_no_places,
    count_places,
    fill_placeholders,
    has_actions,
    read_media_columns,
    read_messages,
    read_turns,
    row_weight,
    take_targets,
    text_message,
)
from mvp_engine.kit.data.read.row_types import (
    MEDIA,
    BadRow,
    Columns,
    Message,
    ParsedRow,
    Part,
    Row,
    RowFormat,
    TokenIds,
    check_json_serializable,
    check_list,
    check_object,
    check_text,
    parse_json,
    too_long,
)

if TYPE_CHECKING:
    import numpy as np

    from mvp_engine.kit.data.read.sources import Source

# Format -> the keys that identify it, in the order of detection: the more specific formats first.
FORMATS = {
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "query_response": ("query", "response"),
    "question_answer": ("question", "answer"),
    "prompt_response": ("prompt", "response"),
    "segments": ("segments",),
    "texts": ("texts",),
    "text": ("text",),
}
# Not detected: only the ids of a source that names their tokenizer (`tokenized_by`) are read.
TOKENS = "tokens"
_TOKEN_COLUMNS = ("input_ids", "labels", "loss_mask", "attention_mask")
_PROMPTS = ("prompt", "question", "query", "instruction")
_PROMPT_COLUMNS = (*_PROMPTS, "messages", "conversations", "texts", "chosen")
_ALIASES = {"chosen_messages": "chosen", "rejected_messages": "rejected"}
_OTHER_COLUMNS = (
    *WEIGHTS,
    "system",
    "tools",
    "history",
    "input",
    "caption",
    "label",
    "rejected_response",
)
_MEDIA_COLUMNS = (*MEDIA, *(f"{kind}s" for kind in MEDIA))
IGNORED_LABEL = -100
_OBJECT_TAGS = ("<ref-object>", "<bbox>")


def known_columns() -> set[str]:
    """Every column name that has a meaning."""
    names = {*_ALIASES, *_OTHER_COLUMNS, *_MEDIA_COLUMNS, *_TOKEN_COLUMNS}
    return names.union(*FORMATS.values())


def read_row(raw: Any, format: RowFormat | str | None = None) -> Row:
    """The parsed row, which `raw` may be already; `format` may be the name of one of FORMATS. Raises BadRow."""
    if isinstance(raw, Row):
        return raw
    if isinstance(raw, ParsedRow):
        return raw.parsed()
    if not isinstance(format, RowFormat):
        format = RowFormat(format)
    if format.name not in (None, TOKENS, *FORMATS):
        raise UserError(
            f"unknown row format {format.name!r}; choose one of {', '.join(sorted(FORMATS))}"
        )
    columns = format.read_columns(raw)
    fields = format.take_fields(columns) if format.fields else {}
    _rename_aliases(columns)
    name = format.name or _detect(columns)
    if name == "text" and format.name is None and format.drops_answers:
        # Text is one of its other columns.
        name = None if any(key in columns for key in _PROMPTS) else name
    if name is None and format.prompt_only and any(key in columns for key in _PROMPTS):
        name = "prompt"
    elif name is None or not _has_format(columns, name):
        raise BadRow("unknown_format", _unknown_format_detail(raw, columns, name))
    row = _Reader(format, columns).read(name)
    for key in WEIGHTS:
        # A column of texts or objects has another meaning: it stays unread.
        is_number = type(dict.get(columns, key)) in (int, float)
        if is_number and not (format.drops_answers or row.prompt_only):
            row = replace(row, weight=row_weight(columns[key], key))
    unused = columns.unused()
    media = [key for key in unused if key in _MEDIA_COLUMNS]
    if media:
        raise BadRow("bad_media", f"the format {name} takes no media, but the row has {media[0]!r}")
    if not format.drops_answers and not row.media() and not any(m.target for m in row.messages):
        refuse_unread_media(columns, unused)
    nulls = format.null_columns(raw)
    kinds = set[str]()
    if not row.media() and not nulls.isdisjoint(_MEDIA_COLUMNS):
        kinds.add("media")
    null_prompts = nulls.intersection(_PROMPTS)
    if null_prompts and name != "prompt" and _lacks_prompt(columns, name, null_prompts):
        kinds.add("prompt")
    if format.optional.isdisjoint(_PROMPT_COLUMNS):
        _refuse_empty_prompt(row)
    if format.downloaded:
        _refuse_paths_outside(row)
    size = row.num_characters()
    if size > format.max_text:
        raise too_long(f"text of {size:,} characters", format.max_text)
    for message in row.messages:
        unused += [f"{message.role}.{key}" for key in message.extra if key not in KNOWN_KEYS]
    unused = list(dict.fromkeys(unused))
    return replace(row, fields=fields, format=name, unused=tuple(unused), nulls=frozenset(kinds))


def _lacks_prompt(columns: Columns, name: str, nulls: set[str]) -> bool:
    """Whether the columns `nulls`, which have no value, would have been the prompt of the row."""
    if any(key in columns for key in _PROMPTS):
        return False
    # The prompt was found in the answers: guessed, unless they are lists of messages.
    if name == "preference":
        return isinstance(dict.get(columns, "chosen"), str)
    return _detect({**columns, **dict.fromkeys(nulls)}) != name


def _refuse_empty_prompt(row: Row) -> None:
    for message in (*row.messages, *row.rejected):
        if message.role == "user" and not _has_content(message):
            raise BadRow(
                "empty_prompt",
                "a prompt (a turn of the user) is empty. If that is meant, `columns: {prompt: prompt?}` of the source "
                "keeps such rows (or messages: messages?)",
            )


def _refuse_paths_outside(row: Row) -> None:
    rejected = replace(row, messages=row.rejected)
    targets = [message.target for message in row.messages if message.target]
    for part in (*row.media(), *rejected.media(), *targets):
        for value in part.value if isinstance(part.value, list | tuple) else [part.value]:
            path = file_of(value) or ""
            if path.startswith("file://") or not is_inside(path):
                raise path_escape(part.kind, path, "the downloaded dataset")


def detect_format(raw: Any) -> str | None:
    """The first of FORMATS that the row has all keys of."""
    columns = Columns(check_object(raw, "the row"))
    _rename_aliases(columns)
    return _detect(columns)


def _detect(columns: Mapping[str, Any]) -> str | None:
    return next((name for name in FORMATS if _has_format(columns, name)), None)


def _rename_aliases(columns: Columns) -> None:
    if "rejected_messages" in columns and "messages" in columns:
        columns["chosen"] = columns.pop("messages")
    for old, new in _ALIASES.items():
        if old in columns and new not in columns:
            columns[new] = columns.pop(old)


def _has_format(columns: Mapping[str, Any], format: str) -> bool:
    if format == TOKENS:
        return "input_ids" in columns
    if all(key in columns for key in FORMATS[format]):
        return True
    if format != "text" or "caption" not in columns:
        return False
    return any(key in columns for key in _MEDIA_COLUMNS)


def _unknown_format_detail(raw: Any, columns: Columns, name: str | None) -> str:
    if name is None and "input_ids" in columns:
        return (
            "the row has token ids, which may be of another tokenizer: give its text or messages; or, if the model's "
            "own tokenizer made them, name its folder with `tokenized_by: FOLDER` of the source"
        )
    if name == TOKENS:
        return describe_columns(raw, {TOKENS: ("input_ids",)})
    return describe_columns(raw, {name: FORMATS[name]} if name else FORMATS)


@dataclass(eq=False)
class _Reader:
    """Reads the columns of one row."""

    format: RowFormat
    columns: Columns

    def read(self, name: str) -> Row:
        readers: dict[str, Callable[[], Row]] = {
            "preference": self._preference,
            "prompt_completion": self._prompt_completion,
            "segments": self._segments,
            "texts": self._texts,
            "text": self._text,
            "prompt": self._prompt,
            TOKENS: self._tokens,
        }
        if self.format.drops_answers and FORMATS.get(name, ("",))[0] in _PROMPTS:
            return self._prompt(FORMATS[name][0])
        if name in readers:
            return readers[name]()
        if name in ("messages", "sharegpt"):
            key = "messages" if name == "messages" else "conversations"
            return self._conversation([], read_messages(self.columns[key], key))
        question, answer = FORMATS[name]
        return self._question_answer(question, answer)

    def _tokens(self) -> Row:
        """Token ids. Their loss is that of `labels` (the same ids, or -100) or of `loss_mask`; without them, all."""
        if self.format.drops_answers:
            raise BadRow(
                "no_prompt", "token ids have no prompt to answer: give prompt, or messages"
            )
        ids = _whole_numbers(self.columns["input_ids"], "input_ids")
        loss = [True] * len(ids)
        if "labels" in self.columns:
            labels = _whole_numbers(self.columns["labels"], "labels", len(ids))
            loss = [label != IGNORED_LABEL for label in labels]
            for place, (label, id) in enumerate(zip(labels, ids, strict=True)):
                if label not in (id, IGNORED_LABEL):
                    raise BadRow(
                        "bad_labels",
                        f"labels[{place}] is {label}, but input_ids[{place}] is {id}: labels are the ids of their own "
                        "position, or -100; they are shifted when a batch is built",
                    )
        if "loss_mask" in self.columns:
            mask = _whole_numbers(self.columns["loss_mask"], "loss_mask", len(ids))
            loss = [bool(one and has_loss) for one, has_loss in zip(mask, loss, strict=True)]
        if "attention_mask" in self.columns:  # 0 is padding
            mask = _whole_numbers(self.columns["attention_mask"], "attention_mask", len(ids))
            ids, loss = list(compress(ids, mask)), list(compress(loss, mask))
        if not ids:
            raise BadRow("empty", "input_ids is empty")
        return Row(tokens=TokenIds(ids, loss))

    def _texts(self) -> Row:
        """Turns as the_cauldron and FineVision have them: each entry is a question and its answer."""
        turns = []
        for index, raw in enumerate(check_list(self.columns["texts"], "texts")):
            where = f"texts[{index}]"
            entry = check_object(raw, where)
            for role in ("user", "assistant"):
                turns.append(text_message(role, entry.get(role), f"{where}.{role}"))
        if not turns:
            raise BadRow("empty", "texts has no entries")
        return self._conversation([], turns)

    def _prompt_completion(self) -> Row:
        prompt = read_turns(self.columns["prompt"], "prompt")
        return self._conversation(prompt, read_turns(self.columns["completion"], "completion"))

    def _prompt(self, key: str | None = None) -> Row:
        """A prompt without an answer."""
        key = key or next(key for key in _PROMPTS if key in self.columns)
        if key == "prompt":
            return self._conversation(read_turns(self.columns[key], key), [])
        return self._conversation([], self._question(key))

    def _question_answer(self, question: str, answer: str) -> Row:
        turns = self._question(question)
        turns.append(text_message("assistant", self.columns[answer], answer))
        return self._conversation([], turns)

    def _question(self, key: str) -> list[Message]:
        """The turns before the answer: `history` pairs, then the question and `input`."""
        turns = []
        for index, pair in enumerate(check_list(self.columns.get("history", []), "history")):
            where = f"history[{index}]"
            size = len(check_list(pair, where))
            if size != 2:
                raise BadRow(
                    "wrong_type", f"{where} has {size} entries, wanted a question and an answer"
                )
            turns.append(text_message("user", pair[0], f"{where}[0]"))
            turns.append(text_message("assistant", pair[1], f"{where}[1]"))
        names = [name for name in (key, "input") if name in self.columns]
        texts = [check_text(self.columns[name], name) for name in names]
        question = "\n".join(text for text in texts if text)
        return [*turns, text_message("user", question, key)]

    def _preference(self) -> Row:
        chosen = self.columns["chosen"]
        rejected = self.columns["rejected"]
        prompt: list[Message] = []
        prompt_keys = ("prompt", "messages", "conversations")
        prompt_key = next((key for key in prompt_keys if key in self.columns), None)
        question_key = next((key for key in _PROMPTS if key in self.columns), None)
        if prompt_key:
            prompt = read_turns(self.columns[prompt_key], prompt_key)
        elif question_key:
            prompt = self._question(question_key)
        elif isinstance(chosen, str) and isinstance(rejected, str):
            end = common_prompt_length(chosen, rejected)
            prompt = read_turns(chosen[:end].strip(), "prompt")
            if not prompt[0].text:
                raise BadRow(
                    "no_prompt",
                    "the row has no prompt, and chosen and rejected share no first words",
                )
            chosen = chosen[end:]
            rejected = rejected[end:]
        good = join_prompt_and_answer(prompt, read_turns(chosen, "chosen"), "chosen")
        bad = join_prompt_and_answer(prompt, read_turns(rejected, "rejected"), "rejected")
        shared = num_shared_turns(good, bad)
        answer = [] if self.format.drops_answers else good[shared:]
        row = self._conversation(good[:shared], answer)
        if self.format.drops_answers:
            return row
        rejected_row = self._conversation(bad[:shared], bad[shared:])
        return replace(row, rejected=rejected_row.messages)

    def _text(self) -> Row:
        key = "text" if "text" in self.columns else "caption"
        text = check_text(self.columns[key], key)
        columns = read_media_columns(self.columns)
        if not text.strip():
            raise BadRow("empty", f"{key} is empty")
        media: list[Part] = []
        for kind in MEDIA:
            media += columns.get(kind, [])
        if not media:
            self._check_text_tags(text)
            return Row(text=text, prompt_only=self.format.drops_answers)
        if self.format.media_tags and any(f"<{part.kind}>" in text for part in media):
            raise BadRow(
                "media_count", f"{key} has placeholders: write interleaved documents as messages"
            )
        question = Message("user", tuple(media))
        if self.format.drops_answers:
            return Row(messages=(question,), prompt_only=True)
        return Row(messages=(question, Message("assistant", (Part("text", text),))))

    def _check_text_tags(self, text: str) -> None:
        """Raise if a tag may stand for media in a column that nothing reads."""
        unused = self.columns.unused()
        document = Message("user", (Part("text", text),))
        for kind in MEDIA if unused else ():
            check_no_places(count_places([document], kind, self.format.media_tags), kind, unused)

    def _segments(self) -> Row:
        """Texts with a flag each, joined without a chat template and without BOS and EOS."""
        if self.format.drops_answers:
            raise BadRow("no_prompt", "the format segments has no prompt: give prompt, or messages")
        text = ""
        spans = []
        for index, raw in enumerate(check_list(self.columns["segments"], "segments")):
            where = f"segments[{index}]"
            segment = check_object(raw, where)
            has_loss = segment.get("label")
            if not isinstance(has_loss, bool):
                raise BadRow("wrong_type", f"{where}.label is not true or false")
            start = len(text)
            text += check_text(segment.get("text"), f"{where}.text")
            if has_loss and len(text) > start:
                spans.append((start, len(text)))
        if not spans:
            raise BadRow("no_answer", "no segment with label: true has any text")
        return Row(text=text, text_loss=tuple(spans))

    def _conversation(self, prompt: Sequence[Message], answer: Sequence[Message]) -> Row:
        """A row with the system and tools columns, and media in their places."""
        if self.format.drops_answers:
            prompt = _without_last_answer([*prompt, *answer])
            answer = []
        prompt_only = self._check_answer(answer)
        if prompt_only:
            answer = [replace(message, loss=False) for message in answer]
        keeps_loss = not self.format.drops_answers
        messages = [
            replace(message, loss=keeps_loss and (message.loss or False)) for message in prompt
        ]
        messages += answer
        if check_text(self.columns.get("system", ""), "system"):
            if messages[0].role == "system":
                raise BadRow("two_systems", "the row has a system column and a system message")
            messages.insert(0, text_message("system", self.columns["system"], "system"))
        tools = check_list(parse_json(self.columns.get("tools", "[]"), "tools"), "tools")
        for index, tool in enumerate(tools):
            where = f"tools[{index}]"
            check_json_serializable(check_object(tool, where), where)
        if "label" in self.columns and not self.format.drops_answers:
            self._check_label()
        if "objects" in self.columns:
            self._refuse_object_tags(messages)
        messages = fill_placeholders(messages, self.columns, self.format.media_tags)
        messages = take_targets(messages, self.format.targets)
        row = Row(messages=tuple(messages), tools=tuple(tools), prompt_only=prompt_only)
        if "rejected_response" not in self.columns or self.format.drops_answers:
            return row
        return with_rejected_response(row, self.columns["rejected_response"])

    def _check_answer(self, answer: Sequence[Message]) -> bool:
        """Whether the row is a prompt alone, which ends with no assistant turn.

        In other rows every assistant turn with loss must have content.
        """
        if self.format.prompt_only and (not answer or answer[-1].role != "assistant"):
            return True
        turns = [message for message in answer if message.role == "assistant"]
        if not any(map(_has_content, turns)):
            raise BadRow(
                "no_answer",
                "no assistant turn has any content (data.prompt_only=true allows rows without one)",
            )
        empty = [turn for turn in turns if turn.loss is not False and not _has_content(turn)]
        if empty:
            raise BadRow(
                "empty_answer",
                "an assistant turn has no content, and would be learnt as an empty answer: "
                "remove it, or give it loss: false",
            )
        return False

    def _check_label(self) -> None:
        """Refuse the bad answers of data for KTO: a loss on all answers would learn them as good ones."""
        label = dict.get(self.columns, "label")  # without marking it as read
        if isinstance(label, str):  # as csv files have it
            label = {"true": 1, "false": 0, "1": 1, "0": 0}.get(label.strip().lower())
        if not isinstance(label, bool | int | float) or label not in (0, 1):
            return
        self.columns.get("label")
        if not label:
            raise BadRow(
                "label_false",
                "the column 'label' says that the answer is bad, and it would be learnt as a good "
                "one. Remove such rows; or train with KTO (preference.loss=kto, data.fields: "
                "{label: int}); or set columns: {label: null} if it means something else",
            )

    def _refuse_object_tags(self, messages: Sequence[Message]) -> None:
        for message in messages:
            tag = next((tag for tag in _OBJECT_TAGS if tag in message.text), None)
            if tag is not None:
                raise BadRow(
                    "unsupported_column",
                    f"a text has {tag}, to be filled from the column 'objects', which is not "
                    "supported: write names and boxes into the text, in the format of the model",
                )


def _whole_numbers(value: Any, where: str, length: int | None = None) -> list[int]:
    found = check_list(value.tolist() if hasattr(value, "tolist") else value, where)
    if not all(isinstance(one, int) for one in found):
        raise BadRow("wrong_type", f"{where} is not a list of whole numbers")
    if length is not None and len(found) != length:
        raise BadRow("wrong_type", f"{where} has {len(found)} entries, but input_ids has {length}")
    return found


def _has_content(message: Message) -> bool:
    return bool(message.text.strip() or has_actions(message))


def _without_last_answer(messages: list[Message]) -> list[Message]:
    """The conversation up to its last answer: what a policy answers."""
    end = len(messages)
    while end and messages[end - 1].role == "assistant":
        end -= 1
    if not any(message.role != "system" for message in messages[:end]):
        raise BadRow("no_prompt", "the row has no message before its answer")
    return messages[:end]


# Preference pairs: the prompt that the chosen and the rejected conversation share.


def common_prompt_length(chosen: str, rejected: str) -> int:
    """The length of the prompt that two plain texts begin with, up to their last common whole word."""
    same = len(os.path.commonprefix([chosen, rejected]))  # noqa: RUF071  (by character, as intended)
    return max(chosen.rfind(space, 0, same) for space in " \n\t") + 1


def join_prompt_and_answer(
    prompt: list[Message],
    answer: list[Message],
    key: str,
) -> list[Message]:
    """The whole conversation.

    Some datasets store it in chosen and rejected already, and repeat the prompt in its own column.
    """
    if not prompt or answer[0].role in ("assistant", "tool"):
        return prompt + answer
    questions = [message.text for message in prompt if message.role == "user"]
    if questions and questions[-1] not in [message.text for message in answer]:
        raise BadRow(
            "prompt_mismatch", f"{key} is a whole conversation, but does not contain the prompt"
        )
    return answer


def num_shared_turns(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """How many first turns both conversations share, without the last one: that is the answer."""
    chosen_keys = [_comparison_key(message) for message in chosen]
    rejected_keys = [_comparison_key(message) for message in rejected]
    if _stripped(chosen_keys) == _stripped(rejected_keys) and _same_media(chosen, rejected):
        raise BadRow("equal_pair", "chosen and rejected are the same, but for blanks around them")
    longest = min(len(chosen), len(rejected)) - 1
    shared = 0
    while shared < longest and chosen_keys[shared] == rejected_keys[shared]:
        shared += 1
    return shared


def _comparison_key(message: Message) -> tuple[Any, ...]:
    actions = [message.extra.get(key) for key in ACTION_KEYS]
    return (message.role, message.text, *actions)


def _stripped(keys: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(role, text.strip(), *actions) for role, text, *actions in keys]


def _same_media(chosen: Sequence[Message], rejected: Sequence[Message]) -> bool:
    """Whether two conversations name the same media; of other values than names that is not known."""
    values = []
    for messages in (chosen, rejected):
        parts = [part for message in messages for part in message.parts]
        values.append([part.value for part in parts if part.kind in MEDIA])
    if len(values[0]) != len(values[1]):
        return False
    pairs = zip(*values, strict=True)
    return all(one is other or (isinstance(one, str) and one == other) for one, other in pairs)


def with_rejected_response(row: Row, response: Any) -> Row:
    """A preference pair: the row's last answer is the chosen one, `response` the rejected one."""
    if not row.messages or row.messages[-1].role != "assistant":
        raise BadRow("no_answer", "the row has rejected_response, but does not end with an answer")
    chosen = row.messages[-1]
    rejected = Message("assistant", (Part("text", check_text(response, "rejected_response")),))
    if not rejected.text.strip():
        raise BadRow("no_answer", "rejected_response is empty")
    if _stripped([_comparison_key(chosen)]) == _stripped([_comparison_key(rejected)]):
        raise BadRow(
            "equal_pair",
            "the last answer and rejected_response are the same, but for blanks around them",
        )
    prompt = [replace(message, loss=message.loss or False) for message in row.messages[:-1]]
    return replace(row, messages=(*prompt, chosen), rejected=(*prompt, rejected))


# What is probably meant by a row that has the columns of no format, or one of media that nothing reads.

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
        "data.prompt_only=true is for rows without an answer"
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
