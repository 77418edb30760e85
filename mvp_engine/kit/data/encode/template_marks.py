"""Chat templates with marks around the text that they write for each message.

The marks are inserted into the template's syntax tree, so what the template trims, splits, drops or
dumps as JSON stays as it is. `extract_marks` removes them from the rendered text and returns the
spans between them.

Templates come with models, which nobody has to trust. `try_template` renders one in a process with
limits before this process does, and `RowMarks` counts the work of a row.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.row_types import BadRow, Message, Part

Span = tuple[int, int]  # first position, and the one after the last


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of the words, the longest first; without words, nothing."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def merge_spans(
    length: int,
    spans: Iterable[Span],
    excluded: Iterable[Span],
) -> tuple[Span, ...]:
    """The union of `spans` without `excluded`, as disjoint spans in order, in a text of that length."""
    flags = bytearray(length)
    for start, end in spans:
        flags[start:end] = b"\1" * (end - start)
    for start, end in excluded:
        flags[start:end] = bytes(end - start)
    return tuple(map(re.Match.span, re.finditer(b"\1+", flags)))


# Unicode noncharacters, which no text may hold. A mark is MARK_OPEN, its bracket, the index of the
# message, MARK_CLOSE. PROBE_TEXT stands for a text in trial renderings.
MARK_OPEN = "\ufdd0"
MARK_CLOSE = "\ufdd1"
PROBE_TEXT = "\ufdd2"
# {} encloses a loop body for one message, () a text with loss, [] a {% generation %} block.
_OPENING_OF = {"}": "{", ")": "(", "]": "["}
_MARK = re.compile(rf"{MARK_OPEN}([(){{}}[\]])([0-9]*){MARK_CLOSE}")
_MARK_FUNCTION = "mvp_mark"  # the name of the function in the template's context
# What a template may raise for a row that it does not support.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
# Limits of `try_template`. Published templates take 0.1 seconds, most of it the start of the process.
TRIAL_CPU_SECONDS = 10
TRIAL_SECONDS = 120  # on a machine that does something else meanwhile
TRIAL_BYTES = 2**29  # on top of what the process has at its start
TRIAL_ITERATIONS = 100_000
# Limits of a row: iterations of all loops, and characters, on top of 16 for each character of the row.
MAX_ITERATIONS = 1_000_000
MAX_CHARACTERS = 2**20


def mark(bracket: str, index: int | str = "") -> str:
    """One mark; `bracket` is one of `{}()[]`."""
    return f"{MARK_OPEN}{bracket}{index}{MARK_CLOSE}"


@dataclass
class MarkedSpans:
    """The spans between marks in a rendered text, which is without marks itself."""

    by_mark: dict[tuple[str, str], list[Span]] = field(default_factory=dict)  # bracket and index

    def turns(self, index: int) -> list[Span]:
        """What the template's loops wrote for a message."""
        return self.by_mark.get(("}", str(index)), [])

    def loss_texts(self, index: int) -> list[Span]:
        """The marked texts of a message."""
        return self.by_mark.get((")", str(index)), [])

    def turn_starts(self) -> list[int]:
        """Where the turns of all messages start."""
        starts: list[int] = []
        for (closing, _), spans in self.by_mark.items():
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
            spans.by_mark.setdefault((bracket, index), []).append((start, position))
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
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    if _MARK_FUNCTION in source:
        raise jinja2.TemplateError(f"{_MARK_FUNCTION} is a name that templates may not use")
    tree = env.parse(_generation_blocks_to_ifs(source))
    for block in tree.find_all(nodes.If):
        if isinstance(block.test, nodes.Name) and block.test.name == _MARK_FUNCTION:
            block.body = [_text_node(mark("[")), *block.body, _text_node(mark("]"))]
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            _mark_loop(loop, nodes.Name(loop.target.name, "load"))
        else:
            loop.body = [_COUNT, *loop.body]
    for macro in tree.find_all(nodes.Macro):
        macro.body = [_COUNT, *macro.body]
    tree.set_environment(env)
    return jinja2.Template.from_code(env, env.compile(tree), env.make_globals(None))


