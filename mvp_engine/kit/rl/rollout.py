"""Rollouts: completions of prompts with the log-probs that they were sampled with.

`Rollout` is what the controller calls; token ids in, token ids out, never text. `PackedRollout` samples with the
actor's own weights. Servers are in modules of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from mvp_engine.data import derived_seed
from mvp_engine.data.batch import IGNORE, Media, PackedBatch
from mvp_engine.errors import UserError, count
from mvp_engine.hf.experts.router_replay import add_routes
from mvp_engine.kit.decoding import Completion, Decoding, with_completion
from mvp_engine.kit.rl.chat import Answer, Ask
from mvp_engine.kit.rl.prompts import Prompt

if TYPE_CHECKING:
    from mvp_engine.worker.group import WorkerGroup

Reason = Literal["stop", "length"]
Buckets = Iterable[list[tuple[str, Tensor]]]  # weights by their Hugging Face names


@dataclass
class Sample:
    """One completion of a prompt, or a conversation of several turns that begins with it.

    Log-probs are those of the distribution that the tokens were drawn from: at the temperature of the sampling, without
    placeholders of media.
    """

    prompt: int  # index in the list that was given to `generate`; 0 from `Rollout.submit`
    tokens: list[int]  # with the stop token, if there is one; all that follows the prompt
    log_probs: list[float]  # 0 for tokens that the policy did not write
    # Of the weights that wrote each of `tokens`; what was inserted has the version of the token that follows it.
    versions: list[int]
    reason: Reason  # "length": cut after `max_new_tokens`, or no room was left for another turn
    # Of several turns: the tokens of each that the policy wrote, as (first, end); empty: all tokens are one turn.
    turns: list[tuple[int, int]] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)  # one for each turn
    media: list[str] = field(default_factory=list)  # kinds of media between turns
    # The whole sequence without labels, where it is not the prompt and text: with media between turns, or after another
    # prompt than the row's. The tokens end it.
    context: PackedBatch | None = None
    others: list[Sample] = field(default_factory=list)  # further sequences of the same episode
    # The experts of each token of the whole sequence, its prompt included: (tokens, layers, k) int16; -1, and rows that
    # are missing at the end: not known. See `hf/experts/router_replay.py`.
    experts: Tensor | None = field(default=None, compare=False)

    @property
    def version(self) -> int:
        """Of the oldest weights that wrote a token of this sequence; 0 without any token."""
        return min(self.versions, default=0)

    def sequences(self) -> list[Sample]:
        return [self, *self.others]

    def written(self) -> list[tuple[int, int]]:
        """The tokens that the policy wrote, as (first, end)."""
        return self.turns or [(0, len(self.tokens))]

    def batch(self, prompt: Prompt) -> PackedBatch:
        """The whole sequence, without labels."""
        return self.context or with_completion(prompt.batch, None, self.tokens)

    def state_dict(self) -> dict[str, Any]:
        """As tensors, numbers, lists and dicts, for a checkpoint."""
        others = [other.state_dict() for other in self.others]
        context = None if self.context is None else _plain(self.context)
        return {**vars(self), "context": context, "others": others}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Sample:
        sample = cls(**state)
        sample.others = [cls.from_state(other) for other in state["others"]]
        if state["context"] is not None:
            media = {name: Media(**items) for name, items in state["context"]["media"].items()}
            sample.context = PackedBatch(**{**state["context"], "media": media})
        return sample

    @classmethod
    def of(cls, completion: Completion, version: int) -> Sample:
        reason: Reason = "stop" if completion.is_finished else "length"
        of = completion
        versions = [version] * len(of.tokens)
        return cls(of.prompt, of.tokens, of.log_probs, versions, reason, experts=of.experts)


def _plain(batch: PackedBatch) -> dict[str, Any]:
    found = {one.name: getattr(batch, one.name) for one in fields(batch) if one.init}
    media = {name: dict(vars(items)) for name, items in batch.media.items()}
    return {**found, "media": media}


@dataclass(frozen=True)
class Sampling(Decoding):
    """How rollouts are sampled: by temperature alone, so that a trainer computes the log-probs of the sampler."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise UserError(
                f"Sampling: temperature={self.temperature} must be more than 0: a greedy completion has no log-probs "
                "to train with"
            )
        if self.top_k is not None or self.top_p != 1.0:
            raise UserError("Sampling: log-probs of a trainer know no top_k and no top_p")


