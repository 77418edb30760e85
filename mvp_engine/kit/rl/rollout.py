"""Rollouts: completions of prompts with the log-probs that they were sampled with.

`Rollout` is what the controller calls; token ids in, token ids out, never text. `PackedRollout` samples with the
actor's own weights. Servers are in modules of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.kit.decoding import Decoding, with_completion
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


@dataclass(frozen=True)
class Sampling:
    """How rollouts are sampled. There is no top_k or top_p: a trainer's log-probs would not be those of the sampler."""

    max_new_tokens: int
    temperature: float = 1.0
    samples: int = 1  # completions per prompt
    seed: int = 0  # the same prompts get other completions with another seed
    # Token ids; a completion ends with the first of these, and includes it.
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.samples < 1:
            raise UserError(
                f"Sampling: max_new_tokens={self.max_new_tokens} and samples={self.samples} must be at least 1"
            )
        if self.temperature <= 0:
            raise UserError(
                f"Sampling: temperature={self.temperature} must be more than 0: a greedy completion has no log-probs "
                "to train with"
            )


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
        decoding = Decoding(
            sampling.max_new_tokens,
            stop=sampling.stop,
            temperature=sampling.temperature,
            samples=sampling.samples,
            seed=sampling.seed,
            budget=self.budget,
        )
        batch = PackedBatch.concat([prompt.batch for prompt in prompts])
        keys = [prompt.key for prompt in prompts]
        found = self.group.generate(batch, decoding, keys)
        return [
            Sample(
                one.prompt,
                one.tokens,
                one.log_probs,
                self.version,
                "stop" if one.is_finished else "length",
            )
            for one in found
        ]

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


def with_fields(batch: PackedBatch, fields: dict[str, Tensor]) -> PackedBatch:
    """The batch with more token fields."""
    return PackedBatch(
        batch.input_ids,
        batch.labels,
        batch.position_ids,
        batch.cu_seqlens,
        {**batch.token_fields, **fields},
        batch.sequence_fields,
        batch.media,
    )
