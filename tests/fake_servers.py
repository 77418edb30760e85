"""Servers with the HTTP APIs of vLLM 0.32 and SGLang 0.5, in a thread of the tests, answered by our own decode.

They have what the rollouts use: generation from token ids, weight versions, weights in files, adapters and sleep. Their
faults are attributes that a test sets.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import socket
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
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


class FakeServer:
    """`folder`: the model that the server starts with. `restart` starts it again on the same port."""

    def __init__(self, folder):
        self.folder = folder
        self.processed = True  # --logprobs-mode processed_logprobs
        self.processed_temperature = True
        self.configured = True  # for weights: --weight-transfer-config
        self.sleeps = False  # --enable-sleep-mode, --enable-memory-saver
        self.bans = True  # it applies logit biases
        self.switch_after: int | None = None  # tokens, then a request waits for new weights
        self.experts: np.ndarray | None = None
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
        self.asleep: set[str] = set()
        self.adapters: dict[str, Any] = {}
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
            return self.route(path, body)

    def unlocked(self):
        """Let other requests in for a moment."""
        if self.http is None:  # it was killed
            raise Refused(500, "killed")
        self.lock.release()
        time.sleep(0.005)
        self.lock.acquire()

    def load_adapter(self, body):
        if body["lora_name"] in self.adapters:
            raise Refused(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
        config = json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())
        if config["target_parameters"]:
            raise Refused(500, "unsupported target_parameters")
        weights = load_file(self.folder / "model.safetensors")
        delta = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
        for name in [name for name in delta if name.endswith("lora_A.weight")]:
            b = delta[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace("lora_A.", "")
            weights[target] += config["lora_alpha"] / config["r"] * b @ delta[name]
        self.adapters[body["lora_name"]] = self.model_with(weights)

    def unload_adapter(self, body):
        if self.adapters.pop(body["lora_name"], None) is None:
            raise Refused(404, f"The lora adapter '{body['lora_name']}' cannot be found.")

    def model_with(self, weights):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(self.folder / "config.json", folder)
            save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})
            return language_model(Path(folder))

    def expanded(self, ids, items):
        assert ids.count(self.media_token if self.media_token is not None else -1) == items
        return [
            i for one in ids for i in [one] * (self.media_tokens if one == self.media_token else 1)
        ]

    def write(self, ids, parameters, engine=None):
        """Tokens, log-probs, finish reason and the version of each token."""
        bias = {int(token): value for token, value in (parameters["logit_bias"] or {}).items()}
        if certain := [token for token, value in bias.items() if value > 0]:
            hot = parameters["temperature"] > 50 and self.processed_temperature
            return certain, [(-4.0 if hot else 0.0) if self.processed else -5.0], "length", ["-"]
        tokens: list[int] = []
        log_probs: list[float] = []
        versions: list[str] = []
        reason = "length"
        while reason == "length" and len(tokens) < parameters["max_tokens"]:
            while self.paused:
                self.unlocked()
            version = self.version
            wanted = parameters["max_tokens"] - len(tokens)
            if self.switch_after is not None and not tokens:
                wanted = self.switch_after
            prompt = PackedBatch.from_sequences([torch.tensor(ids + tokens)])
            stop, seed = tuple(parameters["stop_token_ids"]), parameters["seed"] + len(tokens)
            decoding = Decoding(
                max_new_tokens=wanted, stop=stop, temperature=parameters["temperature"], seed=seed
            )
            (found,) = complete(engine or self.engine, prompt, decoding)
            while self.bans and set(found.tokens) & set(bias):
                decoding = replace(decoding, seed=decoding.seed + 1000)
                (found,) = complete(engine or self.engine, prompt, decoding)
            tokens += found.tokens
            log_probs += found.log_probs
            versions += [version] * len(found.tokens)
            reason = "stop" if found.is_finished else "length"
            while self.switch_after is not None and self.version == version:
                self.unlocked()
            self.switch_after = None
        return tokens, log_probs, reason, versions


def spans(versions):
    """As servers write them: {"version", "start", "end"} of each run of tokens."""
    found: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if not found or found[-1]["version"] != version:
            found.append({"version": version, "start": at, "end": at})
        found[-1]["end"] = at + 1
    return found


class FakeVLLM(FakeServer):
    def route(self, path, body):
        match path:
            case "/v1/models":
                return {"data": [{"id": "tiny"}, *({"id": name} for name in self.adapters)]}
            case "/weight_info":
                return {"weight_version": self.version}
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/is_paused":
                return {"is_paused": self.paused}
            case "/server_info":
                return {"vllm_config": {"model_config": {"enable_sleep_mode": self.sleeps}}}
            case "/sleep":
                self.paused = True
                self.asleep = {"weights", "kv_cache"}
            case "/wake_up":
                self.asleep -= {self.requests[-1][0].partition("?tags=")[2]}
                self.paused = self.paused and bool(self.asleep)
            case "/pause":
                self.paused = True
            case "/resume":
                self.paused = False
            case "/v1/load_lora_adapter":
                self.load_adapter(body)
            case "/v1/unload_lora_adapter":
                self.unload_adapter(body)
            case "/inference/v1/generate":
                return self.generate(body)
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
                assert "weights" not in self.asleep
                self.updating = True
                self.received = {}
            case "/update_weights":
                assert self.updating
                self.received |= load_file(body["update_info"]["path"])
            case "/finish_weight_update":
                self.updating = False
                if self.received:
                    self.engine = self.model_with(self.received)
                self.version = body.get("weight_version", self.version)
            case _:
                raise Refused(404, "Not Found")

    def generate(self, body):
        assert not self.asleep
        parameters = body["sampling_params"]
        assert (parameters["top_p"], parameters["top_k"], parameters["min_p"]) == (1.0, 0, 0.0)
        assert parameters["temperature"] <= 2  # as vLLM
        ids = self.expanded(body["token_ids"], len(body.get("content_parts", [])))
        name = body.get("model")
        if name is not None and name not in self.adapters:
            raise Refused(404, f"The model `{name}` does not exist.")
        tokens, log_probs, reason, versions = self.write(ids, parameters, self.adapters.get(name))
        content = [{"token_id": t, "logprob": p} for t, p in zip(tokens, log_probs, strict=True)]
        choice = {
            "index": 0,
            "token_ids": tokens,
            "logprobs": {"content": content},
            "finish_reason": reason,
            "weight_versions": spans(versions),
        }
        if self.experts is not None:
            file = io.BytesIO()
            np.save(file, self.experts)
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return {"prompt_token_ids": ids, "choices": [choice]}


class FakeSGLang(FakeServer):
    """`has_spans`: newer versions say which weights wrote which token."""

    has_spans = True

    def route(self, path, body):
        match path:
            case "/get_model_info":
                return {"weight_version": self.version}
            case "/get_server_info":
                return {"enable_memory_saver": self.sleeps}
            case "/pause_generation":
                assert body == {"mode": "retract"}
                self.paused = True
            case "/continue_generation":
                assert body == {}
                self.paused = False
            case "/update_weight_version":
                assert body["abort_all_requests"] is False
                self.version = body["new_version"]
            case "/update_weights_from_disk":
                return self.update(body)
            case "/release_memory_occupation":
                self.asleep = set(body["tags"])
                return None
            case "/resume_memory_occupation":
                self.asleep -= set(body["tags"])
                return None
            case "/load_lora_adapter":
                self.load_adapter(body)
            case "/unload_lora_adapter":
                self.unload_adapter(body)
            case "/generate":
                return self.generate(body)
            case _:
                raise Refused(404, "Not Found")
        return {}

    def update(self, body):
        assert self.paused
        assert body["flush_cache"]
        assert "weights" not in self.asleep
        if not self.configured:
            raise Refused(400, "Failed to update weights: no such file")
        weights = {}
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            weights |= load_file(file)
        self.engine = self.model_with(weights)
        self.version = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights."}

    def generate(self, body):
        assert not self.asleep
        assert body["return_logprob"]
        parameters = body["sampling_params"]
        assert (parameters["top_p"], parameters["top_k"], parameters["min_p"]) == (1.0, -1, 0.0)
        names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
        parameters |= {name: parameters[theirs] for name, theirs in names.items()}
        ids = self.expanded(body["input_ids"], len(body.get("image_data", [])))
        name = body.get("lora_path")
        if name is not None and name not in self.adapters:
            raise Refused(
                400, f"The following requested LoRA adapters are not loaded: {{'{name}'}}"
            )
        tokens, log_probs, reason, versions = self.write(ids, parameters, self.adapters.get(name))
        meta = {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[p, t, None] for p, t in zip(log_probs, tokens, strict=True)],
            "weight_version": self.version,
        }
        if self.has_spans:
            meta["weight_versions"] = spans(versions)
        return {"output_ids": tokens, "prompt_token_ids": ids, "meta_info": meta}
