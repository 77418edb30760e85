"""A server that speaks OpenAI's protocol over HTTP, and the parts of its messages: errors, streams, calls of tools.

What answers a request is a function: of `mvp serve` (tools/serve.py), or of an episode (`chat.url` of kit/rl).
"""

from __future__ import annotations

import json
import re
import select
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.row_types import BadRow

# How most open models write a call in their text (Hermes, Qwen), without the name of a parser.
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
MAX_REQUEST = 2**28  # bytes
IDLE_SECONDS = (
    300.0  # after which a connection without a request, or in the middle of one, is closed
)
REASONS = {400: "invalid_request_error", 404: "not_found_error"}


class Call(NamedTuple):
    """A call of a tool in an answer."""

    name: str
    arguments: dict[str, Any]
    id: str

    def as_openai(self) -> dict[str, Any]:
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


def parse_calls(
    tokenizer: Any,
    tokens: Sequence[int],
    text: str,
    prompt_ids: Callable[[], list[int]],
    tools: Sequence[Any],
    id_prefix: str,
) -> tuple[list[Call], str]:
    """The calls of tools in an answer, by the tokenizer's own parser or as Hermes' JSON, and its text without them."""
    if getattr(tokenizer, "response_template", None):
        try:
            parsed = tokenizer.parse_response(
                list(tokens), prefix=prompt_ids(), tools=list(tools) or None
            )
        except (ValueError, TypeError, LookupError):
            return [], text  # a model may write anything
        raw = parsed.get("tool_calls") or []
        content = parsed.get("content") or ""
    else:
        raw = [parse_json(found) for found in CALL.findall(text)]
        content = CALL.sub("", text).strip() if raw else text
    calls: list[Call] = []
    for one in raw:
        function = one.get("function", one) if isinstance(one, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            arguments = function.get("arguments", {})
            arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
            if isinstance(arguments, dict):
                number = f"{id_prefix}{len(calls):03d}"
                calls.append(Call(function["name"], arguments, number))
    return calls, content if calls else text


def parse_json(text: str) -> Any:
    """The value of a JSON text; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class RequestRefused(ValueError):
    """A request that gets an error as its answer: what is wrong, and the fix."""

    def __init__(
        self,
        message: str,
        code: str = "invalid_request_error",
        status: int = 400,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = {
            "message": message,
            "type": REASONS.get(status, "server_error"),
            "param": param,
            "code": code,
        }


# Answers a request, given whether its client still waits: a JSON object, or the chunks of a stream.
Answerer = Callable[
    [Mapping[str, Any], Callable[[], bool]], Mapping[str, Any] | Iterator[Mapping[str, Any]]
]


def as_chunks(completion: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A chat completion of one choice as a stream: the whole answer, and a chunk that ends it."""
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    for content, reason in ((delta, None), ({}, choice["finish_reason"])):
        choices = [{"index": 0, "delta": content, "finish_reason": reason}]
        yield {**completion, "object": "chat.completion.chunk", "choices": choices}


class OpenAIServer(ThreadingHTTPServer):
    """`posts` are the functions behind paths such as /v1/chat/completions; `models` are the names of the model."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256  # connections that wait to be accepted

    def __init__(
        self,
        posts: Mapping[str, Answerer],
        models: Sequence[str],
        address: tuple[str, int] = ("127.0.0.1", 0),
        activate: bool = True,
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler, bind_and_activate=False)
        self.posts = posts
        self.models = models
        try:
            self.server_bind()
            if activate:
                self.server_activate()
        except OSError:
            self.server_close()
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are no error."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: OpenAIServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses by itself, such as an unknown method, as JSON."""
        self.close_connection = True
        self._fail(RequestRefused(message or str(code), status=code))

    def do_GET(self) -> None:
        path = self._path
        if path == "/health":
            self._send(200, {"status": "ok"})
        elif path == "/v1/models":
            self._send(200, {"object": "list", "data": list(map(_model, self.server.models))})
        elif path.removeprefix("/v1/models/") in self.server.models:
            self._send(200, _model(path.removeprefix("/v1/models/")))
        else:
            self._no_route()

    def do_POST(self) -> None:
        self.close_connection = True  # until the body has been read
        try:
            request = self._read_request()
            answer = self.server.posts[self._path](request, self._is_connected)
            if isinstance(answer, Mapping):
                self._send(200, answer)
            else:
                self._stream(answer)
        except RequestRefused as refused:
            self._fail(refused)
        except (UserError, BadRow) as error:
            self._fail(RequestRefused(str(error)))
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001 - a bug is the answer of one request
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            self._fail(RequestRefused(message, "internal_error", 500))

    @property
    def _path(self) -> str:
        return self.path.partition("?")[0].rstrip("/")

    def _read_request(self) -> dict[str, Any]:
        if self._path not in self.server.posts:
            raise self._unknown_route()
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise RequestRefused("send the request with its Content-Length", status=411)
        if int(length) > MAX_REQUEST:
            text = f"the request has {int(length):,} bytes: at most {MAX_REQUEST:,} are allowed"
            raise RequestRefused(text, status=413)
        body = self.rfile.read(int(length))
        self.close_connection = self.headers.get("Connection", "").lower() == "close"
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"the request is no JSON: {error}") from None
        if not isinstance(request, dict):
            raise RequestRefused("the request is no JSON object")
        return request

    def _unknown_route(self) -> RequestRefused:
        known = ", ".join(["/health", "/v1/models", *self.server.posts])
        return RequestRefused(
            f"no route {self.command} {self._path}: there are {known}", "not_found", 404
        )

    def _no_route(self) -> None:
        self._fail(self._unknown_route())

    def _is_connected(self) -> bool:
        """Whether the client still waits for the answer."""
        try:
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            return not poll.poll(0) or bool(self.connection.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return False

    def _fail(self, refused: RequestRefused) -> None:
        self._send(refused.status, {"error": refused.error})

    def _send(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, chunks: Iterator[Mapping[str, Any]]) -> None:
        """Server-sent events. What is wrong before the first chunk is an error as of any request."""
        first = next(chunks, None)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")  # the end of the connection ends the stream
        self.end_headers()
        self.close_connection = True
        try:
            if first is not None:
                self._event(first)
            for chunk in chunks:
                self._event(chunk)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001 - the status has been sent
            if not isinstance(error, RequestRefused):
                traceback.print_exc()
                error = RequestRefused(f"{type(error).__name__}: {error}", "internal_error", 500)
            self._event({"error": error.error})
        finally:
            close = getattr(chunks, "close", None)
            if close is not None:
                close()
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: Mapping[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "mvp_engine"}