class Rollout(Protocol):
    """A sampler of completions with weights that the trainer sends.

    `submit` may be called from several threads. `is_batched`: `run` generates all that was submitted, in one go;
    otherwise requests run by themselves. `switches_in_flight`: `sync` may be called while completions are generated,
    which then have tokens of several versions.
    """

    is_batched: bool
    switches_in_flight: bool

    def submit(self, prompt: Prompt, sampling: Any) -> list[Future[Sample]]:
        """Ask for `sampling.samples` completions of a prompt: a future for each of them."""
        ...

    def run(self) -> None:
        """Generate what was submitted, in the order of submission; nothing where requests run by themselves."""
        ...

    def sync(self, weights: Buckets | None, version: int) -> None:
        """From now on sample with these weights; None: the sampler has the trainer's own, only the version changes."""
        ...

    def release(self) -> None:
        """Free memory of GPUs that the trainer shares, until the next `sync`; nothing is generated until then."""
        ...

    def close(self) -> None: ...


def generate(rollout: Rollout, prompts: Sequence[Prompt], sampling: Decoding) -> list[Sample]:
    """`sampling.samples` completions of each prompt, in the order of the prompts."""
    submitted = [rollout.submit(prompt, sampling) for prompt in prompts]
    rollout.run()
    return [
        replace(future.result(), prompt=index)
        for index, futures in enumerate(submitted)
        for future in futures
    ]


class PackedRollout:
    """Our own decode, by the ranks of a worker group: the actor, or a group with a layout of its own.

    The completions of a prompt depend on the weights, the prompt's key and the seed: not on the layout, nor on which
    prompts are generated together. `budget`: the most tokens of a forward over prompts.
    """

    is_batched = True
    switches_in_flight = False  # but `sync` may come between two calls of `run`

    def __init__(self, group: WorkerGroup, *, budget: int, version: int = 0) -> None:
        self.group = group
        self.budget = budget
        self.version = version
        self._lock = threading.Lock()
        self._submitted: list[tuple[Prompt, Decoding, list[Future[Sample]]]] = []

    def submit(self, prompt: Prompt, sampling: Decoding) -> list[Future[Sample]]:
        futures: list[Future[Sample]] = [Future() for _ in range(sampling.samples)]
        with self._lock:
            self._submitted.append((prompt, sampling, futures))
        return futures

    def run(self) -> None:
        with self._lock:
            submitted = self._submitted
            self._submitted = []
        for sampling, group in groupby(submitted, key=lambda one: one[1]):
            same = list(group)
            batches = [prompt.batch for prompt, _, _ in same]
            routes = [one.token_fields.get("experts") for one in batches]  # of earlier turns
            batch = PackedBatch.concat(add_routes(batches, routes))
            keys = [prompt.key for prompt, _, _ in same]
            completions = self.group.generate(batch, replace(sampling, budget=self.budget), keys)
            futures = [future for _, _, of_prompt in same for future in of_prompt]
            for future, completion in zip(futures, completions, strict=True):
                future.set_result(Sample.of(replace(completion, prompt=0), self.version))

    def sync(self, weights: Buckets | None, version: int) -> None:
        if weights is not None:
            self.group.load_weights(weights)
        self.version = version

    def release(self) -> None:
        """The group's memory is managed by its owner."""

    def close(self) -> None:
        """The group is its owner's to close."""


# Prompts and their samples as one packed batch for training.
#
# Legend: T tokens, S sequences. Entry t of a token field is about `labels[t]`.


