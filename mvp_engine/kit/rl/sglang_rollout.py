"""Rollouts by SGLang servers, through the native HTTP API of SGLang. Weights are sent as files, or as adapters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvp_engine.errors import UserError
from mvp_engine.kit.rl.rollout import Sampling
from mvp_engine.kit.rl.server_rollout import (
    AdapterFiles,
    Bias,
    Completed,
    Files,
    Server,
    ServerGone,
    ServerRefused,
    ServerRollout,
    data_url,
)

if TYPE_CHECKING:
    from mvp_engine.kit.rl.prompts import Prompt


class SGLangRollout(ServerRollout):
    """A `Rollout` of SGLang servers. `folder`: where `sync` writes weights; the servers must see the same files."""

    hottest = 100.0  # SGLANG_RETURN_ORIGINAL_LOGPROB leaves out the temperature alone

    def __init__(self, urls: list[str], sync: str, folder: str | Path, **options: Any) -> None:
        if sync not in ("file", "adapter"):
            raise UserError(
                f"generation.sync={sync}: SGLang servers get weights by file or adapter"
            )
        super().__init__(
            urls, AdapterFiles(folder) if sync == "adapter" else Files(folder), **options
        )
        self._resting: set[Server] = set()

    def complete(
        self, server: Server, prompt: Prompt, how: Sampling, *, label: str, seed: int, bias: Bias
    ) -> Completed:
        body: dict[str, Any] = {
            "input_ids": prompt.text_ids,
            "return_logprob": True,
            "return_prompt_token_ids": True,  # with expanded media
            "sampling_params": {
                **self.sampling_params(how, bias),
                "max_new_tokens": how.max_new_tokens,
                "sampling_seed": seed,  # of servers with --enable-deterministic-inference
                "top_k": -1,
                "skip_special_tokens": False,
            },
        }
        for item in prompt.media:
            body.setdefault(f"{item['type']}_data", []).append(data_url(item, prompt.where))
        if self.transfer.is_adapter:
            body["lora_path"] = label
        answer = server.post("/generate", body)
        meta = answer["meta_info"]
        written = meta["output_token_logprobs"]  # log-prob, token, text
        if prompt.media and answer.get("prompt_token_ids") is None:
            raise UserError(
                f"generation.urls: {server.url} does not return the prompt with expanded media, which must be the "
                "trainer's: use a version of SGLang that has return_prompt_token_ids in /generate"
            )
        return Completed(
            [token for _, token, *_ in written],
            [log_prob for log_prob, *_ in written],
            meta["finish_reason"]["type"],
            self._spans(server, meta, label, len(written)),
            answer.get("prompt_token_ids"),
        )

    def _spans(
        self, server: Server, meta: dict[str, Any], label: str, length: int
    ) -> list[dict[str, Any]]:
        whole = [{"version": label, "start": 0, "end": length}]
        if self.transfer.is_adapter:
            return whole
        if "weight_versions" in meta:
            spans: list[dict[str, Any]] = meta["weight_versions"]
            return spans
        # Older versions name only the weights at the end: a request that ran in an update is generated again.
        if meta["weight_version"] != label:
            raise ServerGone(
                f"{server.url} ended a request with other weights ({meta['weight_version']}) than it began ({label})"
            )
        return whole

    def server_version(self, server: Server) -> str:
        if self.transfer.is_adapter:
            return ""  # one that is loaded already is refused, which is no error
        version: str = server.get("/get_model_info")["weight_version"]
        return version

    def send(self, server: Server, server_version: str) -> None:
        if server in self._resting:
            server.post("/resume_memory_occupation", {"tags": ["weights"]})
        if self.transfer.is_adapter:
            self.send_adapter(server)
        else:
            self._update(server)
        if server in self._resting:
            server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        self._resting.discard(server)

    def _update(self, server: Server) -> None:
        # Requests that run are computed again from their tokens, with the new weights.
        server.post("/pause_generation", {"mode": "retract"})
        # If this trainer is killed in the update, half of the new weights must not have the old version.
        incomplete = {"new_version": f"{self.name}-incomplete", "abort_all_requests": False}
        server.post("/update_weight_version", incomplete)
        body = {"model_path": str(self.transfer.current), "weight_version": self.label}
        answer = server.post("/update_weights_from_disk", {**body, "flush_cache": True})
        if not answer["success"]:
            raise ServerRefused(
                f"{server.url}/update_weights_from_disk: {answer.get('message')}", 500
            )
        server.post("/continue_generation", {})

    def rest(self, server: Server) -> None:
        if server.get("/get_server_info").get("enable_memory_saver"):
            server.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
            self._resting.add(server)

    def refused(self, error: ServerRefused) -> UserError:
        more = (
            " --enable-lora --max-lora-rank RANK --lora-target-modules all"
            if self.transfer.is_adapter
            else ""
        )
        start = f"python -m sglang.launch_server --model-path MODEL{more}"
        return UserError(f"generation.urls: {error}. Start the server as: {start}")
