"""Chat: a conversation of an episode, as its own process sees it: answers of the policy, and messages between them.

What was sampled is never tokenized again. The process renders and tokenizes only the messages after an answer and sends
their token ids to the controller, which generates. `chat.url` serves the same conversation to a program that speaks
OpenAI's protocol.
"""

from __future__ import annotations

import inspect
import json
import mimetypes
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError, count
from mvp_engine.kit.data import MLLMDataKit
from mvp_engine.kit.data.encode.row_encoder import RowEncoder
from mvp_engine.kit.data.read.messages import read_message
from mvp_engine.kit.data.read.row_types import MEDIA, BadRow, Message, Part, RowFormat
from mvp_engine.kit.decoding import with_completion
from mvp_engine.kit.openai_server import (
    Call,
    OpenAIServer,
    RequestRefused,
    as_chunks,
    parse_calls,
)
from mvp_engine.kit.rl.prompts import Prompt, media_item, without_values
from mvp_engine.kit.rl.settings import RLConfig


class ContextFull(Exception):
    """There is no room, or no turn left, for another answer. Uncaught, it ends the episode with its rewards so far."""


@dataclass(frozen=True)
class Answer:
    """A completion, as a reward or an episode sees it."""

    text: str  # without special tokens
    tokens: list[int]
    reason: str  # "stop", or "length": cut after generation.max_new_tokens
    log_probs: list[float]
    version: int  # of the weights that wrote it
    calls: tuple[Call, ...] = ()  # of tools
    content: str = ""  # the text without calls


class Watched(Answer):
    """An answer that knows whether the episode has read what the policy wrote."""

    is_read = False

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in ("text", "content", "tokens") or (name == "calls" and value):
            object.__setattr__(self, "is_read", True)
        return value


@dataclass(frozen=True)
class ChatSettings:
    """What conversations of several turns need; `encoder` is that of the prompts."""

    encoder: RowEncoder
    max_new_tokens: int  # of an answer
    max_tokens: int  # of a sequence, with all answers
    max_turns: int  # answers of an episode
    stop: Sequence[int]

    @classmethod
    def of(cls, config: RLConfig, kit: MLLMDataKit) -> ChatSettings:
        """The settings of a training."""
        sizes = config.generation
        return cls(
            kit.row_encoder, sizes.max_new_tokens, config.budget, sizes.max_turns, kit.eos_token_ids
        )

    @property
    def tokenizer(self) -> Any:
        return self.encoder.media.tokenizer

    def verdicts(self) -> dict[str, str]:
        """Why the chat template cannot continue a conversation with a message, by role; "" where it can."""
        found = {}
        before = [Message("user", (Part("text", "Q"),)), Message("assistant", ())]
        for role in ("user", "tool"):
            new = Message(role, (Part("text", "M"),), extra={"name": "f"} if role == "tool" else {})
            try:
                tools = self.encoder.tools if role == "tool" else ()
                self.encoder.template.between_turns(before, [new], tools)
                found[role] = ""
            except BadRow as bad:
                found[role] = bad.detail
        return found

    def roles_that_drop_reasoning(self) -> list[str]:
        """The roles after whose messages the chat template leaves out the reasoning of earlier answers."""
        new = {role: Message(role, (Part("text", "M"),)) for role in ("user", "tool")}
        template = self.encoder.template
        return [role for role, message in new.items() if template.drops_reasoning(message)]

    def check(self, has_tools: bool) -> None:
        """Raise if the chat template cannot write conversations of several turns, or results of tools."""
        verdicts = self.verdicts()
        if has_tools and verdicts["tool"]:
            raise UserError(
                f"tools: {verdicts['tool']}. Use a model whose template writes results of tools"
            )
        if all(verdicts.values()):
            raise UserError(
                f"episodes of several turns: {verdicts['user']}. Use a model with another chat template"
            )


@dataclass(frozen=True)
class Ask:
    """The tokens between the last answer of a sequence and the next one, which is asked for."""

    sequence: int  # 0: that of the prompt
    ids: list[int] = field(default_factory=list)
    text_ids: list[int] = field(default_factory=list)  # with one placeholder for each item of media
    media: list[dict[str, Any]] = field(default_factory=list)  # as those of a Prompt
    batch: PackedBatch | None = None  # all of the sequence, where media or another prompt are new


