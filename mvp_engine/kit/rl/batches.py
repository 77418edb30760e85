"""Prompts and their samples as one packed batch for training.

Legend: T tokens, S sequences. Entry t of a token field is about `labels[t]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.decoding import with_completion
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Sample


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
