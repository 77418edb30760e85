"""Rollouts by servers over HTTP: requests shared by several servers, checks of what they return, servers that vanish.

What is particular to one kind of server is in `vllm_rollout.py` and `sglang_rollout.py`. Token ids go in and come out;
nothing is tokenized again.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import logging
import mimetypes
import os
import select
import shutil
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from torch import Tensor, nn

from mvp_engine.errors import UserError, count
from mvp_engine.hf.lora.lora_layers import adapted_layers
from mvp_engine.hf.model.model_parts import parts_of
from mvp_engine.kit.rl.rollout import Buckets, Reason, Sample, Sampling

if TYPE_CHECKING:
    from mvp_engine.kit.rl.prompts import Prompt
    from mvp_engine.kit.rl.settings import GenerationSettings

API_KEY = "ROLLOUT_API_KEY"  # environment variable: the key of servers that want one
LOGGER = logging.getLogger("mvp_engine")
REQUESTS = 512  # at a time, of all servers together: further ones wait here
ATTEMPTS = 5  # of one request, at servers that then vanish
BAN = -100.0  # logit bias of a token that is never to be sampled: the least that servers accept
PROBE = 100.0  # logit bias that makes a token certain
MEDIA_TYPES = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
Weights = Buckets | Callable[[Path], None]  # a stream, or what writes an adapter into a folder
Bias = dict[int, float]  # logit biases by token


class NoServer(UserError):
    """No server of a rollout has answered for a while."""


@dataclass
class Completed:
    """What a server returned for one request."""

    tokens: list[int]
    log_probs: list[float]
    finished: str | None
    # The weights that wrote the tokens: {"version": LABEL, "start": FIRST, "end": END} for each version.
    spans: list[dict[str, Any]]
    prompt: list[int] | None = None  # as the server expanded it
    experts: Tensor | None = None  # as those of a Sample


class ServerRollout(ABC):
    """A `Rollout` of several servers with the same model.

    Each completion is a request of its own, sent at once in a thread. A request whose server vanishes is sent to
    another one; where none is left, it waits `wait_seconds` for one to come back, then raises `NoServer`. A server that
    was restarted, or has got weights from another trainer, gets the current weights again. `banned` are token ids that
    the trainer gives no probability, as the placeholders of media.
    """

    is_batched = False
    switches_in_flight = True
    adapter_routes = ""  # what comes before /load_lora_adapter
    hottest: float | None = None  # a temperature at which no token is certain; None: not needed

    def __init__(
        self,
        urls: Iterable[str],
        transfer: Transfer,
        *,
        banned: Collection[int] = (),
        wait_seconds: float = 60.0,
        api_key: str | None = None,
    ) -> None:
        self.servers = [Server(url, api_key=api_key) for url in urls]
        if not self.servers:
            raise UserError("generation.urls is empty: name a server, as http://localhost:8000")
        self.transfer = transfer
        self.banned = sorted(banned)
        self.wait_seconds = wait_seconds
        # Another trainer, or this run before a resume, may have sent weights with the same number: the random name
        # makes versions differ.
        self.name = f"mvp-{uuid.uuid4().hex[:12]}"
        self.label = ""  # of the weights that servers are to have
        self.version: int | None = None  # of those that they have
        self._pool = ThreadPoolExecutor(REQUESTS, "mvp-request")
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # held by the thread that stores or sends weights
        self._gone: dict[Server, str] = {}  # servers that do not answer, and why
        self._running: Counter[Server | str] = Counter()  # requests by server, and by label
        self._probed: set[Server] = set()
        self._is_closed = False

    # ---- What a kind of server does -------------------------------------------------------------------------------

    @abstractmethod
    def complete(
        self, server: Server, prompt: Prompt, how: Sampling, *, label: str, seed: int, bias: Bias
    ) -> Completed:
        """One completion. `label`: the name of the adapter, where the transfer sends adapters."""

    @staticmethod
    def sampling_params(how: Sampling, bias: Bias) -> dict[str, Any]:
        """Those of a request; a server's own defaults, such as top_k of the model's config, must not apply."""
        return {
            "temperature": how.temperature,
            "stop_token_ids": list(how.stop),
            "ignore_eos": True,  # only `stop` ends a completion
            "logit_bias": {str(token): value for token, value in bias.items()} or None,
            "top_p": 1.0,
            "min_p": 0.0,
        }

    @abstractmethod
    def server_version(self, server: Server) -> str:
        """The label of a server's weights."""

    @abstractmethod
    def send(self, server: Server, server_version: str) -> None:
        """Give a server the weights of `transfer`, under `label`. Requests in it continue with them."""

    @abstractmethod
    def rest(self, server: Server) -> None:
        """Free the server's GPU memory until the next `send`, if it was started for that."""

    @abstractmethod
    def refused(self, error: ServerRefused) -> UserError:
        """The error with how to start the server."""

    # ---- Rollout --------------------------------------------------------------------------------------------------

    def submit(self, prompt: Prompt, sampling: Sampling) -> list[Future[Sample]]:
        if self.version is None:
            raise RuntimeError("sync comes before submit: the servers have no weights of this run")
        numbers = range(sampling.samples)
        return [self._pool.submit(self._sample, prompt, sampling, number) for number in numbers]

    def run(self) -> None:
        """Nothing: requests run by themselves."""
        return

    def sync(self, weights: Weights | None, version: int) -> None:
        """Send weights to all servers. One that does not answer gets them when it is back."""
        if weights is None:
            raise ValueError("a server has no weights of the trainer: sync needs them")
        with self._sending:
            self.transfer.keep(weights, version)
            self.label = f"{self.name}-{version}"
            self._each(self._prepare, self.servers)
            self.version = version
            self._drop_older()
        self._wait_for_server()

    def release(self) -> None:
        """Free GPU memory of the servers that can sleep, until the next `sync`. Nothing generates then."""
        self._each(self.rest, self._ready())

    def close(self) -> None:
        """Free what is held here. The servers are not ours: they stay as they are."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for server in self.servers:
            server.close()
        self.transfer.close()

    # ---- Servers that come and go ---------------------------------------------------------------------------------

    def _ready(self) -> list[Server]:
        return [server for server in self.servers if server not in self._gone]

    def _each(self, function: Callable[[Server], None], servers: list[Server]) -> None:
        """Call a function for servers at the same time."""

        def call(server: Server) -> None:
            try:
                function(server)
            except ServerGone as error:
                self._lose(server, error)
            except ServerRefused as error:
                raise self.refused(error) from None

        with ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(call, servers))

    def _prepare(self, server: Server) -> None:
        """Send the current weights to a server, unless it has them already."""
        server.check()
        server_version = self.server_version(server)
        if server_version != self.label:
            self.send(server, server_version)
        if self._gone.pop(server, None) is not None:
            LOGGER.warning("rollout server %s is back", server.url)

    def _lose(self, server: Server, error: Exception) -> None:
        with self._lock:
            if server not in self._gone and not self._is_closed:
                LOGGER.warning("rollout server %s does not answer: %s", server.url, error)
            self._gone[server] = str(error)

    def _wait_for_server(self) -> list[Server]:
        """The servers that answer. If there is none, waits for one."""
        until = time.monotonic() + self.wait_seconds
        while self._is_closed or not (ready := self._ready()):
            if self._is_closed or time.monotonic() > until:
                raise NoServer(self._reasons(f"no server for {self.wait_seconds:g} s"))
            if self._sending.acquire(blocking=False):  # one thread asks for all
                try:
                    self._each(self._prepare, self.servers)
                finally:
                    self._sending.release()
            time.sleep(0.2)
        return ready

    def _reasons(self, what: str) -> str:
        lines = [f"  {server.url}: {self._gone.get(server, '')}" for server in self.servers]
        return "\n".join(
            [
                f"rollouts: {what}:",
                *lines,
                "Start the servers (docs/rl.md, Rollouts by a server), then start or resume the run: they get weights "
                "at the start.",
            ]
        )

    # ---- Adapters -------------------------------------------------------------------------------------------------

    def send_adapter(self, server: Server) -> None:
        """Load an adapter as a model of its own: requests that run keep theirs."""
        body = {"lora_name": self.label, "lora_path": str(self.transfer.current)}
        try:
            server.post(f"{self.adapter_routes}/load_lora_adapter", body)
        except ServerRefused as error:
            if "already" not in str(error):  # the server was not restarted
                raise

    def _drop_older(self) -> None:
        """Remove the files of older versions, and adapters that no request uses any more."""
        for version in list(self.transfer.folders)[:-1]:
            body = {"lora_name": f"{self.name}-{version}"}

            def unload(server: Server, body: dict[str, str] = body) -> None:
                with suppress(ServerRefused):  # the server was restarted, and has never loaded it
                    server.post(f"{self.adapter_routes}/unload_lora_adapter", body)

            if self.transfer.is_adapter:
                if self._running[body["lora_name"]]:
                    continue
                self._each(unload, self._ready())
            shutil.rmtree(self.transfer.folders.pop(version), ignore_errors=True)

    # ---- Requests -------------------------------------------------------------------------------------------------

    def _sample(self, prompt: Prompt, how: Sampling, number: int) -> Sample:
        """One completion, in a thread of its own."""
        seed = request_seed(how.seed, prompt, number)
        bias = dict.fromkeys(self.banned, BAN)
        for _ in range(ATTEMPTS):
            ready = self._wait_for_server()
            with self._lock:
                # A conversation stays at the server that has its KV cache, unless that is busier than another one.
                usual = ready[prompt.sample % len(ready)]
                server = min(ready, key=lambda one: self._running[one])
                if self._running[usual] <= 2 * self._running[server] + 8:
                    server = usual
                label = f"{self.name}-{self.version}"
                keys: list[Server | str] = [server, label]
                self._running.update(keys)
            try:
                self._check_log_probs(server, prompt, how, label)
                found = self.complete(server, prompt, how, label=label, seed=seed, bias=bias)
                self._check_prompt(server, prompt, found.prompt)
                return self._checked(server, found, how)
            except ServerGone as error:
                self._lose(server, error)
            except ServerRefused as error:
                if label not in str(error):
                    raise self.refused(error) from None
                self._lose(server, error)  # it was restarted, and has not loaded the adapter
            except (LookupError, TypeError) as error:
                raise UserError(
                    f"generation.urls: {server.url} returned an answer of another form than its kind of server "
                    f"({type(error).__name__}: {error})"
                ) from error
            finally:
                with self._lock:
                    self._running.subtract(keys)
        raise NoServer(self._reasons(f"a request was sent {ATTEMPTS} times and never completed"))

    def _check_log_probs(self, server: Server, prompt: Prompt, how: Sampling, label: str) -> None:
        """Whether the server's log-probs are those of the distribution that it samples from.

        Many servers report those of the model at temperature 1, or before logit biases. Two tokens that a bias makes
        certain show the latter: at most one of them can have a probability above 1/2 by itself. At the temperature
        `hottest` such a token is uncertain again.
        """
        if server in self._probed or (how.temperature == 1.0 and not self.banned):
            return

        def log_prob(token: int, temperature: float) -> float:
            one = replace(how, max_new_tokens=1, temperature=temperature, stop=())
            bias = {token: PROBE}
            return self.complete(server, prompt, one, label=label, seed=0, bias=bias).log_probs[0]

        tokens = [token for token in range(len(self.banned) + 2) if token not in self.banned]
        certain = min(log_prob(token, 1.0) for token in tokens[:2])
        is_cold = self.hottest is not None and log_prob(tokens[0], self.hottest) > -0.5
        if certain < -0.5 or is_cold:
            raise UserError(
                f"generation.urls: {server.url} reports log-probs of the model before temperature or logit biases "
                f"({certain:.3f} for a token that a bias makes certain), not those that it samples with: start vLLM "
                "with --logprobs-mode processed_logprobs, SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB, or set "
                "generation.temperature=1 with a text model"
            )
        self._probed.add(server)

    def _checked(self, server: Server, found: Completed, sampling: Sampling) -> Sample:
        """A completion as the server returned it, checked."""
        if found.finished not in ("stop", "length"):  # "abort": another client paused the server
            raise ServerGone(f"{server.url} ended a request early (finish_reason={found.finished})")
        versions = self._versions(server, found)
        ends = [at for at, token in enumerate(found.tokens) if token in sampling.stop]
        length = ends[0] + 1 if ends else len(found.tokens)
        tokens, log_probs = found.tokens[:length], found.log_probs[:length]
        where = f"generation.urls: {server.url}"
        if len(log_probs) != length or None in log_probs:
            raise UserError(
                f"{where} returned {len(log_probs)} log-probs for {count(length, 'token')}"
            )
        if not ends and length < sampling.max_new_tokens:
            last = f"after token {tokens[-1]}" if tokens else "before the first token"
            raise UserError(
                f"{where} ended a completion {last}, after {length} of {sampling.max_new_tokens} tokens; the stop "
                f"tokens of the run are {list(sampling.stop)}. The server has stop tokens of its own or leaves them "
                "out, or its context is too short (--max-model-len)"
            )
        if forbidden := set(tokens) & set(self.banned):
            raise UserError(
                f"{where} sampled token {min(forbidden)}, a placeholder of media, against its logit bias: use a server "
                "that applies logit_bias"
            )
        reason: Reason = "stop" if ends else "length"
        experts = found.experts if sampling.experts else None
        return Sample(0, tokens, log_probs, versions[:length], reason, experts=experts)

    def _versions(self, server: Server, found: Completed) -> list[int]:
        """The version of the weights that wrote each token."""
        versions: list[int] = []
        for span in found.spans:
            name, _, version = str(span["version"]).rpartition("-")
            if name != self.name or not version.isdigit():
                raise ServerGone(
                    f"{server.url} generated with other weights ({span['version']}), not with {self.label}"
                )
            versions += [int(version)] * (span["end"] - span["start"])
        if len(versions) != len(found.tokens):
            raise UserError(
                f"generation.urls: {server.url} said for {len(versions)} of {count(len(found.tokens), 'token')} which "
                "weights wrote them: use a version of the server that docs/rl.md names"
            )
        return versions

    def _check_prompt(self, server: Server, prompt: Prompt, ids: list[int] | None) -> None:
        """Whether the server's prompt, with expanded media, is the trainer's."""
        ours = prompt.batch.input_ids.tolist()
        if ids is None or ids == ours:
            return
        pairs = enumerate(zip(ids, ours, strict=False))
        at = next((i for i, pair in pairs if pair[0] != pair[1]), min(len(ids), len(ours)))
        kinds = sorted({item["type"] for item in prompt.media})
        fix = (
            f"it expands {', '.join(kinds)} in another way: give it the processor settings of the run "
            "(--mm-processor-kwargs)"
            if kinds
            else "it changed the ids of a text: use a server that takes prompts as token ids"
        )
        raise UserError(
            f"generation.urls: {server.url} has another prompt than the trainer for {prompt.where}: {len(ids)} tokens "
            f"against {len(ours)}, first difference at {at}: {ids[at : at + 8]} against {ours[at : at + 8]}; {fix}"
        )


def request_seed(seed: int, prompt: Prompt, number: int) -> int:
    """The seed of a request, a number that fits into 31 bits: SGLang takes no more."""
    mixed = hashlib.blake2b(f"{seed} {prompt.key} {number}".encode(), digest_size=4).digest()
    return int.from_bytes(mixed, "big") >> 1


def data_url(item: dict[str, Any], where: str) -> str:
    """An item of media as servers take it."""
    kind = item["type"]
    media_type: str | None = MEDIA_TYPES.get(kind)
    data = item.get("bytes")
    if "path" in item:
        data = Path(item["path"]).read_bytes()
        media_type = mimetypes.guess_type(item["path"])[0] or media_type
    if data is None or media_type is None:
        raise UserError(
            f"{where}: servers get media as files, and this {kind} is none: set generation.backend=packed"
        )
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def server_rollout(
    settings: GenerationSettings,
    *,
    folder: str | Path,
    wait_seconds: float,
    banned: Collection[int] = (),
) -> ServerRollout:
    """The rollout of `generation.backend` vllm or sglang. `folder`: of the run, for files that hold weights.

    `wait_seconds`: how long to wait where no server answers.
    """
    from mvp_engine.kit.rl.sglang_rollout import SGLangRollout
    from mvp_engine.kit.rl.vllm_rollout import VLLMRollout

    run = Path(folder)
    sync, _, shared = settings.sync.partition(":")
    where = Path(shared) / run.name if shared else run / "rollout_weights"
    kind = SGLangRollout if settings.backend == "sglang" else VLLMRollout
    return kind(
        settings.urls,
        sync,
        where,
        banned=banned,
        wait_seconds=wait_seconds,
        api_key=os.environ.get(API_KEY),
    )


def check_adapters(model: nn.Module) -> None:
    """Refuse what generation.sync=adapter cannot send.

    Servers load adapters of stacked experts in other forms, leave out those of encoders, and take no other weights.
    """
    parts = parts_of(model)
    layers = tuple(f"{name}.lora_" for name, _ in adapted_layers(model))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not (name.startswith(layers) and parts[name] == "llm"):
            raise UserError(
                f"generation.sync=adapter: servers load adapters of linear layers of the language model alone, and "
                f"{name} is trained. Set generation.sync=file, which sends merged weights"
            )


# Weights on their way to servers. Those of the last version are kept, so that a server that was restarted can get them
# again.


class Transfer:
    """A way to send weights. `keep` stores those of a version; a rollout sends them to any number of servers."""

    hint = ""  # a further requirement of servers, for error messages
    is_adapter = False

    def __init__(self) -> None:
        self.folders: dict[int, Path] = {}  # on disk, by version

    @property
    def current(self) -> Path:
        return list(self.folders.values())[-1]

    def keep(self, weights: Weights, version: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Free the weights that are kept."""
        for folder in self.folders.values():
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # it is not empty: someone else wrote into it
                folder.parent.rmdir()
        self.folders = {}