@dataclass
class RowMarks:
    """`mvp_mark` of one rendering. It counts the work, and raises before that is out of proportion to the row."""

    index_of: Mapping[int, int]  # the index of a message by its id
    row: Any
    max_iterations: int = MAX_ITERATIONS
    iterations: int = 0
    characters: int = 0  # written so far, without marks

    def __call__(self, value: Any, bracket: str) -> str:
        self.iterations += bracket == "{"
        if self.iterations > self.max_iterations:
            raise BadRow(
                "too_long", f"the chat template loops more than {self.max_iterations:,} times"
            )
        if id(value) not in self.index_of:  # loops over other things than messages get no marks
            return ""
        text = f"{MARK_OPEN}{bracket}{self.index_of[id(value)]}{MARK_CLOSE}"
        self.characters -= len(text)
        return text

    def join(self, pieces: Iterable[str]) -> str:
        kept = []
        left = iter(pieces)
        while some := list(islice(left, 256)):  # a check of each piece would take 10 % longer
            kept.append("".join(some))
            self.characters += len(kept[-1])
            most = MAX_CHARACTERS
            if self.characters > most and self.characters > most + 16 * len(repr(self.row)):
                raise BadRow(
                    "too_long", "the chat template writes a text that is far longer than the row"
                )
        return "".join(kept)


# Messages that take most branches of a template, and the declaration of their tool.
_TRIAL_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
_TRIAL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": PROBE_TEXT},
    {"role": "assistant", "content": "", "reasoning_content": "z", "tool_calls": [_TRIAL_CALL]},
    {"role": "tool", "content": PROBE_TEXT, "name": "f"},
    {"role": "assistant", "content": PROBE_TEXT, "reasoning_content": "z"},
]
_TRIAL_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
# sys.path is that of the caller, who may have changed it.
_TRIAL_PROGRAM = f"""
import json, sys
sys.path[:] = json.loads(sys.stdin.readline())
from {__name__} import _trial
_trial()
"""


@lru_cache(maxsize=64)  # by template: one process for each at a start
def try_template(source: str, context: str) -> str | None:
    """What a template does that takes too much time or memory for a few words; None: it does not.

    `context` are further variables as JSON. The process imports jinja2, not torch.
    """
    given = "\n".join([json.dumps(sys.path), json.dumps(source), context])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL_PROGRAM, str(TRIAL_CPU_SECONDS)],
            input=given.encode(),
            capture_output=True,
            timeout=TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"takes more than {TRIAL_SECONDS} seconds of time"
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"takes more than {TRIAL_CPU_SECONDS} seconds of CPU time"
    if not done.stdout:
        raise RuntimeError(f"the trial of a chat template failed: {done.stderr.decode()}")
    problem = done.stdout.decode().removeprefix(_STARTED).strip()
    if done.returncode and not problem:  # a crash, as out of memory or stack in C code
        return f"crashes the process that renders it: {done.returncode}"
    return problem or None


_STARTED = "started\n"


def _trial() -> None:
    """The process of `try_template`."""
    source, context = json.loads(sys.stdin.readline()), json.loads(sys.stdin.readline())
    status = Path("/proc/self/statm")
    if status.exists():  # Linux
        bytes_now = int(status.read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        resource.setrlimit(resource.RLIMIT_AS, (bytes_now + TRIAL_BYTES,) * 2)
    cpu_seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(_STARTED, end="", flush=True)
    typed = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in _TRIAL_CHAT
    ]
    plain = [_TRIAL_CHAT[0], _TRIAL_CHAT[-1]]
    for chat in (plain, _TRIAL_CHAT, typed[:1] + typed[-1:], typed):
        for prompt in (False, True):
            tools = [_TRIAL_TOOL] if len(chat) > 2 else None
            try:
                _render_trial(
                    source,
                    {**context, "messages": chat, "tools": tools, "add_generation_prompt": prompt},
                )
            except TEMPLATE_ERRORS:
                continue  # it does not support this chat; rows will show what it supports
            except MemoryError:
                print(f"takes more than {TRIAL_BYTES >> 20} MiB")
                return
            except BadRow as bad:
                print(bad.detail.removeprefix("the chat template "))
                return


def _render_trial(source: str, context: Mapping[str, Any]) -> None:
    marks = RowMarks({}, context, TRIAL_ITERATIONS)
    marks.join(compile_with_marks(source).generate(**context, mvp_mark=marks))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


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


_COUNT = _mark_node(nodes.Const(None), "{")  # no message, but work of the template


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
        source = self.owner.chat_template
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
        extra = dict(message.extra)
        reasoning = [extra[key] for key in REASONING_KEYS if extra.get(key) is not None]
        if reasoning:  # under both names that templates of transformers read
            extra = {"thinking": reasoning[0], **extra, "reasoning_content": reasoning[0]}
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
