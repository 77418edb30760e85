"""Rollouts: completions of prompts with the log-probs that they were sampled with.

`Rollout` is what the controller calls; token ids in, token ids out, never text. `PackedRollout` samples with the
actor's own weights. Servers are in modules of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.errors import UserError, count
from mvp_engine.kit.decoding import Completion, Decoding, with_completion
from mvp_engine.kit.rl.prompts import Prompt

if TYPE_CHECKING:
    from mvp_engine.kit.rl.prompts import Prompt
    from mvp_engine.worker.group import WorkerGroup

Reason = Literal["stop", "length"]
Buckets = Iterable[list[tuple[str, Tensor]]]  # weights by their Hugging Face names


@dataclass
class Sample:
    """One completion of a prompt.

    Log-probs are those of the distribution that the tokens were drawn from: at the temperature of the sampling, without
    placeholders of media.
    """

    prompt: int  # index in the list that was given to `generate`
    tokens: list[int]  # with the stop token, if there is one
    log_probs: list[float]
    version: int  # of the weights that wrote it
    reason: Reason  # "length": cut after `max_new_tokens`

    @classmethod
    def of(cls, completion: Completion, version: int) -> Sample:
        reason: Reason = "stop" if completion.is_finished else "length"
        return cls(completion.prompt, completion.tokens, completion.log_probs, version, reason)


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
    """A sampler of completions with weights that the trainer sends."""

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Sample]:
        """`sampling.samples` completions of each prompt, in the order of the prompts."""
        ...

    def sync(self, weights: Buckets | None, version: int) -> None:
        """From now on sample with these weights; None: the sampler has the trainer's own, only the version changes."""
        ...

    def close(self) -> None: ...


class PackedRollout:
    """Our own decode, by the ranks of a worker group: the actor, or a group with a layout of its own.

    The completions of a prompt depend on the weights, the prompt's key and the seed: not on the layout, nor on which
    prompts are generated together. `budget`: the most tokens of a forward over prompts.
    """

    def __init__(self, group: WorkerGroup, *, budget: int) -> None:
        self.group = group
        self.budget = budget
        self.version = 0

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Sample]:
        if not prompts:
            return []
        batch = PackedBatch.concat([prompt.batch for prompt in prompts])
        keys = [prompt.key for prompt in prompts]
        completions = self.group.generate(batch, replace(sampling, budget=self.budget), keys)
        return [Sample.of(completion, self.version) for completion in completions]

    def sync(self, weights: Buckets | None, version: int) -> None:
        if weights is not None:
            self.group.load_weights(weights)
        self.version = version

    def close(self) -> None:
        """The group is its owner's to close."""


# Prompts and their samples as one packed batch for training.
#
# Legend: T tokens, S sequences. Entry t of a token field is about `labels[t]`.


def rollout_batch(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> PackedBatch:
    """One sequence per sample: its prompt and the tokens that were drawn, never tokenized again, which carry loss.

    Token field `sampler_log_probs`; sequence field `group`, the index of the prompt. Each sample has a token or more.
    """
    sequences = [_sequence(prompts[sample.prompt], sample) for sample in samples]
    return PackedBatch.concat(sequences)


def _sequence(prompt: Prompt, sample: Sample) -> PackedBatch:
    batch = with_completion(prompt.batch, None, sample.tokens)
    # The first new token is predicted at the last one of the prompt.
    first = prompt.batch.num_tokens - 1
    last = first + len(sample.tokens)
    batch.labels[first:last] = batch.input_ids[first + 1 :]
    log_probs_T = torch.zeros(batch.num_tokens)
    log_probs_T[first:last] = torch.tensor(sample.log_probs)
    batch.token_fields["sampler_log_probs"] = log_probs_T
    batch.sequence_fields["group"] = torch.tensor([sample.prompt])
    return batch


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

    def metrics(self) -> dict[str, tuple[float, float]]:
        """The mean gap of each modality, as (sum, weight)."""
        return {f"gap/{name}": (gap.total, gap.tokens) for name, gap in self.by_modality.items()}

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
            "rl.importance_cap corrects for a small gap; generation.max_gap=null trains with any.",
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
            "generation.gap_interval=1 the worst tokens are shown. rl.importance_cap corrects for a small gap; "
            "generation.max_gap=null trains with any"
        )


def modality(prompt: Prompt) -> str:
    """The kinds of media in a prompt: image, audio+image, ...; text if it has none."""
    return "+".join(sorted({str(item["type"]) for item in prompt.media})) or "text"


def measure_gap(
    batch: PackedBatch, trainer_log_probs_T: Tensor, prompts: Sequence[Prompt], show: int = 5
) -> Gap:
    """Compare the trainer's log-probs with the token field `sampler_log_probs`, on the CPU.

    `batch` is that of `rollout_batch`: its labels are the sampled tokens, its sequence field `group` says the prompt of
    each sequence. What is not finite counts as infinitely far apart.
    """
    sampler_T = batch.token_fields["sampler_log_probs"].double()
    trainer_T = trainer_log_probs_T.double()
    gap_T = (trainer_T - sampler_T).abs().nan_to_num(nan=torch.inf)
    gap_T = torch.where(batch.labels == IGNORE, 0.0, gap_T)
    sequence_T = torch.arange(batch.num_sequences).repeat_interleave(batch.lengths)
    of_sequence = [prompts[index] for index in batch.sequence_fields["group"].tolist()]
    modalities = [modality(prompt) for prompt in of_sequence]
    by_modality = {}
    for name in sorted(set(modalities)):
        has_name_S = torch.tensor([other == name for other in modalities])
        chosen_T = has_name_S[sequence_T] & (batch.labels != IGNORE)
        if bool(chosen_T.any()):
            gaps = gap_T[chosen_T]
            by_modality[name] = ModalityGap(float(gaps.sum()), float(gaps.max()), len(gaps))
    worst = []
    for at in gap_T.topk(min(show, batch.num_tokens)).indices.tolist():
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
    return Gap(by_modality, [one for one in worst if one.token != IGNORE])
