"""ChatTemplate: rows to text by the model's own chat template, and text to token ids with a loss mask.

A conversation is rendered once, whole. Its messages are not searched for in the text: the template is
compiled a second time with marks around its messages (`template_marks.py`). Without the marks that
text must be equal to the tokenizer's own, else the row is bad. What carries loss:

- Assistant turns, or what a message's `loss` says, from the generation prompt to the stop token. Not
  turns whose reasoning the template leaves out because another question follows: their answers alone are not what the
  model should write. Not an empty reasoning block that the template adds to a turn without reasoning.
- Of other roles with `loss: true` their texts, without surrounding white space, and the stop token
  after the last.
- Never media placeholders, nor the special tokens that enclose them.
- Of a `text` row everything. It gets one BOS where the tokenizer itself adds it, and one EOS. The BOS
  of a conversation is the template's; if that writes none, what calling a processor (not a tokenizer)
  would add. A text in segments gets neither.
- Of a prompt without an answer nothing. It ends with the generation prompt; a plain text has no EOS.

`between_turns` continues a conversation whose answers were sampled: it renders the messages after an answer without
the text before them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product, takewhile
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.template_marks import (
    PROBE_TEXT,
    REASONING_KEYS,
    Chat,
    MarkedText,
    Span,
    TemplateRenderer,
    Tools,
    any_of,
    arguments_as_json,
    merge_spans,
)
from mvp_engine.kit.data.encode.tokenization import (
    MaskingTokenizer,
    Placeholder,
    PlaceholderToken,
    Rendered,
    SpecialTokens,
    locate_placeholders,
)
from mvp_engine.kit.data.read.row_types import MEDIA, BadRow, Message, Part, Row

PROBE_REASONING = "\ufdd3"  # stands for reasoning, as PROBE_TEXT for a text
_THINK_BLOCK = re.compile(r"<think>(.*?)</think>", re.DOTALL)


class ChatTemplate:
    """The chat template of a tokenizer or processor.

    `placeholders` names the placeholder token of a media kind, where the processor does not.
    `options` are passed to the template (`enable_thinking=False`, ...).
    """

    def __init__(
        self,
        processor: Any,
        placeholders: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.is_processor = processor is not self.tokenizer
        if not getattr(self.tokenizer, "is_fast", False):
            raise UserError(
                f"loss masks need a fast tokenizer, which {type(self.tokenizer).__name__} is not"
            )
        self.renderer = TemplateRenderer(processor, self.tokenizer, options)
        self.special = SpecialTokens(self.tokenizer)
        self.tokenize = MaskingTokenizer(self.tokenizer, self.special)
        self.stop_token = ""
        self.placeholders: dict[str, PlaceholderToken] = {}  # by media kind
        known_tokens = _media_tokens(processor, self.tokenizer)
        if self.renderer.chat_template:
            self.renderer.refuse_too_expensive()
            self._try_template()
            candidates = dict(known_tokens)
            for kind, token in (placeholders or {}).items():
                candidates[kind] = {token}
            for kind, tokens in candidates.items():
                self._find_placeholder(kind, tokens)
        self._media_token = any_of({written.token for written in self.placeholders.values()})
        reserved = set().union(*known_tokens.values()) & self.tokenizer.get_vocab().keys()
        reserved |= {written.token for written in self.placeholders.values()}
        self._reserved = any_of(reserved)  # what no text of a row may hold

    def render(self, row: Row) -> Rendered:
        """The row's text, its spans with loss, and its placeholders.

        For the rejected side of a pair, pass a row with these messages.
        """
        self._check_no_placeholders(row)
        if row.text is not None:
            if not row.text.strip():
                raise BadRow("nothing_to_learn", "the text is empty")
            if row.text_loss:
                return Rendered(row.text, row.text_loss, weight=row.weight)
            if row.prompt_only:
                return Rendered(row.text, (), bos=True, prompt_only=True)
            everything = ((0, len(row.text)),)
            return Rendered(row.text, everything, bos=True, eos=True, weight=row.weight)
        has_loss = _messages_with_loss(row)
        rendered = self._render_conversation(row, has_loss)
        text = rendered.text
        media = locate_placeholders(text, row.media(), self.placeholders, self._media_token)
        finder = LossSpans(self.renderer, self.special, self.stop_token, rendered)
        incomplete = self._turns_without_their_reasoning(row, rendered)
        spans: list[Span] = []
        excluded = [place.outer for place in media]
        stops = True
        left_out = 0
        weights: list[tuple[Span, float]] = []
        for index, message in enumerate(row.messages):
            if not has_loss[index]:
                continue
            known = len(spans)
            if index in incomplete:
                left_out += 1
            elif message.role == "assistant":
                spans += finder.of_assistant(index)
                stops &= text[: spans[-1][1]].endswith(self.special.texts)
                if not _reasoning(message)[1] and not EMPTY_REASONING.search(message.text):
                    excluded += finder.empty_reasoning(index)
            else:
                spans += finder.of_texts(index, message)
            if message.loss is not None and not isinstance(message.loss, bool):
                weights += [(span, message.loss) for span in spans[known:]]
        if left_out and not spans:
            raise BadRow(
                "nothing_to_learn",
                "the chat template writes reasoning only at the end of a conversation, and no other turn has "
                "loss: cut the row after the turn that it should learn",
            )
        loss = merge_spans(len(text), spans, excluded)
        return Rendered(
            text,
            loss,
            media,
            self.is_processor,
            stops=stops,
            prompt_only=row.prompt_only,
            reasoning_left_out=left_out,
            weights=tuple(weights),
            weight=row.weight,
        )

    def between_turns(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Any] = ()
    ) -> Rendered:
        """The text between an answer, which ends the conversation `before`, and the next answer.

        It holds the messages `new` and the generation prompt. What the template writes for earlier turns is not in it,
        so it may change them. The text begins with the stop token of the answer, so that it is tokenized as it is
        after one.

        Raises a BadRow if the template does not write these messages after an answer.
        """
        index = len(before) - 1
        problem: BadRow | None = None
        for with_calls in (True, False):
            messages = _without_answers([*before, *new], with_calls)
            row = Row(messages, tools=tuple(tools), prompt_only=True)
            try:
                self._check_no_placeholders(row)
                rendered = self._render_conversation(row, [False] * len(messages))
                return self._after_turn(rendered, index, new)
            except BadRow as bad:
                problem = bad
        assert problem is not None, "both forms failed"
        raise problem

    def _after_turn(self, rendered: MarkedText, index: int, new: Sequence[Message]) -> Rendered:
        turns = rendered.spans.turns(index)
        if len(turns) != 1 or not rendered.spans.turns(index + 1):
            raise BadRow(
                "template", f"the chat template has no turn for a message of the role {new[0].role}"
            )
        finder = LossSpans(self.renderer, self.special, self.stop_token, rendered)
        start, end = finder.with_stop_token(turns[0])
        # Sampling stops at the first of several special tokens at the end of a turn (Cohere).
        tail = re.search(f"(?:{self.special.pattern.pattern})+$", rendered.text[start:end])
        if tail and self.stop_token and self.stop_token in tail[0]:
            end = start + tail.start() + tail[0].index(self.stop_token) + len(self.stop_token)
        text = rendered.text[end:]
        at = 0
        for message in new:
            for part in message.parts:
                if part.kind == "text" and part.value.strip():
                    at = _end_of_text(text, part.value.strip(), at)
                    if at < 0:
                        raise BadRow(
                            "template",
                            f"the chat template leaves out or rewrites a message of the role {message.role}",
                        )
        media = locate_placeholders(
            text, Row(tuple(new)).media(), self.placeholders, self._media_token
        )
        places = tuple(_moved(place, len(self.stop_token)) for place in media)
        return Rendered(self.stop_token + text, (), places, prompt_only=True)

    def drops_reasoning(self, new: Message, tools: Sequence[Any] = ()) -> bool:
        """Whether the template leaves out the reasoning of an answer once this message follows it."""
        extra = {"reasoning_content": PROBE_REASONING}
        answer = Message("assistant", (Part("text", PROBE_TEXT),), extra=extra)
        (called,) = _without_answers([answer, new], with_calls=True)[:1]
        answer = replace(called, extra={**called.extra, **extra})
        question = Message("user", (Part("text", "Q"),))
        is_written = []
        for messages in ((question, answer), (question, answer, new)):
            try:
                row = Row(messages, tools=tuple(tools))
                rendered = self._render_conversation(row, [False] * len(messages))
            except BadRow:
                return False  # it has no place for such a message
            is_written.append(PROBE_REASONING in rendered.text)
        return is_written == [True, False]

    def reasoning_left_out(self, row: Row) -> int:
        """How many turns carry no loss because the template leaves out their reasoning; of a bad row none."""
        if not any(_reasoning(message)[1] for message in row.messages):
            return 0
        try:
            return self.render(row).reasoning_left_out
        except BadRow:
            return 0

    def _check_no_placeholders(self, row: Row) -> None:
        texts = []
        for message in row.messages:
            texts += [part.value for part in message.parts if part.kind == "text"]
        found = self._reserved.search("\0".join(texts) if row.text is None else row.text)
        if found:
            raise BadRow(
                "placeholder_in_text",
                f"a text holds {found[0]!r}, which is a media placeholder of this model",
            )

    def _render_conversation(self, row: Row, has_loss: Sequence[bool]) -> MarkedText:
        """The conversation in the tokenizer's own text, with nothing of the row left out."""
        tools = list(row.tools) or None
        has_tool_calls = False
        for message in row.messages:
            has_tool_calls |= bool(message.extra.get("tool_calls"))
        source = self.renderer.source(tools)
        if tools and "tools" not in source:
            raise BadRow("template", "the chat template leaves out tools")
        if has_tool_calls and "tool_calls" not in source:
            raise BadRow("template", "the chat template leaves out tool_calls")
        missing = {part.kind for part in row.media()} - self.placeholders.keys()
        if missing:
            raise BadRow(
                "unsupported_media",
                f"the chat template has no placeholder for {' and '.join(sorted(missing))}: is this a model for it?",
            )
        if has_tool_calls:
            rendered = self._render_tool_calls(row, has_loss, tools)
        else:
            rendered = self._render_messages(row, has_loss, tools)
        for index, message in enumerate(row.messages):
            if message.role not in ("system", "user"):
                continue
            texts = [part.value.strip() for part in message.parts if part.kind == "text"]
            if not all(text in rendered.text for text in texts):
                raise BadRow(
                    "template",
                    f"the chat template leaves out or rewrites message {index} ({message.role})",
                )
        return rendered

    def _render_tool_calls(self, row: Row, has_loss: Sequence[bool], tools: Tools) -> MarkedText:
        """The conversation in the first form of which the template writes all tool calls.

        Most templates take arguments as objects, some as JSON. Content next to tool calls is "" for
        most; some write the calls only if it is None.
        """
        problem: BadRow | None = None
        for json_arguments, empty_content in product((False, True), ("", None)):
            try:
                form = {"json_arguments": json_arguments, "empty_content": empty_content}
                rendered = self._render_messages(row, has_loss, tools, **form)
                _check_tool_calls(row, rendered, json_arguments)
                return rendered
            except BadRow as bad:
                if bad.reason != "template":
                    raise
                problem = problem or bad
        assert problem is not None, "every form failed"
        raise problem

    def _render_messages(
        self, row: Row, has_loss: Sequence[bool], tools: Tools, **form: Any
    ) -> MarkedText:
        chat = []
        unmarked = []
        for index, message in enumerate(row.messages):
            mark_texts = has_loss[index] and message.role != "assistant"
            chat.append(self.renderer.message(message, index, mark_texts=mark_texts, **form))
            unmarked.append(self.renderer.message(message, index, **form))
        return self.renderer.render(
            chat, tools, add_generation_prompt=row.prompt_only, unmarked=unmarked
        )

    def _turns_without_their_reasoning(self, row: Row, rendered: MarkedText) -> set[int]:
        """The messages whose reasoning the template writes only until the conversation continues.

        Raises if the template leaves out the reasoning of other messages.
        """
        questions = [index for index, message in enumerate(row.messages) if message.role == "user"]
        last_question = max(questions, default=-1)
        source = self.renderer.source(rendered.tools)
        found = set()
        for index, message in enumerate(row.messages):
            key, reasoning = _reasoning(message)
            if not reasoning or _is_written(reasoning, message, rendered, index):
                continue
            if index < last_question:
                is_supported = not key or re.search(r"reasoning|\bthinking\b", source) is not None
            else:
                until_here = self.renderer.render(rendered.chat[: index + 1], rendered.tools)
                is_supported = _is_written(reasoning, message, until_here, index)
            if not is_supported:
                raise BadRow(
                    "template",
                    f"the chat template leaves out {key or 'the reasoning'} of message {index}: remove "
                    "it from the row, or train with a template that writes it",
                )
            found.add(index)
        return found

    def _try_template(self) -> None:
        """Find out whether texts must be typed content, and which token ends a turn.

        Raises a UserError if the template cannot be trained with.
        """
        problem = (
            "it does not write both a user's and an assistant's message in a loop over `messages`"
        )
        for typed_content in (False, True):
            self.renderer.typed_content = typed_content
            chat = [self.renderer.probe_message(role) for role in ("user", "assistant")]
            try:
                rendered = self.renderer.render(chat)
            except BadRow as error:
                problem = error.detail
                continue
            text = rendered.text
            turns = rendered.spans.turns(1)
            if len(turns) != 1 or text.count(PROBE_TEXT) < 2:
                continue
            if PROBE_TEXT in text[slice(*turns[0])]:
                after_answer = self.special.pattern.findall(text, text.rindex(PROBE_TEXT))
                self.stop_token = after_answer[0] if after_answer else ""
                return
        raise UserError(f"cannot train with this chat template: {problem}")

    def _find_placeholder(self, kind: str, names: set[str]) -> None:
        """Compare a message with and without an item of the kind.

        Nothing is found if the template does not support the kind.
        """
        probe = {"type": "text", "text": PROBE_TEXT}
        try:
            without = self.renderer.render([{"role": "user", "content": [probe]}]).text
            with_item = self.renderer.render(
                [{"role": "user", "content": [{"type": kind}, probe]}]
            ).text
        except BadRow:
            return
        for inserted in _insertions(without, with_item):
            tokens = [name for name in names if inserted.count(name) == 1]
            tokens = tokens or self.special.pattern.findall(inserted)
            if len(tokens) == 1:
                self.placeholders[kind] = self._split_placeholder(inserted, tokens[0])
                return

    def _split_placeholder(self, inserted: str, token: str) -> PlaceholderToken:
        """The token with the special tokens directly around it."""
        special = f"(?:{self.special.pattern.pattern})*"
        found = re.search(f"({special}?)({re.escape(token)})({special})", inserted)
        assert found is not None, "the token was found in this text"
        return PlaceholderToken(*found.groups())


