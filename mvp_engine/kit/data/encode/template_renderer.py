"""Rendering of conversations with the model's own chat template, with marks around its messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.template_marks import (
    PROBE_TEXT,
    TEMPLATE_ERRORS,
    MarkedSpans,
    RowMarks,
    compile_with_marks,
    extract_marks,
    mark,
    try_template,
)
from mvp_engine.kit.data.read.row_types import BadRow, Message, Part

Chat = list[dict[str, Any]]
Tools = list[Any] | None
# Names of the reasoning field in datasets, in order of preference.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class MarkedText:
    """A rendered conversation without its marks, and the spans that they enclosed."""

    chat: Chat
    tools: Tools
    text: str
    spans: MarkedSpans


class TemplateRenderer:
    """The chat template of a processor, or of its tokenizer; `options` are passed to the template."""

    def __init__(
        self,
        processor: Any,
        tokenizer: Any,
        options: Mapping[str, Any],
    ) -> None:
        self.tokenizer = tokenizer
        # The object that the template belongs to.
        self.owner = processor if getattr(processor, "chat_template", None) else tokenizer
        self.options = {**options, "tokenize": False}
        # What a template sees besides the conversation.
        self._variables = {**tokenizer.special_tokens_map, **options, "documents": None}
        self.typed_content = False  # whether plain texts must be typed parts too

    @property
    def chat_template(self) -> Any:
        """One template, or several by name; None if the model has none."""
        return self.owner.chat_template

    def refuse_too_expensive(self) -> None:
        """Raise a UserError for a template that takes too much time or memory: models are not trusted."""
        sources = self.chat_template
        context = json.dumps(self._variables, default=str)
        for source in sources.values() if isinstance(sources, Mapping) else [sources]:
            problem = try_template(source, context)
            if problem is not None:
                raise UserError(
                    f"the chat template of {self.tokenizer.name_or_path or 'the tokenizer'} is refused: for a few "
                    f"words, it {problem}. Replace chat_template.jinja (or chat_template in "
                    "tokenizer_config.json), or do not trust this model"
                )

    def source(self, tools: Tools) -> str:
        """The template for a conversation with these tools."""
        source = self.chat_template
        if isinstance(source, Mapping):
            source = (tools and source.get("tool_use")) or source.get("default")
        if source is None:
            raise UserError(
                "the tokenizer has no chat template to render conversations with; "
                "set its chat_template"
            )
        return source

    def render(
        self,
        chat: Chat,
        tools: Tools = None,
        *,
        add_generation_prompt: bool = False,
        unmarked: Chat | None = None,
    ) -> MarkedText:
        """The conversation as text.

        With `unmarked`, the same conversation without marks in its texts, the result must be equal to
        the tokenizer's own rendering of it, else the row is bad.
        """
        source = self.source(tools)
        index_of = {id(message): index for index, message in enumerate(chat)}
        marks = RowMarks(index_of, (chat, tools))
        context = {**self._variables, "mvp_mark": marks}
        own_text = None
        try:
            pieces = compile_with_marks(source).generate(
                messages=chat,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **context,
            )
            text = marks.join(pieces)
            if unmarked:
                own_text = self.owner.apply_chat_template(
                    unmarked,
                    tools=tools,
                    chat_template=source,
                    add_generation_prompt=add_generation_prompt,
                    **self.options,
                )
        except TEMPLATE_ERRORS as error:
            raise BadRow("template", f"the chat template fails: {error}") from error
        text, spans = extract_marks(text)
        if own_text is not None and own_text != text:
            raise BadRow(
                "mask", "the chat template renders another text once its messages are marked"
            )
        return MarkedText(chat, tools, text, spans)

    def message(
        self,
        message: Message,
        index: int = 0,
        *,
        mark_texts: bool = False,
        empty_content: str | None = "",
        json_arguments: bool = False,
    ) -> dict[str, Any]:
        """A message as chat templates take it, with media as bare types.

        `mark_texts` puts marks around its texts. `empty_content` is the content of a turn that has
        tool calls alone: most templates want "", some None. With `json_arguments`, the arguments of
        tool calls are JSON instead of objects.
        """
        content: Any = [_content_block(part, index, mark_texts) for part in message.parts]
        has_text_only = all(part.kind == "text" for part in message.parts)
        if not content and message.extra.get("tool_calls"):
            content = empty_content
        elif has_text_only and not self.typed_content:
            content = "".join(block["text"] for block in content)
        extra = _with_reasoning_keys(message.extra)
        if json_arguments and extra.get("tool_calls"):
            extra["tool_calls"] = [_with_json_arguments(call) for call in extra["tool_calls"]]
        return {**extra, "role": message.role, "content": content}

    def probe_message(self, role: str) -> dict[str, Any]:
        """A message with PROBE_TEXT, for trial renderings."""
        return self.message(Message(role, (Part("text", PROBE_TEXT),)))


def _content_block(part: Part, index: int, mark_text: bool) -> dict[str, Any]:
    if part.kind != "text":
        return {"type": part.kind}
    text = part.value
    stripped = text.strip()
    if mark_text and stripped:
        # Marks inside of the white space: templates may trim it.
        marked = mark("(", index) + stripped + mark(")", index)
        text = text.replace(stripped, marked, 1)
    return {"type": "text", "text": text}


def arguments_as_json(arguments: Any) -> str:
    """The arguments of a tool call as the `tojson` of chat templates writes them; JSON stays as it is."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_json_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    if call.get("function"):
        return {**call, "function": _with_json_arguments(call["function"])}
    return {**call, "arguments": arguments_as_json(call.get("arguments", {}))}


def _with_reasoning_keys(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The extra fields with reasoning under both names that templates of transformers read."""
    found = [extra[key] for key in REASONING_KEYS if extra.get(key) is not None]
    if not found:
        return dict(extra)
    return {"thinking": found[0], **extra, "reasoning_content": found[0]}
