"""Completions of requests that come at any time: each joins the running batch, and leaves it when it is finished.

A thread runs the forwards. New prompts get a forward of their own, which fills their part of the KV cache; then every
forward has one token of each running completion, whatever the sampling settings of its request. What a completion
writes depends on its request alone, by the hashed noise of `decoding.py`, but for rounding in the forward.

Legend: S sequences, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.model.kv_cache import KVCache
from mvp_engine.kit.decoding import (
    decoding_mode,
    most_likely,
    newest_tokens,
    sample_tokens,
    sequence_keys,
    with_completion,
)
from mvp_engine.model_engine import ModelEngine

LOGGER = logging.getLogger("mvp_engine")
ROOM = 256  # tokens by which a cache grows


class Closed(Exception):
    """The decoder takes no more requests."""


@dataclass(frozen=True)
class Written:
    """A token of a completion."""

    request: Request
    index: int  # of the completion in its request
    token: int
    log_prob: float  # of the model, at temperature 1
    top: list[tuple[int, float]]  # the most likely tokens with theirs, if the request asks for them
    reason: str | None  # "stop" or "length" with the last token


@dataclass(eq=False)
class Request:
    """A prompt to complete. Tokens arrive in `events`; an exception there is the last event."""

    prompt: PackedBatch  # one sequence on the CPU
    max_new_tokens: int
    stop: Collection[int] = ()
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    samples: int = 1
    seed: int = 0
    top_log_probs: int = 0
    is_finished: Callable[[list[int]], bool] | None = None  # asked after each token
    events: SimpleQueue[Written | BaseException] = field(default_factory=SimpleQueue)
    is_cancelled: bool = False


@dataclass(eq=False)
class _Row:
    """A completion in the batch."""

    request: Request
    index: int
    key: int
    last_position: int  # of the prompt
    tokens: list[int] = field(default_factory=list)
    is_done: bool = False


class BatchedDecoder:
    """Completes requests on one model engine, up to `max_rows` completions in a forward."""

    def __init__(self, engine: ModelEngine, max_rows: int = 64, budget: int = 16384) -> None:
        """`budget`: tokens of one forward over prompts, unless a single one has more."""
        self.engine = engine
        self.max_rows = max_rows
        self.budget = budget
        self.largest_batch = 0  # completions in one forward so far
        self._model: Any = engine.model
        self._never_written = torch.tensor(
            self._model.placeholders, dtype=torch.long, device=engine.world.device
        )
        self._waiting: deque[Request] = deque()
        self._rows: list[_Row] = []
        self._cache: KVCache | None = None
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="mvp-decoder", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        with self._wake:
            if self._is_closed:
                raise Closed("the server is shutting down")
            self._waiting.append(request)
            self._wake.notify()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread after its forward; requests that it has not answered get an error."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join()

    # ---- The thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with decoding_mode(self.engine):
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._waiting or self._rows or self._is_closed)
                    if self._is_closed:
                        break
                    new = self._admitted()
                self._admit(new)
                if self._rows:
                    self._guarded_step()
        running = [row.request for row in self._rows if not row.is_done]
        self._fail([*running, *self._waiting], Closed("the server is shutting down"))

    def _admitted(self) -> list[Request]:
        """The next requests that fit: into the batch, and into one forward over prompts."""
        room = self.max_rows - sum(not row.is_done for row in self._rows)
        new: list[Request] = []
        tokens = 0
        while self._waiting:
            first = self._waiting[0]
            tokens += first.prompt.num_tokens
            is_full = (new or self._rows) and first.samples > room
            if is_full or (new and tokens > self.budget):
                break
            self._waiting.popleft()
            if not first.is_cancelled:
                new.append(first)
                room -= first.samples
        return new

    def _admit(self, new: list[Request]) -> None:
        """The forward over new prompts; where it fails, each prompt is tried alone."""
        if not new:
            return
        try:
            self._prefill(new)
        except Exception as error:
            if len(new) > 1:
                for request in new:
                    self._admit([request])
                return
            LOGGER.exception("a prompt of %d tokens failed", new[0].prompt.num_tokens)
            self._fail(new, error)

    def _guarded_step(self) -> None:
        rows = self._rows
        try:
            self._step()
        except Exception as error:
            LOGGER.exception("a forward of %d completions failed", len(rows))
            self._rows = []
            self._cache = None
            self._fail([row.request for row in rows if not row.is_done], error)

    def _fail(self, requests: list[Request], error: BaseException) -> None:
        for request in dict.fromkeys(requests):
            request.is_cancelled = True
            request.events.put(error)

    def _prefill(self, new: list[Request]) -> None:
        prompts = [request.prompt.without_targets() for request in new]
        batch = PackedBatch.concat(prompts)
        cache = KVCache(batch.lengths.tolist(), ROOM) if self._model.can_cache else None
        logits_PV = self._forward(batch, cache)
        rows = []
        of_row = []
        for place, request in enumerate(new):
            keys = sequence_keys(request.seed, [0], request.samples)
            last = int(request.prompt.position_ids.max())
            rows += [_Row(request, index, key, last) for index, key in enumerate(keys)]
            of_row += [place] * request.samples
        self._write(rows, logits_PV[of_row])
        kept = [place for place, row in enumerate(rows) if not row.is_done]
        if not kept:
            return
        if cache is not None:
            cache.select([of_row[place] for place in kept])
            self._compact(always=True)
            if self._cache is None:
                self._cache = cache
            else:
                self._cache.join(cache)
        self._rows += [rows[place] for place in kept]

    def _step(self) -> None:
        """One more token of each running completion."""
        rows = self._rows
        self.largest_batch = max(self.largest_batch, len(rows))
        prompts = [row.request.prompt for row in rows]
        if self._cache is not None:
            if self._cache.max_length + 1 >= self._cache.capacity:
                self._cache.reserve(self._cache.capacity + max(ROOM, self._cache.capacity // 4))
            ids_S = torch.tensor([row.tokens[-1] for row in rows])
            positions_S = torch.tensor([row.last_position + len(row.tokens) for row in rows])
            token_type = self._model.completion_token_type
            batch = newest_tokens(prompts[0], ids_S, positions_S, token_type)
        else:
            token_type = self._model.completion_token_type
            pairs = zip(prompts, rows, strict=True)
            batch = PackedBatch.concat(
                [with_completion(prompt, None, row.tokens, token_type) for prompt, row in pairs]
            )
        self._write(rows, self._forward(batch, self._cache))
        self._compact(always=bool(self._waiting))

    def _compact(self, always: bool) -> None:
        """Take out what is finished: where half of the batch is, since a cache is copied."""
        unfinished = [place for place, row in enumerate(self._rows) if not row.is_done]
        is_worth_it = always or self._cache is None or len(unfinished) <= len(self._rows) // 2
        if len(unfinished) == len(self._rows) or not is_worth_it:
            return
        self._rows = [self._rows[place] for place in unfinished]
        if not self._rows:
            self._cache = None
        elif self._cache is not None:
            self._cache.select(unfinished)

    def _forward(self, batch: PackedBatch, cache: KVCache | None) -> Tensor:
        """Logits of the next token of each sequence."""

        def logits(micro_batch: PackedBatch) -> Tensor:
            found: Tensor = self._model(micro_batch, ["next_logits"], kv_cache=cache)["next_logits"]
            return found

        (found,) = self.engine.infer_micro_batches([batch], logits)
        logits_SV: Tensor = found
        return logits_SV

    # ---- The next tokens ------------------------------------------------------------------------------------------

    def _write(self, rows: list[_Row], logits_SV: Tensor) -> None:
        logits_SV = logits_SV.index_fill(1, self._never_written, float("-inf"))
        log_probs_SV = logits_SV.log_softmax(-1)
        tokens_S = self._choose(rows, logits_SV)
        chosen_S = log_probs_SV.gather(-1, tokens_S[:, None])[:, 0]
        top = max(0 if row.is_done else row.request.top_log_probs for row in rows)
        most_S: list[list[tuple[int, float]]] = [[] for _ in rows]
        if top:
            values_SK, ids_SK = log_probs_SV.topk(top)
            ids_and_values = zip(ids_SK.tolist(), values_SK.tolist(), strict=True)
            most_S = [list(zip(*pair, strict=True)) for pair in ids_and_values]
        numbers = zip(rows, tokens_S.tolist(), chosen_S.tolist(), most_S, strict=True)
        for row, token, log_prob, most in numbers:
            request = row.request
            if row.is_done:
                continue
            if request.is_cancelled:
                row.is_done = True
                continue
            row.tokens.append(token)
            reason = None
            is_stopped = request.is_finished is not None and request.is_finished(row.tokens)
            if token in request.stop or is_stopped:
                reason = "stop"
            elif len(row.tokens) >= request.max_new_tokens:
                reason = "length"
            row.is_done = reason is not None
            shown = most[: request.top_log_probs]
            request.events.put(Written(request, row.index, token, log_prob, shown, reason))

    def _choose(self, rows: list[_Row], logits_SV: Tensor) -> Tensor:
        requests = [row.request for row in rows]
        tokens_S = logits_SV.argmax(-1)
        sampled = [place for place, one in enumerate(requests) if one.temperature > 0]
        if not sampled:
            return tokens_S

        def values(of: Callable[[Request], float], dtype: torch.dtype) -> Tensor:
            numbers = [of(requests[place]) for place in sampled]
            return torch.tensor(numbers, dtype=dtype, device=logits_SV.device)[:, None]

        scaled_RV = logits_SV[sampled] / values(lambda one: one.temperature, torch.float32)
        if any(requests[place].top_k or requests[place].top_p < 1 for place in sampled):
            size = logits_SV.shape[1]
            top_k_R1 = values(lambda one: one.top_k or size, torch.long)
            # A probability of 1 keeps all tokens, whatever their sum is rounded to.
            top_p_R1 = values(lambda one: one.top_p if one.top_p < 1 else 2.0, torch.float32)
            scaled_RV = most_likely(scaled_RV, top_k_R1, top_p_R1)
        keys_R = torch.tensor([rows[place].key for place in sampled], device=logits_SV.device)
        written_R = [len(rows[place].tokens) for place in sampled]
        positions_R = torch.tensor(written_R, device=logits_SV.device)
        tokens_S[sampled] = sample_tokens(scaled_RV, keys_R, positions_R)
        return tokens_S