def _without_answers(messages: Sequence[Message], with_calls: bool) -> tuple[Message, ...]:
    """The messages with a placeholder for the text of each answer, which is not rendered again.

    `with_calls`: answers before results of tools have a call for each of them, which some templates look for.
    """
    found = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            found.append(message)
            continue
        results = list(takewhile(lambda one: one.role == "tool", messages[index + 1 :]))
        calls = []
        for result in results if with_calls else []:
            function = {"name": result.extra.get("name", "tool"), "arguments": {}}
            call_id = result.extra.get("tool_call_id", "call00000")
            calls.append({"id": call_id, "type": "function", "function": function})
        if calls:
            found.append(Message("assistant", (), extra={"tool_calls": calls}))
        else:
            found.append(Message("assistant", (Part("text", PROBE_TEXT),)))
    return tuple(found)


def _end_of_text(text: str, written: str, start: int) -> int:
    """Where a message's text ends in a rendered one, as it is or as JSON; -1 if it is not in it."""
    for form in (written, json.dumps(written, ensure_ascii=False)[1:-1], json.dumps(written)[1:-1]):
        at = text.find(form, start)
        if at >= 0:
            return at + len(form)
    return -1


def _moved(place: Placeholder, by: int) -> Placeholder:
    def moved(span: Span) -> Span:
        return span[0] + by, span[1] + by

    return replace(place, span=moved(place.span), outer=moved(place.outer))


