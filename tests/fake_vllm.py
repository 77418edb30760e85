"""A server with the HTTP API of vLLM 0.32, in a thread of the tests, answered by our own decode.

It has what the rollouts use: generation from token ids, OpenAI's completions, weight versions and the weight-transfer
routes with the back end of files. Its faults are attributes that a test sets.
"""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from folders import language_model
from ranks import reserve_port
from safetensors.torch import load_file, save_file

from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.decoding import Decoding, complete


class Refused(Exception):
    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class FakeVLLM:
    """`folder`: the model that the server starts with. `restart` starts it again on the same port."""

    def __init__(self, folder):
        self.folder = folder
        self.processed = True  # --logprobs-mode processed_logprobs
        self.has_token_ids = True
        self.configured = True  # --weight-transfer-config
        self.media_tokens = 1  # for each item of media
        self.media_token: int | None = None
        self.hangs = False
        self.dies_at: str | None = None  # a route at which the server dies
        self.requests: list[tuple[str, Any]] = []
        self.lock = threading.Lock()
        self.http: ThreadingHTTPServer | None = None
        self.held = reserve_port()  # while the server is dead, too
        self.port = int(self.held.getsockname()[1])
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        self.version = "default"
        self.paused = self.updating = self.engine_died = False
        self.received: dict[str, torch.Tensor] = {}
        self.engine = language_model(self.folder)
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                fake.serve(self, None)

            def do_POST(self):
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fake.serve(self, json.loads(data) if data else {})

            def log_message(self, *args):
                pass

        self.connections: set[socket.socket] = set()
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self):
        """As SIGKILL: connections are reset, later ones are refused."""
        if self.http is None:
            return
        http = self.http
        self.http = None
        threading.Thread(target=http.shutdown, daemon=True).start()
        # `close` alone leaves it listening until its thread has left `poll`.
        http.socket.shutdown(socket.SHUT_RDWR)
        http.socket.close()
        for connection in list(self.connections):
            with suppress(OSError):  # closed by its own thread meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def restart(self):
        self.kill()
        self.start()

    def serve(self, handler, body):
        self.connections.add(handler.connection)
        path = urlsplit(handler.path).path
        self.requests.append((handler.path, body))
        if path == self.dies_at:
            self.dies_at = None
            self.kill()
            return
        while self.hangs:
            time.sleep(0.01)
        try:
            status, answer = 200, self.answer(path, body)
        except Refused as error:
            status, answer = error.status, {"error": {"message": str(error), "code": error.status}}
        if self.http is None:
            return
        data = json.dumps(answer).encode()
        with suppress(ConnectionError):  # the client did not wait
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)
        self.connections.discard(handler.connection)

    def answer(self, path, body):
        if path == "/health":
            if self.engine_died:
                raise Refused(503, "EngineCore encountered an issue")
            return {}
        if self.engine_died:
            raise Refused(500, "EngineCore encountered an issue")
        with self.lock:
            match path:
                case "/v1/models":
                    return {"data": [{"id": "tiny"}]}
                case "/weight_info":
                    return {"weight_version": self.version}
                case "/update_weight_version":
                    self.version = body["new_version"]
                case "/is_paused":
                    return {"is_paused": self.paused}
                case "/pause":
                    self.paused = True
                case "/resume":
                    self.paused = False
                case "/inference/v1/generate":
                    return self.generate(body)
                case "/v1/completions":
                    return self.completions(body)
                case _:
                    self.update(path, body)
            return {}

    def update(self, path, body):
        if not self.configured:
            raise Refused(500, "Weight transfer not configured. Please set weight_transfer_config")
        match path:
            case "/init_weight_transfer_engine":
                assert body == {"init_info": {}}
            case "/start_weight_update":
                if self.updating:
                    raise Refused(
                        500, "start_weight_update called while a weight update is already active"
                    )
                assert self.paused
                self.updating = True
                self.received = {}
            case "/update_weights":
                assert self.updating
                self.received |= load_file(body["update_info"]["path"])
            case "/finish_weight_update":
                self.updating = False
                if self.received:
                    self.load()
                self.version = body.get("weight_version", self.version)
            case _:
                raise Refused(404, "Not Found")

    def load(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(self.folder / "config.json", folder)
            save_file(self.received, Path(folder) / "model.safetensors", {"format": "pt"})
            self.engine = language_model(Path(folder))

    def generate(self, body):
        assert not self.paused
        parameters = body["sampling_params"]
        assert (parameters["top_p"], parameters["top_k"], parameters["min_p"]) == (1.0, 0, 0.0)
        ids = self.expanded(body["token_ids"], len(body.get("content_parts", [])))
        choices = []
        for index, (tokens, log_probs, reason) in enumerate(self.write(ids, parameters)):
            span = {"version": self.version, "start": 0, "end": len(tokens)}
            content = [
                {"token_id": t, "logprob": p} for t, p in zip(tokens, log_probs, strict=True)
            ]
            choices.append(
                {
                    "index": index,
                    "token_ids": tokens,
                    "logprobs": {"content": content},
                    "finish_reason": reason,
                    "weight_versions": [span],
                }
            )
        return {"prompt_token_ids": ids, "choices": choices}

    def completions(self, body):
        assert body["model"] == "tiny"
        choices = []
        for index, (tokens, log_probs, reason) in enumerate(self.write(body["prompt"], body)):
            logprobs = {"token_logprobs": log_probs, "tokens": [f"text{t}" for t in tokens]}
            choice = {"index": index, "text": "...", "logprobs": logprobs, "finish_reason": reason}
            if self.has_token_ids:
                choice |= {"token_ids": tokens, "prompt_token_ids": body["prompt"]}
            choices.append(choice)
        return {"choices": choices}

    def expanded(self, ids, items):
        assert ids.count(self.media_token if self.media_token is not None else -1) == items
        return [
            i for one in ids for i in [one] * (self.media_tokens if one == self.media_token else 1)
        ]

    def write(self, ids, parameters):
        bias = {int(token): value for token, value in (parameters.get("logit_bias") or {}).items()}
        if certain := [token for token, value in bias.items() if value > 0]:
            return [(certain, [0.0 if self.processed else -5.0], "length")]
        prompt = PackedBatch.from_sequences([torch.tensor(ids)])
        decoding = Decoding(
            max_new_tokens=parameters["max_tokens"],
            stop=parameters.get("stop_token_ids", ()),
            temperature=parameters["temperature"],
            samples=parameters.get("n", 1),
            seed=parameters["seed"],
        )
        found = complete(self.engine, prompt, decoding)
        return [
            (one.tokens, one.log_probs, "stop" if one.is_finished else "length") for one in found
        ]
