"""Rows to text by the model's own chat template, and from text to token ids with a loss mask.

A conversation is rendered once, whole. Where its messages lie in the text is not searched for: the template is compiled
a second time with marks at both ends of the body of its loops over messages, a change to the syntax tree, so that what
it trims, splits, drops or dumps as JSON stays as it is. Without the marks that text must be the tokenizer's own, to the
character; else the row is bad. What carries loss:

- Assistant turns, or what a message's `loss` says. A turn starts behind the template's generation prompt (asked for,
  not assumed) or with its `{% generation %}` block, and ends with its stop token; white space behind that has none.
  All that the template keeps in between has it: tool calls, thinking blocks, also empty ones that it writes itself.
- Of other roles with `loss: true` the texts, without the white space at their ends, and the stop token behind the last.
- Never media placeholders, nor the special tokens that enclose them.
- Of a `text` row everything. One BOS goes in front where the tokenizer itself adds it, one EOS behind if none is there.
  A conversation's BOS is the template's, or, if it writes none, what calling a processor (not a tokenizer) would add.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jinja2
import numpy as np

from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.processor_calls import encoded
from mvp_engine.kit.data.encode.template_marks import CLOSE, OPEN, PROBE, Span, compiled, take_apart
from mvp_engine.kit.data.read.rows import MEDIA, BadRow, Message, Part, Row

Chat = list[dict[str, Any]]
FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True)
class Placeholder:
    index: int  # in row.media()
    kind: str
    span: Span  # what is to give way to the medium
    outer: Span  # with the special tokens that enclose it, from which it must not be cut off


@dataclass(frozen=True)
class Rendered:
    text: str
    loss: tuple[Span, ...]  # by character, in order
    media: tuple[Placeholder, ...] = ()  # by character, in order of the text
    bos: bool = False  # put BOS in front, if the tokenizer does so by itself and it is not there
    eos: bool = False  # put EOS behind, if it is not there
    stops: bool = True  # whether each assistant turn with loss ends in a special token; else it learns no stopping


class Tokens(NamedTuple):
    ids: list[int]
    loss: list[bool]
    media: list[Placeholder]  # by token, in order


class _Shown(NamedTuple):
    chat: Chat
    tools: list[Any] | None
    text: str  # as the template with marks renders it, without the marks
    spans: dict[
        str, list[Span]
    ]  # "}3": the turn of message 3, ")3": its texts with loss, "]": generation blocks
    heads: dict[
        str, list[str]
    ]  # what may come before an answer to a role, so that each is asked for once


class Template:
    """The chat template of a tokenizer or processor. `placeholders` names the tokens for media where those do not, by
    kind; `options` go to the template (`enable_thinking=False`, ...)."""

    def __init__(
        self, processor: Any, placeholders: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.speaker = processor if getattr(processor, "chat_template", None) else self.tokenizer
        self.is_processor = processor is not self.tokenizer
        self.options = {**options, "tokenize": False}
        if not getattr(self.tokenizer, "is_fast", False):
            raise UserError(
                f"masks need a fast tokenizer, which {type(self.tokenizer).__name__} is not"
            )
        added = {
            id: token for id, token in self.tokenizer.added_tokens_decoder.items() if token.special
        }
        self._special_ids = sorted({*added, *self.tokenizer.all_special_ids})
        self.special = tuple({*map(str, added.values()), *self.tokenizer.all_special_tokens})
        self.special_pattern = _any_of(self.special)
        bos = self.tokenizer.bos_token_id
        self.adds_bos = bos is not None and self.tokenizer("").input_ids[:1] == [bos]
        self.typed, self.stop = False, ""
        self.placeholders: dict[
            str, tuple[str, ...]
        ] = {}  # kind -> the token, with special ones around it
        pairs = [
            (kind, getattr(one, f"{kind}_token", None))
            for kind in MEDIA
            for one in (processor, self.tokenizer)
        ]
        names = {kind: {str(token) for k, token in pairs if k == kind and token} for kind in MEDIA}
        if self.speaker.chat_template:
            self._try_out()
            for kind, given in (
                names | {kind: {name} for kind, name in (placeholders or {}).items()}
            ).items():
                self._find_placeholder(kind, given)
        tokens = set().union(*names.values()) & self.tokenizer.get_vocab().keys()
        self.reserved = _any_of(tokens | {token for _, token, _ in self.placeholders.values()})

    def render(self, row: Row) -> Rendered:
        """The row's text, where it carries loss, where its media go. For `rejected`, give a row with it as messages."""
        texts = [
            part.value for message in row.messages for part in message.parts if part.kind == "text"
        ]
        if found := self.reserved.search("\0".join(texts) if row.text is None else row.text):
            raise BadRow(
                "placeholder_in_text",
                f"a text holds {found[0]!r}, which stands for media in this model",
            )
        if row.text is not None:
            if not row.text.strip():
                raise BadRow("nothing_to_learn", "the text is empty")
            return Rendered(row.text, ((0, len(row.text)),), bos=True, eos=True)
        learns = [m.role == "assistant" if m.loss is None else m.loss for m in row.messages]
        if not any(learns):
            said = any(message.role == "assistant" for message in row.messages)
            raise BadRow(
                "nothing_to_learn",
                "all assistant turns have loss: false" if said else "no assistant turn",
            )
        shown = self._show_row(row, learns)
        media = self._place_media(row, shown.text)
        flags, spans, stops = bytearray(len(shown.text)), list[Span](), True
        for i, message in enumerate(row.messages):
            if learns[i] and message.role == "assistant":
                spans += self._turn(i, shown)
                stops &= shown.text[: spans[-1][1]].endswith(self.special)
            elif learns[i]:
                spans += self._texts_with_loss(i, message, shown)
        for start, end in spans:
            flags[start:end] = b"\1" * (end - start)
        for start, end in (place.outer for place in media):
            flags[start:end] = bytes(end - start)
        loss = tuple(found.span() for found in re.finditer(b"\1+", flags))
        return Rendered(shown.text, loss, media, bos=self.is_processor, stops=stops)

    def tokenize(self, rendered: Rendered) -> Tokens:
        """A token that overlaps a span with loss has it; a special token (it may swallow blanks) if it starts there."""
        found = encoded(self.tokenizer, rendered.text)
        ids = found.ids
        begin, end = np.array(found.offsets, np.int64).reshape(-1, 2).T.copy()
        # Some tokenizers trim blanks off offsets, and a token may be nothing else.
        begin[1:] = np.where(begin[1:] == end[1:], np.minimum(begin[1:], end[:-1]), begin[1:])
        flags = np.zeros(
            len(rendered.text) + 2, np.int64
        )  # how many characters with loss come before
        for start, stop in rendered.loss:
            flags[start + 1 : stop + 1] = 1
        before = flags.cumsum()
        until = np.where(np.isin(ids, self._special_ids), begin + 1, end)
        loss, spans = (before[until] > before[begin]).tolist(), np.stack([begin, end], axis=1)
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if rendered.bos and self.adds_bos and ids[:1] != [bos]:
            ids, loss, spans = [bos, *ids], [False, *loss], np.concatenate([[[0, 0]], spans])
        if rendered.eos and eos is not None and ids[-1:] != [eos]:
            ids, loss = [*ids, eos], [*loss, True]
        media = [_by_token(place, spans, rendered.text) for place in rendered.media]
        for first, last in (
            place.outer for place in media
        ):  # also tokens that merged with what is beside them
            loss[first:last] = [False] * (last - first)
        ids, loss, _ = cut(ids, loss, [], len(ids))  # for its check
        return Tokens(ids, loss, media)

    def _source(self, tools: list[Any] | None) -> str:
        source = self.speaker.chat_template
        if isinstance(source, Mapping):
            source = (tools and source.get("tool_use")) or source.get("default")
        if source is None:
            raise UserError(
                "the tokenizer has no chat template to render conversations with; set its chat_template"
            )
        return source

    def _show(
        self,
        chat: Chat,
        tools: list[Any] | None = None,
        ask: bool = False,
        plain: Chat | None = None,
    ) -> _Shown:
        """Render with marks; check it with `plain`, which has none; `ask` for an answer with the generation prompt."""
        source = self._source(tools)
        number = {id(message): i for i, message in enumerate(chat)}

        def mark(value: Any, kind: str) -> str:
            return f"{OPEN}{kind}{number[id(value)]}{CLOSE}" if id(value) in number else ""

        names = {
            **self.tokenizer.special_tokens_map,
            **self.options,
            "documents": None,
            "mvp_mark": mark,
        }
        try:
            text = compiled(source).render(
                messages=chat, tools=tools, add_generation_prompt=ask, **names
            )
            own = plain and self.speaker.apply_chat_template(
                plain, tools=tools, chat_template=source, **self.options
            )
        except FAILURES as error:
            raise BadRow("template", f"the chat template fails: {error}") from error
        text, spans = take_apart(text)
        if own not in (None, text):
            raise BadRow(
                "mask", "the chat template renders the row otherwise once its messages are marked"
            )
        return _Shown(chat, tools, text, spans, {})

    def _show_row(self, row: Row, learns: Sequence[bool]) -> _Shown:
        """The row's conversation: certain to be the tokenizer's own text, with nothing of the row left out."""
        tools = list(row.tools) or None
        made = [
            (i, call)
            for i, message in enumerate(row.messages)
            for call in message.extra.get("tool_calls") or ()
        ]
        for word, used in ("tools", tools), ("tool_calls", made):
            if word not in self._source(tools) and used:
                raise BadRow("template", f"the chat template leaves out {word}")
        if missing := {part.kind for part in row.media()} - self.placeholders.keys():
            raise BadRow(
                "unsupported_media",
                f"the chat template has no placeholder for {' and '.join(missing)}",
            )
        calls = [(i, call.get("function", call).get("name") or "") for i, call in made]
        for empty in (
            "",
            None,
        ):  # as the content beside tool calls: most templates take "", some only none
            chat = [
                self._message(m, i, learns[i] and m.role != "assistant", empty)
                for i, m in enumerate(row.messages)
            ]
            plain = [self._message(m, i, False, empty) for i, m in enumerate(row.messages)]
            shown = self._show(chat, tools, plain=plain)
            lost = [
                name
                for i, name in calls
                if not any(name in shown.text[a:b] for a, b in shown.spans[f"}}{i}"])
            ]
            if not lost:
                break
        else:
            raise BadRow("template", f"the chat template leaves out the tool call {lost[0]!r}")
        for i, message in enumerate(row.messages):
            texts = [part.value.strip() for part in message.parts if part.kind == "text"]
            if message.role in ("system", "user") and not all(text in shown.text for text in texts):
                raise BadRow(
                    "template",
                    f"the chat template leaves out or rewrites message {i} ({message.role})",
                )
        return shown

    def _message(
        self, message: Message, i: int = 0, wrap: bool = False, empty: str | None = ""
    ) -> dict[str, Any]:
        """A message as templates know it, without the values of media; `wrap` its texts in marks."""
        content: Any = []
        for part in message.parts:
            text = part.value if part.kind == "text" else ""
            if wrap and (core := text.strip()):
                text = text.replace(core, f"{OPEN}({i}{CLOSE}{core}{OPEN}){i}{CLOSE}", 1)
            content.append(
                {"type": "text", "text": text} if part.kind == "text" else {"type": part.kind}
            )
        if not content and message.extra.get("tool_calls"):
            content = empty
        elif not self.typed and all(part.kind == "text" for part in message.parts):
            content = "".join(item["text"] for item in content)
        extra = dict(message.extra)
        thoughts = [
            extra[key]
            for key in ("reasoning_content", "thinking", "reasoning")
            if extra.get(key) is not None
        ]
        if thoughts:  # under the names that transformers gives them too
            extra = {"thinking": thoughts[0], **extra, "reasoning_content": thoughts[0]}
        return {**extra, "role": message.role, "content": content}

    def _turn(self, i: int, shown: _Shown) -> list[Span]:
        """An assistant message without its header, but with its stop token, which may stand just behind the turn."""
        turns, text = shown.spans[f"}}{i}"], shown.text
        if len(turns) != 1:
            raise BadRow(
                "mask", f"message {i} (assistant) is {len(turns)} times in the rendered text"
            )
        spans = [
            span for span in shown.spans["]"] if turns[0][0] <= span[0] and span[1] <= turns[0][1]
        ]
        if not spans:
            before = shown.chat[i - 1]["role"] if i else ""
            if before not in shown.heads:
                shown.heads[before] = self._heads(shown.chat[:i], shown.tools)
            head = next(
                (head for head in shown.heads[before] if text.startswith(head, *turns[0])), None
            )
            if head is None:
                raise BadRow(
                    "mask", f"cannot tell where the header of message {i} (assistant) ends"
                )
            spans = [(turns[0][0] + len(head), turns[0][1])]
        start, end = spans[-1]
        body = text[start:end].rstrip()
        later = [
            begin
            for key, turns in shown.spans.items()
            if key[0] == "}"
            for begin, _ in turns
            if begin >= end
        ]
        stop = self.special_pattern.match(text, end, min(later, default=len(text)))
        return [
            *spans[:-1],
            (start, start + len(body) if body.endswith(self.special) or not stop else stop.end()),
        ]

    def _heads(self, before: Chat, tools: list[Any] | None) -> list[str]:
        """What may come before an answer to `before`: what does so when it is asked for, and what does so later on."""
        question, answer = (
            self._message(Message(role, (Part("text", PROBE),))) for role in ("user", "assistant")
        )
        for chat, given in (before or [question], tools), ([question], tools), ([question], None):
            try:
                shown, asked = self._show(chat, given), self._show(chat, given, ask=True)
                told = self._show([*chat, answer, question], given)
            except BadRow:  # not every conversation may end here
                continue
            last, turn = shown.spans[f"}}{len(chat) - 1}"], told.spans[f"}}{len(chat)}"]
            if len(last) == len(turn) == 1 and asked.text.startswith(shown.text[: last[0][1]]):
                prompt, (head, found, _) = (
                    asked.text[last[0][1] :],
                    told.text[slice(*turn[0])].partition(PROBE),
                )
                if (
                    not prompt or asked.text == shown.text
                ):  # it never asks, and the header is what is always there
                    later = [head if head.strip() else ""]
                else:  # the prompt may open a thinking block, which earlier turns do not have
                    later = [head] if head.strip() and prompt.startswith(head) else []
                return [prompt] * bool(prompt) + later * bool(found)
        return []

    def _texts_with_loss(self, i: int, message: Message, shown: _Shown) -> list[Span]:
        wanted = sum(part.kind == "text" and bool(part.value.strip()) for part in message.parts)
        spans = shown.spans[f"){i}"]
        if not wanted or len(spans) != wanted:
            what = f"message {i} ({message.role}) has loss: true"
            raise BadRow(
                "mask",
                f"{what}, but of its {wanted} texts {len(spans)} are found in the rendered text",
            )
        stop = (
            re.compile(rf"\s*{re.escape(self.stop)}").match(shown.text, spans[-1][1])
            if self.stop
            else None
        )
        return [*spans[:-1], (spans[-1][0], stop.end() if stop else spans[-1][1])]

    def _try_out(self) -> None:
        """Whether texts must be typed content, and what ends a turn. UserError if the template is of no use."""
        problem = (
            "it does not show both a user's and an assistant's message in a loop over `messages`"
        )
        for self.typed in (False, True):
            try:
                shown = self._show(
                    [
                        self._message(Message(r, (Part("text", PROBE),)))
                        for r in ("user", "assistant")
                    ]
                )
            except BadRow as error:
                problem = error.detail
                continue
            turns = shown.spans["}1"]
            if (
                len(turns) == 1
                and PROBE in shown.text[slice(*turns[0])]
                and shown.text.count(PROBE) > 1
            ):
                self.stop = next(
                    iter(self.special_pattern.findall(shown.text, shown.text.rindex(PROBE))), ""
                )
                return
        raise UserError(f"cannot train with this chat template: {problem}")

    def _find_placeholder(self, kind: str, names: set[str]) -> None:
        """Compare a message with and without a medium of the kind. Nothing is found if the template takes none."""
        text = {"type": "text", "text": PROBE}
        try:
            bare = self._show([{"role": "user", "content": [text]}]).text
            full = self._show([{"role": "user", "content": [{"type": kind}, text]}]).text
        except BadRow:
            return
        size = len(full) - len(bare)
        for at in (at for at in range(len(bare) + 1) if full[:at] + full[at + size :] == bare):
            written = full[at : at + size]
            tokens = [
                name for name in names if written.count(name) == 1
            ] or self.special_pattern.findall(written)
            if len(tokens) == 1:
                around = f"((?:{self.special_pattern.pattern})*"
                found = re.search(f"{around}?)({re.escape(tokens[0])}){around})", written)
                self.placeholders[kind] = found.groups() if found else ()
                return

    def _place_media(self, row: Row, text: str) -> tuple[Placeholder, ...]:
        """The n-th placeholder of a kind is for its n-th medium, since no text holds one and the numbers match."""
        waiting, places = {i: part.kind for i, part in enumerate(row.media())}, []
        for found in _any_of({token for _, token, _ in self.placeholders.values()}).finditer(text):
            index = next(
                (i for i, kind in waiting.items() if self.placeholders[kind][1] == found[0]), None
            )
            if index is None:
                raise BadRow(
                    "placeholder_in_text",
                    f"there are more {found[0]!r} in the text than media in the row",
                )
            kind = waiting.pop(index)
            before, _, behind = self.placeholders[kind]
            start = found.start() - len(before) * text.endswith(before, 0, found.start())
            end = found.end() + len(behind) * text.startswith(behind, found.end())
            places.append(Placeholder(index, kind, found.span(), (start, end)))
        if waiting:
            raise BadRow(
                "template", f"the chat template leaves out {len(waiting)} of the row's media"
            )
        return tuple(places)