def _media_tokens(processor: Any, tokenizer: Any) -> dict[str, set[str]]:
    """The placeholder tokens that processor and tokenizer name, by media kind."""
    tokens: dict[str, set[str]] = {}
    for kind in MEDIA:
        named = [getattr(owner, f"{kind}_token", None) for owner in (processor, tokenizer)]
        tokens[kind] = {str(token) for token in named if token}
    return tokens


def _messages_with_loss(row: Row) -> list[bool]:
    flags = []
    for message in row.messages:
        flags.append(message.role == "assistant" if message.loss is None else bool(message.loss))
    if not any(flags) and not row.prompt_only:
        has_answer = any(message.role == "assistant" for message in row.messages)
        raise BadRow(
            "nothing_to_learn",
            "all assistant turns have loss: false" if has_answer else "no assistant turn",
        )
    return flags


def _check_tool_calls(row: Row, rendered: MarkedText, json_arguments: bool) -> None:
    """Raise unless each tool call is in the turn of its message, with arguments as the template means them."""
    for index, message in enumerate(row.messages):
        turns = rendered.spans.turns(index)
        written = "".join(rendered.text[start:end] for start, end in turns)
        names = Counter[str]()
        for call in message.extra.get("tool_calls") or ():
            function = call.get("function") or call
            name = function.get("name") or ""
            names[name] += 1
            if written.count(name) < names[name]:
                raise BadRow("template", f"the chat template leaves out the tool call {name!r}")
            arguments = function.get("arguments", "")
            as_json = arguments_as_json(arguments)
            # A template that takes JSON writes an object as Python does, one that takes objects quotes JSON.
            is_python = str(arguments) != as_json and str(arguments) in written
            if as_json not in written if json_arguments else is_python:
                raise BadRow(
                    "template",
                    f"the chat template does not write the arguments of the tool call {name!r} as JSON",
                )


