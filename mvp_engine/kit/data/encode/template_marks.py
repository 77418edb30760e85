"""Chat templates with marks around the text that they write for each message.

The marks are inserted into the template's syntax tree, so what the template trims, splits, drops or
dumps as JSON stays as it is. `extract_marks` removes them from the rendered text and returns the
spans between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mvp_engine.kit.data.encode.text_spans import Span
from mvp_engine.kit.data.read.row_types import BadRow

# Unicode noncharacters, which no text may hold. A mark is MARK_OPEN, its bracket, the index of the
# message, MARK_CLOSE. PROBE_TEXT stands for a text in trial renderings.
MARK_OPEN = "\ufdd0"
MARK_CLOSE = "\ufdd1"
PROBE_TEXT = "\ufdd2"
# {} encloses a loop body for one message, () a text with loss, [] a {% generation %} block.
_OPENING_OF = {"}": "{", ")": "(", "]": "["}
_MARK = re.compile(rf"{MARK_OPEN}([(){{}}[\]])([0-9]*){MARK_CLOSE}")
_MARK_FUNCTION = "mvp_mark"  # the name of the function in the template's context


def mark(bracket: str, index: int | str = "") -> str:
    """One mark; `bracket` is one of `{}()[]`."""
    return f"{MARK_OPEN}{bracket}{index}{MARK_CLOSE}"


class MarkedSpans:
    """The spans between marks in a rendered text, which is without marks itself."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str], list[Span]] = {}  # by (closing bracket, index)

    def add(self, closing: str, index: str, span: Span) -> None:
        self._spans.setdefault((closing, index), []).append(span)

    def turns(self, index: int) -> list[Span]:
        """What the template's loops wrote for a message."""
        return self._spans.get(("}", str(index)), [])

    def loss_texts(self, index: int) -> list[Span]:
        """The marked texts of a message."""
        return self._spans.get((")", str(index)), [])

    def generation_blocks(self) -> list[Span]:
        return self._spans.get(("]", ""), [])

    def turn_starts(self) -> list[int]:
        """Where the turns of all messages start."""
        starts: list[int] = []
        for (closing, _), spans in self._spans.items():
            if closing == "}":
                starts += [start for start, _ in spans]
        return starts


def extract_marks(text: str) -> tuple[str, MarkedSpans]:
    """The text without marks, and the spans between them, by character of that text."""
    plain = _MARK.sub("", text)
    spans = MarkedSpans()
    opened: list[tuple[str, str, int]] = []  # (bracket, index, start) of marks not closed yet
    removed = 0  # characters of marks so far
    for found in _MARK.finditer(text):
        bracket, index = found.groups()
        position = found.start() - removed
        removed += len(found[0])
        if not opened or opened[-1][:2] != (_OPENING_OF.get(bracket), index):
            opened.append((bracket, index, position))
            continue
        start = opened.pop()[2]
        # A blank span is a loop that looks through the messages without writing them.
        if plain[start:position].strip():
            spans.add(bracket, index, (start, position))
    if opened or MARK_OPEN in plain or MARK_CLOSE in plain:
        raise BadRow(
            "mask",
            "the chat template splits messages, or the row holds U+FDD0 or U+FDD1, "
            "which are no characters",
        )
    return plain, spans


@lru_cache(maxsize=16)
def compile_with_marks(source: str) -> jinja2.Template:
    """The template as transformers compiles it, with marks inserted.

    The names of filters and globals are transformers' contract with chat templates. In the context,
    `mvp_mark` is the function (message, bracket) -> mark.
    """
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    env.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    tree = env.parse(_generation_blocks_to_ifs(source))
    for block in tree.find_all(nodes.If):
        if isinstance(block.test, nodes.Name) and block.test.name == _MARK_FUNCTION:
            block.body = [_text_node(mark("[")), *block.body, _text_node(mark("]"))]
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            _mark_loop(loop, nodes.Name(loop.target.name, "load"))
    tree.set_environment(env)
    return jinja2.Template.from_code(env, env.compile(tree), env.make_globals(None))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _generation_blocks_to_ifs(source: str) -> str:
    """{% generation %} is a tag of transformers: here an `if` on `mvp_mark`, which is always true."""
    source = re.sub(r"({%[-+]?\s*)generation(\s*[-+]?%})", rf"\1if {_MARK_FUNCTION}\2", source)
    return re.sub(r"({%[-+]?\s*)endgeneration(\s*[-+]?%})", r"\1endif\2", source)


def _text_node(text: str) -> nodes.Node:
    return nodes.Output([nodes.TemplateData(text)])


def _mark_node(message: nodes.Expr, bracket: str) -> nodes.Node:
    """A call of `mvp_mark` with the message of this iteration."""
    function = nodes.Name(_MARK_FUNCTION, "load")
    arguments: list[Any] = [message, nodes.Const(bracket)]
    return nodes.Output([nodes.Call(function, arguments, [], None, None)])


def _mark_loop(loop: nodes.For, variable: nodes.Expr) -> None:
    """Mark both ends of a loop body. The loop is over messages, or over their indices."""
    message = variable
    if _is_range_over_messages(loop.iter):
        message = nodes.Getitem(nodes.Name("messages", "load"), variable, "load")
    body = _close_before_jumps(loop.body, message)
    loop.body = [_mark_node(message, "{"), *body, _mark_node(message, "}")]


def _is_range_over_messages(iterated: nodes.Node) -> bool:
    if not isinstance(iterated, nodes.Call):
        return False
    names = {name.name for name in iterated.find_all(nodes.Name)}
    return {"range", "messages"} <= names


def _close_before_jumps(body: Sequence[nodes.Node], message: nodes.Expr) -> list[nodes.Node]:
    """The body with a closing mark before each `continue` and `break`."""
    marked: list[nodes.Node] = []
    for node in body:
        if isinstance(node, nodes.If):
            for branch in [node, *node.elif_]:
                branch.body = _close_before_jumps(branch.body, message)
                branch.else_ = _close_before_jumps(branch.else_, message)
        if isinstance(node, nodes.Continue | nodes.Break):
            marked.append(_mark_node(message, "}"))
        marked.append(node)
    return marked
