"""Rollouts by any OpenAI-compatible server that takes prompts as token ids and returns token ids with log-probs.

The API has no way to send weights: the server's model is fixed, so its samples keep version 0. It has none for media
with token ids either. Both are in `vllm_rollout.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mvp_engine.errors import UserError
from mvp_engine.rl.rollout import Buckets, Sample, Sampling
from mvp_engine.rl.server import Server, ServerRefused
from mvp_engine.rl.server_rollout import BAN, PROBE, ServerRollout, request_seed

if TYPE_CHECKING:
    from mvp_engine.rl.prompts import Prompt

FIXED_VERSION = 0
AS_TOKEN = "token_id:"  # how vLLM and SGLang write a token id in place of its text


class OpenAIRollout(ServerRollout):
    """A `Rollout` of servers with `/v1/completions`, whose weights nobody changes."""

    health = "/v1/models"

    def __init__(self, urls: list[str], *, model: str | None = None, **options: Any) -> None:
        """`model`: its name at the server; None: the first that the server lists."""
        super().__init__(urls, **options)
        self.model = model
        self._models: dict[Server, str] = {}

    def sync(self, weights: Buckets | None, version: int) -> None:
        """Nothing is sent: `weights` are not even read. The gap gate measures how far the trainer has moved."""
        self.ready()

    def close(self) -> None:
        pass

    def prepare(self, server: Server) -> None:
        if self.model is not None or server in self._models:
            return
        try:
            self._models[server] = server.get("/v1/models")["data"][0]["id"]
        except (ServerRefused, LookupError, TypeError) as error:
            raise UserError(
                f"rollout.urls: {server.url} lists no model at /v1/models ({error}): it is no OpenAI-compatible server"
            ) from None

    def complete(self, server: Server, index: int, prompt: Prompt, how: Sampling) -> list[Sample]:
        if prompt.media:
            raise UserError(
                f"{prompt.where}: rollout.backend=openai takes no media with token ids: set rollout.backend=vllm or "
                "packed"
            )
        answer = self._completions(
            server,
            prompt,
            max_tokens=how.max_new_tokens,
            temperature=how.temperature,
            n=how.samples,
            seed=request_seed(how.seed, prompt),
            logit_bias={str(token): BAN for token in self.banned} or None,
            stop_token_ids=list(how.stop),  # vLLM, SGLang; others write past it, which is cut off
            ignore_eos=True,
        )
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != how.samples:
            raise UserError(
                f"rollout.urls: {server.url} returned {len(choices)} of {how.samples} completions"
            )
        samples = []
        for choice in choices:
            self.check_prompt(server, prompt, choice.get("prompt_token_ids"))
            tokens = token_ids(server, choice)
            log_probs = token_log_probs(server, choice)
            reason = choice.get("finish_reason")
            samples.append(
                self.sample(server, index, tokens, log_probs, reason, FIXED_VERSION, how)
            )
        return samples

    def biased_log_prob(self, server: Server, prompt: Prompt, token: int) -> float:
        bias = {str(token): PROBE}
        answer = self._completions(server, prompt, max_tokens=1, temperature=1.0, logit_bias=bias)
        return token_log_probs(server, answer["choices"][0])[0]

    def _completions(self, server: Server, prompt: Prompt, **parameters: Any) -> Any:
        body = {
            "model": self.model or self._models[server],
            "prompt": prompt.text_ids,
            "logprobs": 1,
            "top_p": 1.0,
            "return_token_ids": True,  # vLLM
            "return_tokens_as_token_ids": True,  # vLLM, SGLang
            **{name: value for name, value in parameters.items() if value is not None},
        }
        try:
            return server.post("/v1/completions", body)
        except ServerRefused as error:
            raise UserError(f"rollout.urls: {error}") from None


def token_ids(server: Server, choice: dict[str, Any]) -> list[int]:
    """The tokens of a completion as ids, in one of the forms that servers have for them."""
    if choice.get("token_ids") is not None:  # vLLM
        return list(choice["token_ids"])
    log_probs = choice.get("logprobs") or {}
    tokens = log_probs.get("tokens") or []
    if tokens and all(str(token).startswith(AS_TOKEN) for token in tokens):
        return [int(token.removeprefix(AS_TOKEN)) for token in tokens]
    content = log_probs.get("content") or []  # llama.cpp
    if content and all("id" in one for one in content):
        return [int(one["id"]) for one in content]
    raise UserError(
        f"rollout.urls: {server.url} returns no token ids, only text, and a text that is tokenized again may give "
        "other tokens than those that were sampled: use a server that has return_token_ids (vLLM), "
        "return_tokens_as_token_ids (vLLM, SGLang) or ids in logprobs.content (llama.cpp)"
    )


def token_log_probs(server: Server, choice: dict[str, Any]) -> list[float]:
    """The log-probs of the tokens of a completion."""
    log_probs = choice.get("logprobs") or {}
    if log_probs.get("token_logprobs") is not None:
        return list(log_probs["token_logprobs"])
    if log_probs.get("content") is not None:
        return [one["logprob"] for one in log_probs["content"]]
    raise UserError(
        f"rollout.urls: {server.url} returns no log-probs of the sampled tokens: use a server that has logprobs in "
        "/v1/completions"
    )