def _reasoning(message: Message) -> tuple[str, str]:
    """(key, text) of a message's reasoning. The key is "" if it is in the text of an answer."""
    for key in REASONING_KEYS:
        if message.extra.get(key):
            return key, str(message.extra[key]).strip()
    found = _THINK_BLOCK.search(message.text) if message.role == "assistant" else None
    return "", found[1].strip() if found else ""


def _is_written(reasoning: str, message: Message, rendered: MarkedText, index: int) -> bool:
    """Whether a message's reasoning is in its turn, and not only as words of its answer."""
    answer = _THINK_BLOCK.sub("", message.text)
    turns = rendered.spans.turns(index)
    return any(
        rendered.text[start:end].count(reasoning) > answer.count(reasoning) for start, end in turns
    )


def _insertions(without: str, with_item: str) -> list[str]:
    """The texts that, inserted somewhere into the first, give the second."""
    size = len(with_item) - len(without)
    insertions = []
    for position in range(len(without) + 1):
        rest = with_item[:position] + with_item[position + size :]
        if rest == without:
            insertions.append(with_item[position : position + size])
    return insertions


# Character spans with loss in a rendered conversation.
#
# An assistant turn starts after the template's generation prompt (which the template is rendered with, not assumed), or
# with its `{% generation %}` block, and ends with its stop token. The white space after that carries no loss. All that
# the template keeps in between does: tool calls and reasoning blocks. `empty_reasoning` is the exception, a block
# without reasoning.