def rollout_batch(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> PackedBatch:
    """One sequence per sample: its prompt and the tokens after it, never tokenized again. Drawn ones carry loss.

    Token fields `sampler_log_probs`, `experts` if a sample has them, and `versions` of samples by several versions of
    the weights; sequence field `group`, the index of the prompt. Each sample has a token or more. Of samples with
    several turns, each sequence of an episode is one, and there are the token fields `turn_rewards`, at the last token
    of each turn, and `turn`, its number from 1; and the sequence fields `episode`, the index of the sample, and
    `rewarded`, the rewards of turns in the sequences before it.
    """
    has_turns = any(sample.turns for sample in samples)
    versions = {v for sample in samples for one in sample.sequences() for v in one.versions}
    sequences = []
    routes = []
    for episode, sample in enumerate(samples):
        rewarded = 0.0
        for one in sample.sequences():
            if one.tokens:
                batch = _sequence(prompts[sample.prompt], one, with_versions=len(versions) > 1)
                if has_turns:
                    _add_turns(batch, one)
                    batch.sequence_fields["episode"] = torch.tensor([episode])
                    batch.sequence_fields["rewarded"] = torch.tensor(
                        [rewarded], dtype=torch.float64
                    )
                    rewarded += sum(one.turn_rewards)
                sequences.append(batch)
                routes.append(one.experts)
    return PackedBatch.concat(add_routes(sequences, routes))


def _sequence(prompt: Prompt, sample: Sample, with_versions: bool) -> PackedBatch:
    batch = sample.batch(prompt)
    # The first new token is predicted at the last one of the prompt.
    first = batch.num_tokens - len(sample.tokens) - 1
    log_probs_T = torch.zeros(batch.num_tokens)
    log_probs_T[first:-1] = torch.tensor(sample.log_probs)
    labels = torch.full_like(batch.labels, IGNORE)
    for start, end in sample.written():
        labels[first + start : first + end] = batch.input_ids[first + start + 1 : first + end + 1]
    token_fields = {**batch.token_fields, "sampler_log_probs": log_probs_T}
    if with_versions:
        versions_T = torch.zeros(batch.num_tokens, dtype=torch.int32)
        versions_T[first:-1] = torch.tensor(sample.versions)
        token_fields["versions"] = versions_T
    sequence_fields = {"group": torch.tensor([sample.prompt])}
    return replace(batch, labels=labels, token_fields=token_fields, sequence_fields=sequence_fields)


def _add_turns(batch: PackedBatch, sample: Sample) -> None:
    first = batch.num_tokens - len(sample.tokens) - 1
    rewards_T = torch.zeros(batch.num_tokens)
    turn_T = torch.zeros(batch.num_tokens, dtype=torch.int32)
    credits = sample.turn_rewards or [0.0] * len(sample.written())
    for number, ((start, end), reward) in enumerate(zip(sample.written(), credits, strict=True)):
        turn_T[first + start : first + end] = number + 1
        rewards_T[first + end - 1] = reward
    batch.token_fields |= {"turn_rewards": rewards_T, "turn": turn_T}


# The sequences of episodes.


class GrowingSequence:
    """The tokens of one conversation so far, as the controller knows them."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.batch = prompt.batch
        self.since: list[int] = []  # tokens after those of `batch`
        self.text_ids = list(prompt.text_ids)
        self.media = list(prompt.media)
        self.sample = Sample(0, [], [], [], "stop")

    def read(self, ask: Ask) -> None:
        """Append what the policy reads before its next turn."""
        self.sample.tokens += ask.ids
        self.sample.log_probs += [0.0] * len(ask.ids)
        self.sample.media += [str(item["type"]) for item in ask.media]
        self.text_ids += ask.text_ids
        self.media += ask.media
        self.since += ask.ids
        if ask.batch is not None:
            self.batch = ask.batch
            self.since = []

    def context(self, key: int) -> Prompt:
        """What the next turn is generated from."""
        batch = with_completion(self.batch, None, self.since) if self.since else self.batch
        (batch,) = add_routes([batch], [self.sample.experts])
        return replace(
            self.prompt, key=key, batch=batch, text_ids=list(self.text_ids), media=list(self.media)
        )

    def write(self, turn: Sample) -> None:
        sample = self.sample
        sample.turns.append((len(sample.tokens), len(sample.tokens) + len(turn.tokens)))
        sample.tokens += turn.tokens
        sample.log_probs += turn.log_probs
        inserted = len(sample.tokens) - len(sample.versions) - len(turn.tokens)
        before = turn.versions[0] if turn.versions else sample.version
        sample.versions += [before] * inserted + turn.versions
        sample.reason = turn.reason
        sample.experts = turn.experts  # of all tokens so far
        self.since += turn.tokens
        self.text_ids += turn.tokens

    def end(self, rewards: list[float]) -> Sample:
        self.sample.turn_rewards = rewards or [0.0] * len(self.sample.turns)
        if self.batch is not self.prompt.batch:
            self.sample.context = with_completion(self.batch, None, self.since)
        return self.sample


class Rounds:
    """The samples of a step in the making: what episodes ask the rollout for, and the sequences that they make."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        rollout: Rollout,
        sampling: Decoding,
        answer: Callable[[Sample], Answer],
    ) -> None:
        self.prompts = list(prompts)
        self.rollout = rollout
        self.sampling = sampling
        self.number = sampling.samples
        self.answer = answer
        self.sequences: list[dict[int, GrowingSequence]] = []
        self.samples: list[Sample] = []
        for place, prompt in enumerate(prompts):
            for _ in range(self.number):
                first = GrowingSequence(prompt)
                first.sample.prompt = place
                self.sequences.append({0: first})
                self.samples.append(first.sample)
        self._first: dict[int, Future[Sample]] = {}  # turns of whole groups, by episode

    def submit(self, asks: Mapping[int, Ask]) -> dict[int, Future[Sample]]:
        """Submit what episodes ask for; returns the completion of each, by its index."""
        found: dict[int, Future[Sample]] = {}
        fresh: list[int] = []
        contexts: dict[int, Prompt] = {}
        for index in sorted(asks):
            ask = asks[index]
            place, number = divmod(index, self.number)
            prompt = self.prompts[place]
            # The token ids of another prompt are in the batch of its first ask.
            empty = replace(prompt, text_ids=[], media=[])
            sequence = self.sequences[index].setdefault(ask.sequence, GrowingSequence(empty))
            sequence.sample.prompt = place
            sequence.read(ask)
            turn = len(sequence.sample.turns)
            if ask.sequence == 0 and turn == 0:
                fresh.append(index)
            else:
                # Without the turn, each would be drawn with the noise of the first.
                key = derived_seed(prompt.key, "turn", number, ask.sequence, turn)
                contexts[index] = sequence.context(key)
        # The samples of a prompt begin with one forward over it, also if some of them start in a later round.
        places = sorted({index // self.number for index in fresh if index not in self._first})
        for place in places:
            first = place * self.number
            for at, future in enumerate(self.rollout.submit(self.prompts[place], self.sampling)):
                self._first[first + at] = future
        if places and contexts:
            self.rollout.run()  # apart, as the bits of log-probs depend on what is in a batch
        found = {index: self._first[index] for index in fresh}
        one = replace(self.sampling, samples=1)
        for index, context in contexts.items():
            (found[index],) = self.rollout.submit(context, one)
        return found

    def write(self, index: int, ask: Ask, turn: Sample) -> Answer:
        """Append a completion to the sequence that asked for it."""
        self.sequences[index][ask.sequence].write(turn)
        return self.answer(turn)

    def end(self, index: int, rewards: Mapping[int, list[float]], is_cut: bool) -> None:
        """Complete the sample of an episode that has ended; `rewards` of turns, by sequence."""
        sequences = self.sequences[index]
        for number, sequence in sequences.items():
            sequence.end(rewards.get(number, []))
        main = self.samples[index]
        others = [one.sample for number, one in sequences.items() if number and one.sample.turns]
        if others and not main.turns:  # a program with a prompt of its own
            vars(main).update(vars(others.pop(0)))
        main.others = others
        if is_cut:
            main.reason = "length"


# The gap between sampler and trainer: how far their log-probs of the same tokens are apart, by modality.
#
# Policy gradients assume that there is none. A sampler with old weights, another precision, another temperature or
# other features of an image makes one, and nothing else in a training shows it.
#
# Legend: T tokens, S sequences.

CONTEXT = 12  # tokens that are shown before each of the worst ones


class GapTooLarge(UserError):
    """Sampler and trainer differ by more than `generation.max_gap`."""


@dataclass(frozen=True)
class ModalityGap:
    """Absolute differences of log-probs in answers to prompts with the same kinds of media."""

    total: float
    largest: float
    tokens: int

    @property
    def mean(self) -> float:
        return self.total / max(self.tokens, 1)


@dataclass(frozen=True)
class WorstToken:
    sampler: float  # log-probs
    trainer: float
    token: int
    before: list[int]  # the tokens before it
    modality: str
    where: str  # the row of its prompt

    def text(self, tokenizer: Any) -> str:
        token = repr(tokenizer.decode([self.token]))
        before = repr(tokenizer.decode(self.before))
        return (
            f"sampler {self.sampler:.4f}, trainer {self.trainer:.4f}: token {self.token} {token} after {before} "
            f"({self.modality}, {self.where})"
        )


@dataclass(frozen=True)
class Gap:
    by_modality: dict[str, ModalityGap]  # text, image, ...; image+text where a prompt has several
    worst: list[WorstToken]  # the largest differences first
    by_turn: dict[str, ModalityGap] = field(default_factory=dict)  # turn1, turn2+; of several turns

    def metrics(self) -> dict[str, tuple[float, float]]:
        """The mean gap of each modality, and of first and later turns, as (sum, weight)."""
        parts = {**self.by_modality, **self.by_turn}
        return {f"gap/{name}": (gap.total, gap.tokens) for name, gap in parts.items()}

    def check(self, max_gap: float | None, tokenizer: Any) -> None:
        """Raise if a modality's mean gap is larger than `max_gap`; None: never."""
        if max_gap is None:
            return
        over = {name: gap for name, gap in self.by_modality.items() if gap.mean > max_gap}
        if not over:
            return
        found = [
            f"{gap.mean:.3g} on average and {gap.largest:.3g} at most over {count(gap.tokens, 'token')} of "
            f"answers to prompts with {name}"
            for name, gap in over.items()
        ]
        others = [
            f"{gap.mean:.3g} with {name}"
            for name, gap in self.by_modality.items()
            if name not in over
        ]
        lines = [
            f"generation.max_gap={max_gap}: log-probs of sampler and trainer differ by {'; '.join(found)}"
            + (f"; but by {', '.join(others)}" if others else "")
            + ". The worst tokens:",
            *(f"  {one.text(tokenizer)}" for one in self.worst if one.modality in over),
            "The sampler has other weights, another temperature or precision, or computes other features of media. "
            "rl.correction={} corrects for a small gap; generation.max_gap=null trains with any.",
        ]
        raise GapTooLarge("\n".join(lines))


def check_mean_gap(gap: tuple[float, float] | None, max_gap: float | None) -> None:
    """Raise if the mean gap of an update, as (sum, weight), is larger than `max_gap`; None: never."""
    if gap is None or max_gap is None:
        return
    mean = gap[0] / max(gap[1], 1.0)
    if not mean <= max_gap:
        raise GapTooLarge(
            f"generation.max_gap={max_gap}: log-probs of sampler and trainer differ by {mean:.4f} on average. With "
            "rl.updates=2 the worst tokens are shown. rl.correction={} corrects for a small gap; "
            "generation.max_gap=null trains with any"
        )


def modality(prompt: Prompt, sample: Sample | None = None) -> str:
    """The kinds of media in a prompt and its sample: image, audio+image, ...; text without any."""
    kinds = {str(item["type"]) for item in prompt.media} | set(sample.media if sample else ())
    return "+".join(sorted(kinds)) or "text"


def measure_gap(
    batch: PackedBatch,
    trainer_log_probs_T: Tensor,
    prompts: Sequence[Prompt],
    samples: Sequence[Sample] = (),
    show: int = 5,
    version: int | None = None,
) -> Gap:
    """Compare the trainer's log-probs with the token field `sampler_log_probs`, on the CPU.

    `batch` is that of `rollout_batch`: its labels are the sampled tokens, its sequence field `group` says the prompt of
    each sequence. `samples` are its samples, which may have media between turns. What is not finite counts as
    infinitely far apart. With `version`, tokens that weights of another version wrote are left out.
    """
    is_measured_T = batch.labels != IGNORE
    if version is not None:
        same = {v for sample in samples for one in sample.sequences() for v in one.versions}
        versions_T = batch.token_fields.get("versions", torch.tensor(max(same, default=version)))
        is_measured_T = is_measured_T & (versions_T == version)
    sampler_T = batch.token_fields["sampler_log_probs"].double()
    trainer_T = trainer_log_probs_T.double()
    gap_T = (trainer_T - sampler_T).abs().nan_to_num(nan=torch.inf)
    gap_T = torch.where(is_measured_T, gap_T, 0.0)
    sequence_T = torch.arange(batch.num_sequences).repeat_interleave(batch.lengths)
    of_sequence = [prompts[index] for index in batch.sequence_fields["group"].tolist()]
    trained = [one for sample in samples for one in sample.sequences() if one.tokens]
    modalities = [modality(prompt) for prompt in of_sequence]
    if trained:
        modalities = list(map(modality, of_sequence, trained))
    by_modality = {}
    for name in sorted(set(modalities)):
        has_name_S = torch.tensor([other == name for other in modalities])
        chosen_T = has_name_S[sequence_T] & is_measured_T
        if bool(chosen_T.any()):
            by_modality[name] = _gap_of(gap_T[chosen_T])
    by_turn = {}
    turn_T = batch.token_fields.get("turn")
    if turn_T is not None:
        for name, chosen_T in (("turn1", turn_T == 1), ("turn2+", turn_T > 1)):
            chosen_T = chosen_T & is_measured_T
            if bool(chosen_T.any()):
                by_turn[name] = _gap_of(gap_T[chosen_T])
    worst = []
    for at in gap_T.topk(min(show, batch.num_tokens)).indices.tolist():
        if not bool(is_measured_T[at]):
            continue
        sequence = int(sequence_T[at])
        start = max(int(batch.cu_seqlens[sequence]), at + 1 - CONTEXT)
        worst.append(
            WorstToken(
                float(sampler_T[at]),
                float(trainer_T[at]),
                int(batch.labels[at]),
                batch.input_ids[start : at + 1].tolist(),
                modalities[sequence],
                of_sequence[sequence].where,
            )
        )
    return Gap(by_modality, worst, by_turn)


def _gap_of(gaps: Tensor) -> ModalityGap:
    return ModalityGap(float(gaps.sum()), float(gaps.max()), len(gaps))
