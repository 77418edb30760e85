"""A chat template with marks at both ends of what it writes for each message, and the text taken apart by them again.

The marks go into the template's syntax tree, so what it trims, splits, drops or dumps as JSON stays as it is.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from datetime import datetime
from functools import lru_cache, partial

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mvp_engine.kit.data.read.rows import BadRow

Span = tuple[int, int]
# Code points that are no characters. A mark is OPEN, its kind, the message's number, CLOSE; PROBE stands for a text.
OPEN, CLOSE, PROBE = "\ufdd0", "\ufdd1", "\ufdd2"
MARK = re.compile(rf"{OPEN}([(){{}}[\]])([0-9]*){CLOSE}")
PAIRS = {
    "}": "{",
    ")": "(",
    "]": "[",
}  # {} a loop's body for a message, () a text with loss, [] a generation block


def take_apart(text: str) -> tuple[str, dict[str, list[Span]]]:
    spans: dict[str, list[Span]] = defaultdict(list)
    begun: list[tuple[str, int]] = []  # marks that wait for their end
    passed, plain = 0, MARK.sub("", text)
    for found in MARK.finditer(text):
        kind, number = found.groups()
        here, passed = found.start() - passed, passed + len(found[0])
        if not begun or begun[-1][0] != PAIRS.get(kind, "") + number:
            begun.append((kind + number, here))
        elif plain[
            (start := begun.pop()[1]) : here
        ].strip():  # a loop may only look through the messages
            spans[kind + number].append((start, here))
    if begun or OPEN in plain or CLOSE in plain:
        raise BadRow(
            "mask",
            "the chat template cuts messages apart, or the row holds U+FDD0 or U+FDD1: no characters",
        )
    return plain, spans


@lru_cache(maxsize=16)
def compiled(source: str) -> jinja2.Template:
    """The template as transformers compiles it (the names are its contract with templates), with marks in it."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    env.globals.update(
        raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form)
    )
    source = re.sub(r"({%[-+]?\s*)generation(\s*[-+]?%})", r"\1if mvp_mark\2", source)
    tree = env.parse(re.sub(r"({%[-+]?\s*)endgeneration(\s*[-+]?%})", r"\1endif\2", source))
    for block in tree.find_all(nodes.If):
        if isinstance(block.test, nodes.Name) and block.test.name == "mvp_mark":
            begin, end = (
                nodes.Output([nodes.TemplateData(f"{OPEN}{kind}{CLOSE}")]) for kind in "[]"
            )
            block.body = [begin, *block.body, end]
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            _mark_loop(loop, nodes.Name(loop.target.name, "load"))
    tree.set_environment(env)
    return jinja2.Template.from_code(env, env.compile(tree), env.make_globals(None))


def _mark_loop(loop: nodes.For, message: nodes.Expr) -> None:
    """Marks at both ends of the body, also before `continue` and `break`. It goes over messages or their indices."""

    def mark(kind: str) -> nodes.Node:
        return nodes.Output(
            [
                nodes.Call(
                    nodes.Name("mvp_mark", "load"), [message, nodes.Const(kind)], [], None, None
                )
            ]
        )

    def close_before_jumps(body: list[nodes.Node]) -> list[nodes.Node]:
        for branch in (
            branch for node in body if isinstance(node, nodes.If) for branch in [node, *node.elif_]
        ):
            branch.body, branch.else_ = (
                close_before_jumps(branch.body),
                close_before_jumps(branch.else_),
            )
        jumps = (nodes.Continue, nodes.Break)
        return [
            new
            for node in body
            for new in ([mark("}"), node] if isinstance(node, jumps) else [node])
        ]

    if isinstance(loop.iter, nodes.Call) and {"range", "messages"} <= {
        n.name for n in loop.iter.find_all(nodes.Name)
    }:
        message = nodes.Getitem(nodes.Name("messages", "load"), message, "load")
    loop.body = [mark("{"), *close_before_jumps(loop.body), mark("}")]