# A reasoning block without reasoning, in the spellings of model families.
EMPTY_REASONING = re.compile(
    r"""<(?P<tag>[\w:]*think\w*)>\s*</(?P=tag)>
        | \[THINK\]\s*\[/THINK\]
        | <\|START_THINKING\|>\s*<\|END_THINKING\|>
        | <\|channel>thought\s*<channel\|>""",
    re.VERBOSE,
)


@dataclass(eq=False)
class LossSpans:
    """The spans with loss of one rendered conversation."""

    renderer: TemplateRenderer
    special: SpecialTokens
    stop_token: str
    rendered: MarkedText
    # Role before an answer -> headers of that answer. Finding them takes three renderings.
    _headers: dict[str, list[str]] = field(default_factory=dict)

    def of_assistant(self, index: int) -> list[Span]:
        """An assistant turn without its header, with its stop token."""
        turns = self.rendered.spans.turns(index)
        if len(turns) != 1:
            raise BadRow(
                "mask",
                f"message {index} (assistant) is {len(turns)} times in the rendered text",
            )
        turn_start, turn_end = turns[0]
        following = self.rendered.chat[index + 1 : index + 2]
        if (
            following
            and following[0]["role"] == "tool"
            and not self.rendered.spans.turns(index + 1)
        ):
            # The template writes the tool's answer into the turn of the call (Gemma 4).
            turn_end = self._end_of_own_text(index, turns[0])
        spans = []
        for span in self.rendered.spans.by_mark.get(("]", ""), []):
            if turn_start <= span[0] and span[1] <= turn_end:
                spans.append(span)
        if not spans:
            chat = self.rendered.chat
            role_before = chat[index - 1]["role"] if index else ""
            if role_before not in self._headers:
                headers = self._answer_headers(chat[:index], self.rendered.tools)
                self._headers[role_before] = headers
            for header in self._headers[role_before]:
                if self.rendered.text.startswith(header, turn_start, turn_end):
                    spans = [(turn_start + len(header), turn_end)]
                    break
            else:
                raise BadRow(
                    "mask", f"cannot find where the header of message {index} (assistant) ends"
                )
        return [*spans[:-1], self.with_stop_token(spans[-1])]

    @cached_property
    def _turns_without_results(self) -> dict[int, str]:
        """The turns of the conversation without tool results, by message: up to where the model stops for them."""
        kept = [i for i, message in enumerate(self.rendered.chat) if message["role"] != "tool"]
        called = self.renderer.render([self.rendered.chat[i] for i in kept], self.rendered.tools)
        turns = {}
        for place, index in enumerate(kept):
            turns[index] = "".join(called.text[slice(*turn)] for turn in called.spans.turns(place))
        return turns

    def _end_of_own_text(self, index: int, turn: Span) -> int:
        """Where a turn ends that the model writes, before the results of its tool calls."""
        end = turn[0]
        written = self.rendered.text[slice(*turn)]
        for one, other in zip(self._turns_without_results[index], written, strict=False):
            if one != other:
                break
            end += 1
        return end

    def empty_reasoning(self, index: int) -> list[Span]:
        """The reasoning block without reasoning of an assistant turn, with the white space around it."""
        text = self.rendered.text
        ((start, end),) = self.rendered.spans.turns(index)
        found = EMPTY_REASONING.search(text, start, end)
        if found is None:
            return []
        before = text[start : found.start()].rstrip()
        behind = text[found.end() : end].lstrip()
        return [(start + len(before), end - len(behind))]

    def with_stop_token(self, span: Span) -> Span:
        """The span up to its stop token, which may come directly after the turn."""
        start, end = span
        text = self.rendered.text
        body = text[start:end].rstrip()
        if body.endswith(self.special.texts):
            return start, start + len(body)
        # The first token of the next turn is not taken for a stop token.
        later_turns = [begin for begin in self.rendered.spans.turn_starts() if begin >= end]
        next_turn = min(later_turns, default=len(text))
        stop = self.special.pattern.match(text, end, next_turn)
        return (start, stop.end()) if stop else (start, start + len(body))

    def _answer_headers(self, before: Chat, tools: Tools) -> list[str]:
        """What the template may write before an answer to the conversation `before`.

        That is the generation prompt, and the header of a turn that others follow.
        """
        question = self.renderer.probe_message("user")
        # Not every conversation may end here, so shorter ones are tried too.
        attempts = [(before or [question], tools), ([question], tools), ([question], None)]
        for chat, given_tools in attempts:
            try:
                headers = self._headers_after(chat, given_tools)
            except BadRow:
                continue
            if headers is not None:
                return headers
        return []

    def _headers_after(self, chat: Chat, tools: Tools) -> list[str] | None:
        """The headers of an answer to `chat`; None if the template's texts do not show them."""
        question = self.renderer.probe_message("user")
        answer = self.renderer.probe_message("assistant")
        asked = self.renderer.render(chat, tools)
        prompted = self.renderer.render(chat, tools, add_generation_prompt=True)
        answered = self.renderer.render([*chat, answer, question], tools)
        last_turns = asked.spans.turns(len(chat) - 1)
        answer_turns = answered.spans.turns(len(chat))
        if len(last_turns) != 1 or len(answer_turns) != 1:
            return None
        end = last_turns[0][1]
        if not prompted.text.startswith(asked.text[:end]):
            return None
        prompt = prompted.text[end:]
        headers = [prompt] if prompt else []
        answer_turn = answered.text[slice(*answer_turns[0])]
        if PROBE_TEXT not in answer_turn:
            return headers
        header = answer_turn.partition(PROBE_TEXT)[0]
        empty_block = EMPTY_REASONING.search(header)
        if empty_block:
            header = header[: empty_block.start()]
        has_no_prompt = not prompt or prompted.text == asked.text
        if has_no_prompt:  # the header is what every answer has
            return [*headers, header if header.strip() else ""]
        # The prompt may open a reasoning block, which earlier turns do not have.
        if header.strip() and prompt.startswith(header):
            headers.append(header)
        return headers

    def of_texts(self, index: int, message: Message) -> list[Span]:
        """The texts of a message of another role, and the stop token after the last of them."""
        texts = [part.value for part in message.parts if part.kind == "text"]
        wanted = sum(1 for text in texts if text.strip())
        spans = self.rendered.spans.loss_texts(index)
        if not wanted or len(spans) != wanted:
            raise BadRow(
                "mask",
                f"message {index} ({message.role}) has loss: true, but of its {wanted} texts "
                f"{len(spans)} are found in the rendered text",
            )
        start, end = spans[-1]
        if self.stop_token:
            stop = re.compile(rf"\s*{re.escape(self.stop_token)}").match(self.rendered.text, end)
            end = stop.end() if stop else end
        return [*spans[:-1], (start, end)]
