"""Rollouts by vLLM servers in an environment of their own, over HTTP; weights by vLLM's weight-transfer API.

Every server says with each completion which weights wrote it. One that was restarted, or that another trainer sent
weights to, is noticed by that: it gets our weights again, and the completion is generated again.
"""

from __future__ import annotations

import base64
import mimetypes
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvp_engine.errors import UserError
from mvp_engine.kit.rl.rollout import Buckets, Sample, Sampling
from mvp_engine.kit.rl.server import Server, ServerGone, ServerRefused
from mvp_engine.kit.rl.server_rollout import BAN, LOGGER, PROBE, ServerRollout, request_seed
from mvp_engine.kit.rl.weight_transfer import Transfer, transfer_of

if TYPE_CHECKING:
    from mvp_engine.kit.rl.prompts import Prompt

GENERATE = "/inference/v1/generate"
MEDIA_TYPES = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs "
    '--weight-transfer-config \'{"backend": "%s"}\''
)


class VLLMRollout(ServerRollout):
    """A `Rollout` of vLLM servers. `folder`: where sync=file writes weights; the servers must see the same files."""

    def __init__(
        self, urls: list[str], *, sync: str = "file", folder: str | Path, **options: Any
    ) -> None:
        super().__init__(urls, **options)
        self.transfer: Transfer = transfer_of(sync, folder)
        # Versions of two trainers, or of a run and its resumed self, must differ: the number alone would not.
        self.name = f"mvp-{uuid.uuid4().hex[:12]}"
        self.version: int | None = None
        self._joined: set[Server] = set()

    @property
    def label(self) -> str:
        """The version as servers know it."""
        return f"{self.name}-{self.version}"

    def sync(self, weights: Buckets | None, version: int) -> None:
        """Send weights to all servers. One that is gone gets them when it is back."""
        if weights is None:
            raise ValueError("a vLLM server has no weights of the trainer: sync needs them")
        self.transfer.keep(weights, version)
        self.version = version
        self.ready()

    def prepare(self, server: Server) -> None:
        """Send the current weights, unless the server has them."""
        if self.version is None:
            raise RuntimeError(
                "sync comes before generate: the servers have no weights of this run"
            )
        try:
            found = server.get("/weight_info")["weight_version"]
            if found != self.label:
                self._send(server, found)
        except ServerRefused as error:
            raise self._refused(server, error) from None

    def close(self) -> None:
        self.transfer.close()

    def complete(self, server: Server, index: int, prompt: Prompt, how: Sampling) -> list[Sample]:
        parameters = {
            "temperature": how.temperature,
            "max_tokens": how.max_new_tokens,
            "n": how.samples,
            "seed": request_seed(how.seed, prompt),
            "stop_token_ids": list(how.stop),
            "ignore_eos": True,  # what ends a completion is `stop` alone
            "logit_bias": {str(token): BAN for token in self.banned} or None,
        }
        answer = self._generate(server, prompt, parameters)
        self.check_prompt(server, prompt, answer.get("prompt_token_ids"))
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != how.samples:
            raise UserError(
                f"rollout.urls: {server.url} returned {len(choices)} of {how.samples} completions"
            )
        return [self._sample(server, index, choice, how) for choice in choices]

    def biased_log_prob(self, server: Server, prompt: Prompt, token: int) -> float:
        parameters = {"temperature": 1.0, "max_tokens": 1, "logit_bias": {str(token): PROBE}}
        answer = self._generate(server, prompt, parameters)
        return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])

    def _generate(self, server: Server, prompt: Prompt, parameters: dict[str, Any]) -> Any:
        # A server's own defaults, such as top_k of the model's generation config, must not apply.
        fixed = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 0, "detokenize": False}
        body = {
            "token_ids": prompt.text_ids,
            "sampling_params": {**fixed, **parameters},
            "return_token_ids": True,  # the prompt with expanded media
        }
        if prompt.media:
            body["content_parts"] = [_content_part(item, prompt.where) for item in prompt.media]
        try:
            return server.post(GENERATE, body)
        except ServerRefused as error:
            raise self._refused(server, error) from None

    def _sample(self, server: Server, index: int, choice: Any, how: Sampling) -> Sample:
        versions = {span["version"] for span in choice.get("weight_versions") or []}
        if versions != {self.label}:
            raise ServerGone(
                f"{server.url} generated with other weights ({', '.join(sorted(versions))}), not with {self.label}"
            )
        content = (choice.get("logprobs") or {}).get("content") or []
        assert self.version is not None
        return self.sample(
            server,
            index,
            choice["token_ids"],
            [one["logprob"] for one in content],
            choice["finish_reason"],
            self.version,
            how,
        )

    def _send(self, server: Server, found: str) -> None:
        if server in self._joined and not found.startswith(self.name):
            LOGGER.warning(
                "rollout server %s has other weights (version %s): it was restarted, or another trainer uses it. "
                "Version %s is sent again",
                server.url,
                found,
                self.version,
            )
            self._joined.discard(server)
        if server not in self._joined:
            self.transfer.join(server)
        # A trainer that is killed in the update must not leave half of the weights under the old version.
        # One that a killed trainer left paused would never finish the requests that wait in it.
        is_paused = server.get("/is_paused")["is_paused"]
        server.post(f"/pause?mode={'abort' if is_paused else 'wait'}")
        server.post("/update_weight_version", {"new_version": f"{self.name}-incomplete"})
        try:
            self._start_update(server)
            self.transfer.send(server)
            server.post("/finish_weight_update", {"weight_version": self.label})
        except BaseException:
            self._joined.discard(server)
            raise
        server.post("/resume")
        self._joined.add(server)

    def _start_update(self, server: Server) -> None:
        try:
            server.post("/start_weight_update")
        except ServerRefused:  # an update is active: its trainer was killed
            server.post("/finish_weight_update")
            server.post("/start_weight_update")

    def _refused(self, server: Server, error: ServerRefused) -> UserError:
        start = START % self.transfer.backend
        hint = f" {self.transfer.hint}" if self.transfer.hint else ""
        fix = "" if error.status == 400 else f". Start the server as: {start}{hint}"
        return UserError(f"rollout.urls: {error}{fix}")


def _content_part(item: dict[str, Any], where: str) -> dict[str, str]:
    kind = item["type"]
    media_type: str | None = MEDIA_TYPES.get(kind)
    if "path" in item:
        data = Path(item["path"]).read_bytes()
        media_type = mimetypes.guess_type(item["path"])[0] or media_type
    elif "bytes" in item:
        data = item["bytes"]
    else:
        data = None
    if data is None or media_type is None:
        raise UserError(
            f"{where}: rollout.backend=vllm sends media as files, and this {kind} is none: set rollout.backend=packed"
        )
    encoded = base64.b64encode(data).decode()
    return {"type": f"{kind}_url", "url": f"data:{media_type};base64,{encoded}"}
