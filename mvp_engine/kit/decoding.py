"""Completions of packed prompts with a KV cache, through the model engine: on any layout, any number of prompts.

A forward over the prompts fills the cache; each later forward has one token per unfinished sequence, without padding.
With `parallel.ulysses` > 1, with `parallel.context` > 1 and for a few mixers (RWKV, xLSTM, RecurrentGemma) there is no
cache: each forward then holds all prompts and their completions so far.
Every sequence draws by noise that is a hash, so what it writes depends neither on how prompts are
batched nor on the layout.

Gumbel noise from a hash instead of a random generator, to sample tokens: argmax(logits + noise).

The noise of a vocabulary entry depends on the seed, the key of the prompt, the index of the sample, the position in the
completion and the entry's index, on nothing else. So the same tokens are drawn on every layout, number of ranks and
batching, on a CPU and on a GPU, and no generator state has to be saved.

Legend: S sequences, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf.experts.fp8_layers import quantized_once
from mvp_engine.hf.experts.router_replay import RouterReplay, add_routes
from mvp_engine.hf.model.kv_cache import KVCache
from mvp_engine.model_engine import ModelEngine

GOLDEN = 0x9E3779B97F4A7C15  # steps of a counter: 2**64 over the golden ratio, odd
# (shift, factor) of each round of the hash, and the last shift: splitmix64.
HASH_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
MASK = 2**64 - 1
BLOCK = 2**22  # logits that get their noise at a time: 32 MiB for each temporary


def sequence_keys(seed: int, prompt_keys: Sequence[int], samples: int) -> list[int]:
    """An int64 per sequence, the samples of a prompt next to each other; they differ in seed, prompt or sample."""
    keys = []
    for prompt_key in prompt_keys:
        of_prompt = _hash_int(_hash_int(seed) + prompt_key)
        keys += [_signed(_hash_int(of_prompt + sample)) for sample in range(samples)]
    return keys


def sample_tokens(logits_SV: Tensor, keys_S: Tensor, position: int | Tensor) -> Tensor:
    """The next token of each sequence, drawn from its float32 logits, where each has written `position` tokens.

    In a CUDA graph `position` is an int64 scalar on the device.
    """
    of_position_S = _keys_of_position(keys_S, position)
    if logits_SV.is_cuda:
        from mvp_engine.ops import triton_kernels

        return triton_kernels.sample_tokens(logits_SV, of_position_S)
    rows = max(1, BLOCK // logits_SV.shape[1])
    chosen = []
    for logits_RV, keys_R in zip(logits_SV.split(rows), of_position_S.split(rows), strict=True):
        chosen.append(_noise(keys_R, logits_SV.shape[1]).add_(logits_RV).argmax(-1))
    return torch.cat(chosen)


def gumbel_noise(keys_S: Tensor, position: int, vocab_size: int) -> Tensor:
    """The noise that `sample_tokens` adds to logits, (S, V) float32."""
    return _noise(_keys_of_position(keys_S, position), vocab_size)


def _keys_of_position(keys_S: Tensor, position: int | Tensor) -> Tensor:
    if isinstance(position, Tensor):
        return _hash_(keys_S + (position + 1) * _signed(GOLDEN))
    return _hash_(keys_S + _signed(GOLDEN * (position + 1) & MASK))


def _noise(keys_S: Tensor, vocab_size: int) -> Tensor:
    """Noise from the keys of one position.

    Logarithms are those of float64: float32 ones differ in their last bit between devices, and between the vectorized
    part of a tensor and its remainder.
    """
    counter_V = torch.arange(1, vocab_size + 1, device=keys_S.device) * _signed(GOLDEN)
    bits_SV = _hash_(keys_S[:, None] + counter_V)
    # 52 bits, in the middle of their interval: neither 0 nor 1, which have no finite noise.
    uniform_SV = _logical_shift_right(bits_SV, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform_SV.log_().neg_().log_().neg_().float()


def _hash_(x: Tensor) -> Tensor:
    """Hash int64 numbers in place, as `_hash_int` does; products wrap around."""
    for shift, factor in HASH_ROUNDS:
        x.bitwise_xor_(_logical_shift_right(x, shift))
        x.mul_(_signed(factor))
    return x.bitwise_xor_(_logical_shift_right(x, LAST_SHIFT))


def _hash_int(x: int) -> int:
    x = (x + GOLDEN) & MASK
    for shift, factor in HASH_ROUNDS:
        x = (x ^ (x >> shift)) * factor & MASK
    return x ^ (x >> LAST_SHIFT)


def _logical_shift_right(x: Tensor, shift: int) -> Tensor:
    """Shift zeros in from the left; torch's own shift of int64 repeats the sign bit."""
    return (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


Finished = Callable[[list[int]], bool]
REPLAYS = 8  # of a CUDA graph between two host syncs; a finished batch runs at most as many in vain
_STANCES: list[Any] = []  # of torch.compile, set by the threads that generate
_STANCES_LOCK = threading.Lock()


@dataclass(frozen=True)
class Decoding:
    """How completions are written."""

    max_new_tokens: int
    stop: Collection[int] = ()  # a completion ends with the first of these, and includes it
    temperature: float = 0.0  # 0: greedy decoding
    top_k: int | None = None  # draw from this many of the most likely tokens
    top_p: float = 1.0  # draw from the most likely tokens that have this probability together
    samples: int = 1  # completions per prompt
    seed: int = 0
    budget: int | None = None  # tokens of one forward over prompts, unless a single one has more
    use_cache: bool = True  # False: each forward holds the prompts and their completions so far
    experts: bool = False  # record which experts each token was routed to, where the model has some
    # Ends a completion early, given its tokens; called once per new token.
    is_finished: Finished | None = None

    def __post_init__(self) -> None:
        self._check("max_new_tokens", self.max_new_tokens >= 1, "at least 1")
        self._check("samples", self.samples >= 1, "at least 1")
        self._check("temperature", self.temperature >= 0, "0 (greedy decoding) or more")
        self._check("top_k", self.top_k is None or self.top_k >= 1, "at least 1")
        self._check("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1")

    def _check(self, name: str, is_right: bool, allowed: str) -> None:
        if not is_right:
            raise UserError(f"{name}={getattr(self, name)}: must be {allowed}")


@dataclass
class Completion:
    """What was written after a prompt.

    Log-probabilities are those of the model at the temperature of the decoding, over all tokens but the placeholders of
    media, as those of `model(batch, ["log_probs"], temperature=...)`: `top_k` and `top_p` do not change them.
    """

    prompt: int  # its index
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    is_finished: bool = False  # False: it was cut after `max_new_tokens`
    # (tokens, L, K) int16, of the prompt's tokens and the completion's but for the last; see `router_replay.py`.
    experts: Tensor | None = field(default=None, compare=False)


def stop_at(tokenizer: Any, strings: Collection[str]) -> Finished:
    """For `Decoding.is_finished`: a completion ends with the token that completes one of these strings."""
    # Tokens have a byte or more; some have none, such as special ones.
    window = max(len(one.encode()) for one in strings) + 8

    def is_finished(tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens[-window:], skip_special_tokens=True)
        return any(one in text for one in strings)

    return is_finished


class TextStream:
    """Passes the new end of a growing text to `on_text`, except for what may be the start of a stop string."""

    def __init__(self, on_text: Callable[[str], None], stop_strings: Sequence[str]) -> None:
        self.on_text = on_text
        self.length = 0  # of the text that was passed on
        starts = {text[:length] for text in stop_strings for length in range(1, len(text))}
        # Beginnings of stop strings, the longest first.
        self.starts = sorted(starts, key=len, reverse=True)

    def show(self, text: str) -> None:
        # The first bytes of a character decode to U+FFFD until the token with its last byte follows.
        text = text.rstrip("\ufffd")
        start = next((start for start in self.starts if text.endswith(start)), "")
        self.end(text.removesuffix(start))

    def end(self, text: str) -> None:
        if len(text) > self.length:
            self.on_text(text[self.length :])
            self.length = len(text)


def complete(
    engine: ModelEngine,
    prompts: PackedBatch | None,
    decoding: Decoding,
    keys: Sequence[int] | None = None,
) -> list[Completion]:
    """Completions in the order of the prompts, the samples of one prompt next to each other.

    On a sharded layout all ranks call it together, each with prompts of its own, or None. `keys` are the numbers that
    the random choices of each prompt depend on, by default its index: with keys that do not depend on the layout,
    neither do the completions.
    """
    groups: list[PackedBatch] = []
    members: list[list[int]] = []
    if prompts is not None:
        keys = range(prompts.num_sequences) if keys is None else keys
        if len(keys) != prompts.num_sequences:
            raise ValueError(f"{len(keys)} keys for {prompts.num_sequences} prompts")
        on_cpu = prompts.to("cpu")
        split = on_cpu.split(max(decoding.budget or on_cpu.num_tokens, on_cpu.max_seqlen))
        groups = split.parts
        members = split.members
    completions: list[Completion] = []
    with decoding_mode(engine) as is_alone:
        # Ranks that gather weights in each forward run the same number of them; they start each group together.
        num_groups = [len(groups)] if is_alone else engine.world.all_gather(len(groups))
        for i in range(max(num_groups)):
            group = groups[i] if i < len(groups) else None
            indices = members[i] if group else []
            group_keys = [keys[index] for index in indices] if keys is not None else []
            completions += _Group(engine, group, indices, decoding, group_keys).run()
    return sorted(completions, key=lambda one: one.prompt)


@contextmanager
def decoding_mode(engine: ModelEngine) -> Iterator[bool]:
    """A context for forwards that write tokens. Its value: whether ranks with other prompts run on their own."""
    gathered = engine.gathered_weights()
    with engine.eval_mode(), _uncompiled(), _keep_cast_weights(engine), gathered as is_alone:
        yield is_alone


@contextmanager
def _uncompiled() -> Iterator[None]:
    """A context in which compiled blocks run eagerly: they would be compiled again for the shapes of decoding.

    The stance is one of the process. When two threads generate, the one that ends last resets it, whichever began.
    """
    with _STANCES_LOCK:
        _STANCES.append(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _STANCES_LOCK:
            _STANCES.pop().__exit__(None, None, None)


@contextmanager
def _keep_cast_weights(engine: ModelEngine) -> Iterator[None]:
    """A context in which the half-precision and FP8 weights of a forward are kept for the next ones.

    Not on sharded layouts: a rank could not hold all of them.
    """
    if engine.layout.shard_mesh is not None:
        yield
        return
    try:
        with engine.autocast(), quantized_once(engine.model):
            yield
    finally:
        torch.clear_autocast_cache()  # these have no gradients: no other forward may use them


class _Group:
    """Prompts that are completed together."""

    def __init__(
        self,
        engine: ModelEngine,
        prompts: PackedBatch | None,
        members: list[int],
        decoding: Decoding,
        keys: list[int],
    ) -> None:
        self.engine = engine
        self.decoding = decoding
        self.prompts = prompts
        samples = range(decoding.samples)
        self.all = [Completion(index) for index in members for _ in samples]
        self.active = list(range(len(self.all)))  # the completions in each forward
        self.rows = [row for row in range(len(members)) for _ in samples]  # theirs in the prompts
        # New tokens are text: on every axis their positions continue after the prompt's largest one.
        self.last_positions: list[int] = []
        if prompts is not None:
            of_prompts = prompts.position_ids.split(prompts.lengths.tolist(), dim=-1)
            self.last_positions = [int(positions.max()) for positions in of_prompts]
        model: Any = engine.model
        self.token_type = model.completion_token_type
        device = engine.world.device
        self.never_written = torch.tensor(model.placeholders, dtype=torch.long, device=device)
        self.keys_S = torch.tensor(
            sequence_keys(decoding.seed, keys, decoding.samples), dtype=torch.long, device=device
        )
        self.graph: DecodeGraph | None = None
        # A forward that warms up a graph would change the states of mixers.
        self.can_capture = is_supported(engine) and not model.mixers.modules
        self.uses_cache = (
            decoding.use_cache and engine.layout.sequence_size == 1 and model.can_cache
        )
        self.cache: KVCache | None = None
        self.replay: RouterReplay | None = model.router_replay if decoding.experts else None
        self.routes: list[list[Tensor]] = [[] for _ in self.all]  # of each completion's tokens

    def run(self) -> list[Completion]:
        written = 0  # tokens of each active completion
        while written < self.decoding.max_new_tokens:
            graph = self._graph(written)
            if graph is not None:
                steps = min(REPLAYS, self.decoding.max_new_tokens - written)
                for tokens, log_probs in graph.write(steps):
                    self._record(tokens, log_probs)
                self._drop_finished()
                written += steps
                continue
            logits_SV = self._forward(self._batch())
            if logits_SV is None:
                if not self._others_continue:
                    break
            else:
                if written == 0:
                    self._start_samples()
                    logits_SV = logits_SV[self.rows]
                tokens_S, log_probs_S = self._choose(logits_SV, written)
                self._record(tokens_S.tolist(), log_probs_S.tolist())
                self._drop_finished()
            written += 1
        for completion, routes in zip(self.all, self.routes, strict=True):
            completion.experts = torch.cat(routes) if routes else None
        return self.all

    def _batch(self) -> PackedBatch | None:
        """The batch of the next forward; None where nothing is left to complete."""
        if not self.active or self.prompts is None:
            return None
        if self.cache is not None:
            return self._next_tokens(self.prompts)
        tokens = [self.all[s].tokens for s in self.active]
        if not tokens[0]:  # all samples of a prompt begin with the same forward
            return self.prompts
        extended = [
            with_completion(self.prompts.select([row]), None, written, self.token_type)
            for row, written in zip(self.rows, tokens, strict=True)
        ]
        routes = [torch.cat(found) if (found := self.routes[s]) else None for s in self.active]
        return PackedBatch.concat(add_routes(extended, routes))

    def _next_tokens(self, prompts: PackedBatch) -> PackedBatch:
        """The last token of each active completion."""
        written = [self.all[s].tokens for s in self.active]
        ids = torch.tensor([tokens[-1] for tokens in written])
        starts = [self.last_positions[row] for row in self.rows]
        positions_S = torch.tensor(starts) + torch.tensor([len(tokens) for tokens in written])
        return newest_tokens(prompts, ids, positions_S, self.token_type)

    def _graph(self, written: int) -> DecodeGraph | None:
        """The CUDA graph of the next forwards; None where they run eagerly."""
        if self.graph is None and self.cache is not None and self.can_capture and self.active:
            assert self.prompts is not None
            batch = self._next_tokens(self.prompts)
            self.graph = try_capture(self.engine, batch, self.cache, self._choose, written)
            self.can_capture = self.graph is not None
        return self.graph

    def _forward(self, batch: PackedBatch | None) -> Tensor | None:
        """Logits of the next token of each sequence. Ranks without a batch may run dummy forwards for others."""
        if batch is not None and self.cache is None and self.uses_cache:
            self.cache = KVCache(batch.lengths.tolist(), self.decoding.max_new_tokens)
        self._others_continue = False

        def logits(micro_batch: PackedBatch) -> Tensor:
            self._others_continue = True
            cache = None if self.engine.is_dummy else self.cache
            records = self.replay is not None and not self.engine.is_dummy
            with self.replay.recording() if self.replay and records else nullcontext():
                outputs = self.engine.model(micro_batch, ["next_logits"], kv_cache=cache)
            if self.replay is not None and records and self.replay.recorded is not None:
                self._record_routes(micro_batch, self.replay.recorded.cpu())
            return outputs["next_logits"]

        batches = [] if batch is None else [batch]
        found = list(self.engine.infer_micro_batches(batches, logits))
        return found[0] if found else None

    def _record_routes(self, batch: PackedBatch, routes_TLK: Tensor) -> None:
        """Keep the experts of the tokens that this forward adds to each active completion."""
        of_sequences = routes_TLK.split(batch.lengths.tolist())
        for place, s in enumerate(self.active):
            if not self.all[s].tokens:  # the forward over the prompts, which samples share
                self.routes[s].append(of_sequences[self.rows[place]])
            elif not self.all[s].is_finished:
                self.routes[s].append(of_sequences[place][-1:])

    def _start_samples(self) -> None:
        """After the forward over the prompts: one sequence per sample."""
        if self.cache is not None and self.decoding.samples > 1:
            self.cache.select(self.rows)

    def _choose(self, logits_SV: Tensor, position: int | Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each active completion, which has `position` tokens, and its log-prob."""
        temperature = self.decoding.temperature
        scaled_SV = logits_SV / (temperature or 1.0)
        scaled_SV.index_fill_(1, self.never_written, float("-inf"))
        log_z_S = scaled_SV.logsumexp(-1)
        if temperature == 0.0:
            tokens_S = scaled_SV.argmax(-1)
        else:
            top_k = self.decoding.top_k
            likely_SV = scaled_SV
            if top_k is not None or self.decoding.top_p < 1.0:
                likely_SV = most_likely(scaled_SV, top_k or scaled_SV.shape[1], self.decoding.top_p)
            tokens_S = sample_tokens(likely_SV, self.keys_S, position)
        return tokens_S, scaled_SV.gather(-1, tokens_S[:, None])[:, 0] - log_z_S

    def _record(self, tokens: list[int], log_probs: list[float]) -> None:
        """Append a token to each active completion that is not finished."""
        for s, token, log_prob in zip(self.active, tokens, log_probs, strict=True):
            completion = self.all[s]
            if not completion.is_finished:
                completion.tokens.append(token)
                completion.log_probs.append(log_prob)
                completion.is_finished = self._is_finished(completion.tokens)

    def _drop_finished(self) -> None:
        unfinished = [row for row, s in enumerate(self.active) if not self.all[s].is_finished]
        # To copy a cache, and to capture a graph, takes longer than some rows that are not needed.
        if self.cache is None or len(unfinished) <= len(self.active) // 2:
            self._keep(unfinished)

    def _keep(self, rows: list[int]) -> None:
        """Continue only these of the active completions."""
        if len(rows) == len(self.active):
            return
        self.active = [self.active[row] for row in rows]
        self.keys_S = self.keys_S[rows]
        self.rows = [self.rows[row] for row in rows]
        self.graph = None
        if self.cache is not None and rows:
            self.cache.select(rows)

    def _is_finished(self, tokens: list[int]) -> bool:
        asked = self.decoding.is_finished
        return tokens[-1] in self.decoding.stop or (asked is not None and asked(tokens))


def newest_tokens(
    prompts: PackedBatch, ids_S: Tensor, positions_S: Tensor, token_type: int
) -> PackedBatch:
    """The newest token of each sequence, as a batch for a forward with a cache; `prompts` shows which fields it has."""
    token_types = {
        name: value.new_full((len(ids_S), *value.shape[1:]), token_type)
        for name, value in prompts.token_fields.items()
        if name.endswith("token_type_ids")
    }
    return PackedBatch(
        ids_S,
        torch.full_like(ids_S, IGNORE),
        positions_S.expand(*prompts.position_ids.shape[:-1], -1).contiguous(),
        torch.arange(len(ids_S) + 1, dtype=torch.int32),
        token_types,
    )


def most_likely(logits_SV: Tensor, top_k: int | Tensor, top_p: float | Tensor) -> Tensor:
    """The logits of the tokens that `top_k` and `top_p` allow; those of the others are -inf.

    Both may be (S, 1) tensors, with a value for each sequence.
    """
    sorted_SV, order_SV = logits_SV.sort(descending=True)
    rank_V = torch.arange(logits_SV.shape[1], device=logits_SV.device)
    sorted_SV = sorted_SV.masked_fill(rank_V >= top_k, float("-inf"))
    probs_SV = sorted_SV.softmax(-1)
    # A token stays if those before it have less than `top_p`; so the first always does.
    is_beyond_SV = probs_SV.cumsum(-1) - probs_SV >= top_p
    sorted_SV = sorted_SV.masked_fill(is_beyond_SV, float("-inf"))
    return torch.empty_like(logits_SV).scatter_(1, order_SV, sorted_SV)


def with_completion(
    prompt: PackedBatch, length: int | None, new: list[int], token_type: int = 0
) -> PackedBatch:
    """The first `length` tokens of one sequence, followed by `new` ones, without labels.

    New tokens are text: on every axis their positions continue after the largest one. `token_type`: theirs in the
    fields of token types, `LanguageModel.completion_token_type`.
    """
    ids = prompt.input_ids[:length]
    positions = prompt.position_ids[..., :length]
    new_positions = int(positions.max()) + 1 + torch.arange(len(new))
    new_positions = new_positions.expand(*positions.shape[:-1], -1)
    ids = torch.cat([ids, torch.tensor(new, dtype=ids.dtype)])
    token_types = {}
    for name, value in prompt.token_fields.items():
        if name.endswith("token_type_ids"):
            new_types = value.new_full((len(new), *value.shape[1:]), token_type)
            token_types[name] = torch.cat([value[:length], new_types])
    return PackedBatch(
        ids,
        torch.full_like(ids, IGNORE),
        torch.cat([positions, new_positions], dim=-1),
        torch.tensor([0, len(ids)], dtype=torch.int32),
        token_types,
        {},
        prompt.media,
    )


# DecodeGraph: a forward over one new token per sequence, and the choice of the next ones, as a CUDA graph.
#
# Such a forward computes little, and most of its time is spent on launching kernels from Python. A graph launches all
# of them at once. The tokens that it chooses stay on the device as its next inputs, so the host waits once for several
# of them. It is for one number of sequences: if that changes, another is captured.

LOGGER = logging.getLogger("mvp_engine")
_NOT_CAPTURED: WeakSet[nn.Module] = WeakSet()  # models with a forward that cannot be captured


def is_supported(engine: ModelEngine) -> bool:
    """Whether the forward of a new token may become a graph: on one GPU, without collectives or experts.

    Some layers of experts read on the host how many tokens each of them has.
    """
    layout = engine.layout
    model: Any = engine.model
    is_whole = layout.shard_mesh is None and layout.model_parallel_size == 1
    # Other models compute new rotary positions for long sequences.
    has_fixed_positions = model.packed_length_limit is None
    if engine.world.device.type != "cuda" or not is_whole or not has_fixed_positions:
        return False
    has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
    return not has_experts and model not in _NOT_CAPTURED


Choice = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class DecodeGraph:
    def __init__(
        self,
        engine: ModelEngine,
        batch: PackedBatch,
        cache: KVCache,
        choose: Choice,
        position: int,
    ) -> None:
        """`batch` holds the next token of each sequence, which `cache` does not have yet.

        `choose(logits_SV, position)` returns a token of each sequence and its log-prob; `position` counts the tokens
        that each has written, on the device.
        """
        self.cache = cache
        batch = batch.to(engine.world.device)
        position_now = torch.tensor(position, device=engine.world.device)
        cache.fix_shapes()

        def forward() -> tuple[Tensor, Tensor]:
            with engine.autocast():
                outputs = engine.model(batch, ["next_logits"], kv_cache=cache)
            chosen = choose(outputs["next_logits"], position_now)
            # The inputs of the next replay.
            batch.input_ids.copy_(chosen[0])
            batch.position_ids.add_(1)
            position_now.add_(1)
            cache.advance_on_device()
            return chosen

        state = (batch.input_ids, batch.position_ids, position_now, cache.newest)
        self._replay = capture(forward, state)
        # A graph has the addresses of its inputs and does not keep them alive.
        self._inputs = (batch, position_now)

    def write(self, steps: int) -> list[tuple[list[int], list[float]]]:
        """The next `steps` tokens of each sequence and their log-probs, by step; one wait for the device."""
        written = []
        for _ in range(steps):
            tokens_S, log_probs_S = self._replay()
            # The next replay overwrites them.
            written.append((tokens_S.clone(), log_probs_S.clone()))
        self.cache.count_tokens(steps)
        tokens = torch.stack([tokens_S for tokens_S, _ in written]).tolist()
        log_probs = torch.stack([log_probs_S for _, log_probs_S in written]).tolist()
        return list(zip(tokens, log_probs, strict=True))


def capture(
    forward: Callable[[], tuple[Tensor, Tensor]], state: Sequence[Tensor]
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that replays `forward` as a CUDA graph and returns its outputs; `state` is what `forward` changes.

    Not by `torch.cuda.graph`, which also collects garbage and empties the allocator's cache: a training fills it again.
    Other threads, such as those of loaders and checkpoints, may call CUDA meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        before = [tensor.clone() for tensor in state]
        forward()  # libraries allocate their workspaces outside of the graph, and kernels are compiled
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            outputs = forward()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)

    def replay() -> tuple[Tensor, Tensor]:
        graph.replay()
        return outputs

    return replay


def try_capture(
    engine: ModelEngine, batch: PackedBatch, cache: KVCache, choose: Choice, position: int
) -> DecodeGraph | None:
    """A graph for this batch; None, with a warning, if the model waits for values on the host in its forward."""
    try:
        return DecodeGraph(engine, batch, cache, choose, position)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).partition("\n")[0]
        LOGGER.warning("generation runs without a CUDA graph, more slowly: %s", reason)
        _NOT_CAPTURED.add(engine.model)
        cache.free_shapes()
        return None