def cut(
    ids: list[int], loss: list[bool], media: Sequence[Span], limit: int
) -> tuple[list[int], list[bool], int]:
    """At most `limit` tokens, and how many of `media` (outer spans by token, in order) they hold; those are whole."""
    end = min(limit, len(ids))
    end = min([end, *(start for start, stop in media if start < end < stop)])
    if not any(loss[1:end]):  # nothing predicts the first token
        raise BadRow(
            "nothing_to_learn", f"none of the first {end} of {len(ids)} tokens carries loss"
        )
    return ids[:end], loss[:end], sum(stop <= end for _, stop in media)


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    return re.compile(
        "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or "(?!)"
    )


def _by_token(place: Placeholder, spans: np.ndarray, text: str) -> Placeholder:
    def tokens(start: int, end: int) -> Span:
        hit = np.flatnonzero((spans[:, 0] < end) & (start < spans[:, 1]))
        return int(hit[0]), int(hit[-1]) + 1

    first, end = tokens(*place.span)
    token = text[slice(*place.span)]
    if text[spans[first][0] : spans[end - 1][1]].strip() != token:
        raise UserError(
            f"add {token!r}, the placeholder for {place.kind}, to the tokenizer as a special token"
        )
    return Placeholder(place.index, place.kind, (first, end), tokens(*place.outer))
