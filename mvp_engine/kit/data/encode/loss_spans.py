"""Character spans with loss in a rendered conversation.

An assistant turn starts after the template's generation prompt (which the template is rendered with,
not assumed), or with its `{% generation %}` block, and ends with its stop token. The white space after
that carries no loss. All that the template keeps in between does: tool calls and reasoning blocks.
`empty_reasoning` is the exception, a block without reasoning.
"""

from __future__ import annotations

import re
from functools import cached_property

from mvp_engine.kit.data.encode.template_marks import PROBE_TEXT
from mvp_engine.kit.data.encode.template_renderer import (
    Chat,
    MarkedText,
    TemplateRenderer,
    Tools,
)
from mvp_engine.kit.data.encode.text_spans import Span
from mvp_engine.kit.data.encode.tokenization import SpecialTokens
from mvp_engine.kit.data.read.row_types import BadRow, Message

# A reasoning block without reasoning, in the spellings of model families.
EMPTY_REASONING = re.compile(
    r"""<(?P<tag>[\w:]*think\w*)>\s*</(?P=tag)>
        | \[THINK\]\s*\[/THINK\]
        | <\|START_THINKING\|>\s*<\|END_THINKING\|>
        | <\|channel>thought\s*<channel\|>""",
    re.VERBOSE,
)


class LossSpans:
    """The spans with loss of one rendered conversation."""

    def __init__(
        self,
        renderer: TemplateRenderer,
        special: SpecialTokens,
        stop_token: str,
        rendered: MarkedText,
    ) -> None:
        self.renderer = renderer
        self.special = special
        self.stop_token = stop_token
        self.rendered = rendered
        # Role before an answer -> headers of that answer. Finding them takes three renderings.
        self._headers: dict[str, list[str]] = {}

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
        for span in self.rendered.spans.generation_blocks():
            if turn_start <= span[0] and span[1] <= turn_end:
                spans.append(span)
        if not spans:
            header = self._header_of(index, (turn_start, turn_end))
            spans = [(turn_start + len(header), turn_end)]
        return [*spans[:-1], self._with_stop_token(spans[-1])]

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

    def _with_stop_token(self, span: Span) -> Span:
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

    def _header_of(self, index: int, turn: Span) -> str:
        chat = self.rendered.chat
        role_before = chat[index - 1]["role"] if index else ""
        if role_before not in self._headers:
            self._headers[role_before] = self._answer_headers(chat[:index], self.rendered.tools)
        for header in self._headers[role_before]:
            if self.rendered.text.startswith(header, *turn):
                return header
        raise BadRow("mask", f"cannot find where the header of message {index} (assistant) ends")

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