class Connected:
    """What the conversations of one episode share; `send` asks the controller and waits for an answer."""

    def __init__(self, send: Callable[[Ask], Answer], settings: ChatSettings, seed: int) -> None:
        self.send = send
        self.settings = settings
        self.is_credited = False  # by `chat.reward`
        self.random = random.Random(seed)
        self.lock = threading.RLock()  # a program may ask `chat.url` twice at once
        self.sequences = 0
        self.answers = 0
        self.last: Watched | None = None
        self.rewards: dict[int, list[float]] = {}  # by sequence: one number for each answer

    def close(self) -> None:
        """The episode has ended. A request to `chat.url` that runs gets its answer first, later ones get an error."""
        with self.lock:
            self.send = _refuse


def _refuse(ask: Ask) -> Answer:
    raise ValueError("the episode has ended")


class Chat:
    """A conversation with the policy. `answer` asks for a turn; `user` and `tool` are what it reads before the next."""

    def __init__(self, shared: Connected, prompt: Prompt) -> None:
        self._shared = shared
        self._prompt = prompt
        self._sequence = shared.sequences
        shared.sequences += 1
        shared.rewards[self._sequence] = []
        self._messages = list(prompt.messages)
        self._pending: list[Message] = []
        self._is_new = (
            self._sequence > 0
        )  # the controller does not know the prompt of another conversation
        self._batch = prompt.batch
        self._since: list[int] = []  # tokens after those of `_batch`
        self._last: Answer | None = None
        self._server: AgentServer | None = None

    # ---- What an episode calls ------------------------------------------------------------------------------------

    def answer(self) -> Answer:
        """The policy's next turn. Raises ContextFull where no room is left for it."""
        with self._shared.lock:
            ask = self._next_ask()
            answer = self._with_calls(self._shared.send(ask))
            if ask.batch is not None:
                self._batch = ask.batch
                self._since = []
            else:
                self._since += ask.ids
            self._since += answer.tokens
            self._messages += [*map(without_values, self._pending), Message("assistant", ())]
            self._pending = []
            self._is_new = False
            self._last = answer
            self._shared.answers += 1
            self._shared.rewards[self._sequence].append(0.0)
            self._shared.last = Watched(**vars(answer))
            return self._shared.last

    def user(self, *content: Any) -> None:
        """A message of the user: texts, images (PIL, arrays, paths), or blocks such as {"type": "image", ...}."""
        self._add("user", content)

    def tool(self, *content: Any, name: str = "tool", id: str = "call00000") -> None:
        """The result of a tool; values that are neither text nor media are written as JSON."""
        self._add("tool", content, name=name, tool_call_id=id)

    def reward(self, value: float) -> None:
        """Credit the last answer of this conversation."""
        rewards = self._shared.rewards[self._sequence]
        if not rewards:
            raise ValueError(
                "chat.reward(x) credits the last answer, and there is none yet: call chat.answer() first"
            )
        rewards[-1] += checked_number(value, "chat.reward(x)")
        self._shared.is_credited = True

    def new(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> Chat:
        """Another conversation of this episode, which is trained as a sequence of its own."""
        settings = self._shared.settings
        row = {"messages": list(messages), "tools": list(tools)}
        format = RowFormat(prompt_only=True)
        parsed = settings.encoder.read(row, format)
        sides = settings.encoder.encode(row, format, Path(), fit=False, decode=True)
        (batch,) = settings.encoder.load(sides, Path(), {})
        template = settings.encoder.template
        prompt = Prompt(
            key=self._prompt.key,
            row={},
            batch=settings.encoder.extend(batch, [], {}, batch.num_tokens),
            text_ids=template.tokenize(template.render(parsed)).ids,
            media=[
                media_item(part, settings.encoder.media.limits, Path()) for part in sides[0].parts
            ],
            source=self._prompt.source,
            where=self._prompt.where,
            sample=self._prompt.sample,
            messages=tuple(map(without_values, parsed.messages)),
            tools=parsed.tools,
        )
        with self._shared.lock:
            return Chat(self._shared, prompt)

    def call(self, answer: Answer, tools: Sequence[Callable[..., Any]]) -> Answer:
        """Answer each call of a tool with what its function returns; returns the policy's next answer."""
        functions = {function.__name__: function for function in tools}
        for call in answer.calls:
            self.tool(call_tool(functions, call), name=call.name, id=call.id)
        return self.answer()

    @property
    def random(self) -> random.Random:
        """Random numbers of this episode, the same in every run."""
        return self._shared.random

    @property
    def url(self) -> str:
        """The address of an OpenAI-compatible server in this process, for a program with a loop of its own."""
        with self._shared.lock:
            if self._server is None:
                self._server = AgentServer(self)
                threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    # ---- Inside ---------------------------------------------------------------------------------------------------

    def _add(self, role: str, content: Sequence[Any], **extra: str) -> None:
        if not content:
            raise ValueError(f"chat.{role}() needs a text or an image")
        self.add({"role": role, "content": list(map(_block, content)), **extra})

    def add(self, message: Mapping[str, Any]) -> None:
        """A message as rows have it."""
        self._pending.append(
            read_message(message, f"message {len(self._messages) + len(self._pending)}")
        )

    def _next_ask(self) -> Ask:
        settings = self._shared.settings
        if self._shared.answers >= settings.max_turns:
            raise ContextFull(f"{count(settings.max_turns, 'answer')} (generation.max_turns)")
        if self._last is None:
            if self._pending:
                raise ValueError(
                    "the prompt ends with a question: call chat.answer() before chat.user or chat.tool"
                )
            ask = Ask(self._sequence)
            if self._is_new:
                ask = Ask(
                    self._sequence, [], self._prompt.text_ids, self._prompt.media, self._batch
                )
        else:
            ask = self._ask_after(self._last, settings)
        tokens = self._batch.num_tokens + len(self._since) + len(ask.ids)
        if tokens + settings.max_new_tokens > settings.max_tokens:
            raise ContextFull(
                f"{tokens} tokens and an answer of generation.max_new_tokens={settings.max_new_tokens} are more than "
                f"{settings.max_tokens} (data.pack_tokens)"
            )
        return ask

    def _ask_after(self, last: Answer, settings: ChatSettings) -> Ask:
        if not self._pending:
            raise ValueError(
                "chat.answer() twice: send chat.user(...) or chat.tool(...) in between"
            )
        encoder = settings.encoder
        turn = encoder.encode_turn(self._messages, self._pending, self._prompt.tools)
        stop = encoder.template.stop_token
        ids = turn.ids
        before: list[int] = []
        if stop and last.tokens[-1] not in settings.stop:  # it was cut
            before = [settings.tokenizer.convert_tokens_to_ids(stop)]
        elif (
            not stop and ids[:1] == last.tokens[-1:]
        ):  # the header of a turn that stops the one before it (GLM)
            ids = ids[1:]
        batch = None
        if turn.media:
            new = [*self._since, *before, *ids]
            batch = encoder.extend(self._batch, new, turn.media, self._prompt.batch.num_tokens)
        media = [media_item(part, encoder.media.limits, Path()) for part in turn.parts]
        text_ids = turn.text_ids[len(turn.ids) - len(ids) :]
        return Ask(self._sequence, [*before, *ids], [*before, *text_ids], media, batch)

    def _with_calls(self, answer: Answer) -> Answer:
        """The answer with its calls of tools."""
        calls, content = parse_calls(
            self._shared.settings.tokenizer,
            answer.tokens,
            answer.text,
            lambda: with_completion(self._batch, None, self._since).input_ids.tolist(),
            self._prompt.tools,
            f"call{self._shared.answers:02d}",  # with three digits nine characters, as Mistral wants
        )
        return replace(answer, calls=tuple(calls), content=content)


def _block(value: Any) -> Any:
    """A block of a message's content."""
    if isinstance(value, str):
        return value
    if isinstance(value, Image.Image | np.ndarray):
        return {"type": "image", "image": value}
    if isinstance(value, Path):
        kind = (mimetypes.guess_type(value)[0] or "").partition("/")[0]
        if kind not in MEDIA:
            raise ValueError(f"{value} is no image, video or audio file")
        return {"type": kind, kind: str(value.absolute())}
    if isinstance(value, Mapping) and "type" in value:
        return dict(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def call_tool(functions: Mapping[str, Callable[..., Any]], call: Call) -> Any:
    """What a tool returns; an error is a text for the policy, which can learn from it."""
    if call.name not in functions:
        return f"error: there is no tool {call.name!r}; tools are {', '.join(functions)}"
    function = functions[call.name]
    try:
        inspect.signature(function).bind(**call.arguments)
        return function(**call.arguments)
    except Exception as error:  # noqa: BLE001 - a tool may raise anything
        return f"error: {type(error).__name__}: {error}"


def checked_number(value: Any, what: str) -> float:
    """A finite number; bool, int and scalars of numpy and torch are numbers."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if not isinstance(value, int | float):
        raise TypeError(f"{what} is {value!r:.80} of type {type(value).__name__}, wanted a number")
    if not np.isfinite(value):
        raise ValueError(f"{what} is {float(value)}, wanted a finite number")
    return float(value)


# An OpenAI-compatible server for one episode. Each request for a chat completion is a turn: of the conversation whose
# messages it continues, else of a new one.


@dataclass
class Served:
    """A conversation, and what a program knows of it."""

    chat: Chat
    messages: list[Any]
    tools: Sequence[Any]
    is_answered: bool = False


class AgentServer(OpenAIServer):
    def __init__(self, chat: Chat) -> None:
        super().__init__({"/v1/chat/completions": self.answer}, ["policy"])
        self.chat = chat
        prompt = chat._prompt
        self.served = [Served(chat, list(map(_key, prompt.messages)), prompt.tools)]

    def answer(self, request: Mapping[str, Any], is_connected: Callable[[], bool]) -> Any:
        """The chat completion of a request, or its stream: of an answer that is whole."""
        try:
            completion = self._complete(request)
        except ContextFull as error:
            raise RequestRefused(str(error), "context_length_exceeded") from None
        except RequestRefused:
            raise
        except ValueError as error:  # the episode has ended, or a call of Chat out of order
            raise RequestRefused(str(error)) from None
        return as_chunks(completion) if request.get("stream") else completion

    def _complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request.get("n", 1) != 1:
            raise RequestRefused("n must be 1: an episode has one answer for each request")
        raw = request.get("messages")
        if not isinstance(raw, list) or not raw:
            raise RequestRefused("messages must be a list of messages")
        with self.chat._shared.lock:
            served = self._conversation(raw, request.get("tools") or ())
            answer = served.chat.answer()
            reply: dict[str, Any] = {"role": "assistant", "content": answer.text}
            if answer.calls:
                reply["content"] = answer.content or None
                reply["tool_calls"] = [call.as_openai() for call in answer.calls]
            served.messages.append(_key(read_message(reply, "the answer")))
            served.is_answered = True
        reason = "tool_calls" if answer.calls else answer.reason
        usage = {"completion_tokens": len(answer.tokens)}
        choice = {"index": 0, "message": reply, "finish_reason": reason}
        return {
            "id": f"chatcmpl-{self.chat._shared.answers}",
            "object": "chat.completion",
            "created": 0,
            "model": request.get("model") or "policy",
            "choices": [choice],
            "usage": usage,
        }

    def _conversation(self, raw: list[Any], tools: Sequence[Any]) -> Served:
        """The conversation that the messages continue, with the new ones; else a new conversation."""
        parsed = [read_message(one, f"messages[{i}]") for i, one in enumerate(raw)]
        keys = list(map(_key, parsed))
        for served in sorted(self.served, key=lambda one: -len(one.messages)):
            known = len(served.messages)
            new = parsed[known:]
            continues = bool(new) == served.is_answered and all(
                one.role != "assistant" for one in new
            )
            same_tools = list(served.tools) == list(tools) or (not tools and not served.is_answered)
            if keys[:known] == served.messages and continues and same_tools:
                for message in raw[known:]:
                    served.chat.add(message)
                served.messages += keys[known:]
                return served
        found = Served(self.chat.new(raw, tools), keys, tools)
        self.served.append(found)
        return found


def _key(message: Message) -> Any:
    """What must be the same in a message that a program repeats."""
    calls = []
    for call in message.extra.get("tool_calls") or ():
        function = call.get("function", call)
        calls.append(
            (
                function.get("name"),
                json.dumps(function.get("arguments"), sort_keys=True, default=str),
            )
        )
    return message.role, [(part.kind, part.value) for part in message.parts], calls