class Files(Transfer):
    """Weights in safetensors files, in a folder that trainer and servers share and that no other trainer uses."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder).resolve()

    def keep(self, weights: Weights, version: int) -> None:
        if not self.folders:
            for folder in self.folder.glob("version-*"):  # of a run that was killed
                shutil.rmtree(folder, ignore_errors=True)
        target = self.folder / f"version-{version}-{uuid.uuid4().hex[:8]}"
        self.write(weights, target)
        self.folders[version] = target

    def write(self, weights: Weights, target: Path) -> None:
        from safetensors.torch import save_file

        assert not callable(weights)
        target.mkdir(parents=True)
        for index, bucket in enumerate(weights):
            # Cloned, since safetensors refuses tensors that share memory.
            tensors = {name: tensor.contiguous().clone() for name, tensor in bucket}
            save_file(tensors, target / f"{index:05d}.safetensors")


class AdapterFiles(Files):
    """Adapters alone, as folders of peft. `weights` of `keep` is a function that writes one."""

    is_adapter = True

    def write(self, weights: Weights, target: Path) -> None:
        assert callable(weights)
        weights(target)


# One HTTP server that generates: JSON requests, and how its death is noticed.
#
# A server that is slow is asked for its health while a request waits, so that one that is gone is known within seconds
# and a long generation has no time-out. Standard library only.

HEALTH = "/health"
CONNECT_SECONDS = 4.0
HEALTH_EVERY = 2.0  # seconds between two questions while a request waits
HEALTH_SECONDS = 4.0  # for the answer: a server that is gone is named after 2 + 4 seconds
LONGEST_SECONDS = 3600.0  # without any byte from a server that says that it is healthy


class ServerGone(RuntimeError):
    """The server does not answer, or its engine died. Another server, or a restart, may help."""


class ServerRefused(RuntimeError):
    """The server answered with an error: the request is wrong, or the server was started without what it needs."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Server:
    """A server by its URL. Methods may be called from several threads: each request has its own connection."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"generation.urls: {url} is no URL of a server, as http://localhost:8000"
            )
        self._https = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._prefix = parts.path
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._lock = threading.Lock()
        self._healthy_at = -1e9  # monotonic time of the last sign of life
        self._open: set[http.client.HTTPConnection] = set()

    def get(self, path: str) -> Any:
        return self._exchange("GET", path)

    def post(self, path: str, body: Any = None) -> Any:
        return self._exchange("POST", path, body)

    def close(self) -> None:
        """End requests that wait for an answer: the server stops to generate for them."""
        for connection in list(self._open):
            with suppress(OSError):  # it has ended meanwhile
                connection.sock.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise `ServerGone` unless the server is healthy. Threads that wait share one question."""
        with self._lock:
            if time.monotonic() - self._healthy_at < HEALTH_EVERY:
                return
            try:
                self._exchange("GET", HEALTH, seconds=HEALTH_SECONDS)
            except ServerRefused as error:
                raise ServerGone(f"{self.url} is not healthy: {error}") from None
            self._healthy_at = time.monotonic()

    def _exchange(
        self, method: str, path: str, body: Any = None, *, seconds: float | None = None
    ) -> Any:
        """The answer to a request. Without `seconds` it may take as long as the server is healthy."""
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = kind(
            self._host, self._port, timeout=min(seconds or CONNECT_SECONDS, CONNECT_SECONDS)
        )
        where = f"{method} {self.url}{path}"
        try:
            data = None if body is None else json.dumps(body)
            connection.connect()
            # A large body (media, many ids) may take longer than a connection.
            connection.sock.settimeout(seconds or LONGEST_SECONDS)
            self._open.add(connection)
            connection.request(method, self._prefix + path, data, self._headers)
            if seconds is None:
                self._wait(connection)
            response = connection.getresponse()
            status = response.status
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._healthy_at = -1e9
            raise ServerGone(f"{where}: {reason}") from None
        finally:
            self._open.discard(connection)
            connection.close()
        if status >= 500 and path != HEALTH:  # of one request, or of an engine that died?
            self._healthy_at = -1e9
            self.check()
        return _answer(where, status, text)

    def _wait(self, connection: http.client.HTTPConnection) -> None:
        """Return when the answer begins; raise `ServerGone` when the server stops being healthy before."""
        readable = select.poll()
        readable.register(connection.sock, select.POLLIN)
        while not readable.poll(HEALTH_EVERY * 1000):
            self.check()


def _answer(where: str, status: int, text: str) -> Any:
    try:
        answer = json.loads(text) if text.strip() else {}
    except ValueError:
        answer = text  # as vLLM's to /v1/load_lora_adapter
    if 200 <= status < 300:
        return answer
    reason = f"{where}: HTTP {status}: {_message(answer)}"
    # A proxy without its server; a server that starts, or whose engine died.
    if status in (502, 503, 504):
        raise ServerGone(reason)
    raise ServerRefused(reason, status)


def _message(answer: Any) -> str | None:
    """The error text of an answer in the usual forms."""
    while isinstance(answer, dict):
        answer = answer.get("error") or answer.get("message") or answer.get("detail")
    return None if answer is None else str(answer)[:500]
