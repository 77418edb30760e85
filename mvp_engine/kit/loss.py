"""The loss of language models: a mean over all tokens with a label, of all micro-batches and ranks.

The kit returns sums and weights; the engine adds them over the whole step and divides once. Per-token values come from
the chunked LM head, so no option here materializes the logits of a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import IGNORE, WEIGHT, PackedBatch
from mvp_engine.engine.hooks import StepContext
from mvp_engine.kit.settings import TokenLoss


class TokenNormedLossKit:
    """The cross-entropy loss of a step, normalized by its number of labels."""

    def __init__(self, settings: TokenLoss | None = None) -> None:
        self.settings = settings or TokenLoss()

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the model outputs that the loss needs."""
        names = ["log_probs"]
        if self.settings.z_loss:
            names.append("log_z")
        if self.settings.label_smoothing:
            names.append("mean_log_probs")
        return tuple(names)

    def __call__(
        self,
        ctx: StepContext,
        model: nn.Module,
        batch: PackedBatch,
        on_losses: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`(loss_sum, weight)` of a micro-batch, for a recipe to return from `forward_step`.

        `on_losses` is called with the plain loss of each token, without a gradient, for logging.
        """
        ctx.count("tokens", batch.num_tokens)
        if self.is_fused(model, batch):
            outputs = model(batch, ["loss", "losses"])
            if on_losses is not None:
                on_losses(outputs["losses"])
            return outputs["loss"], batch.num_loss_tokens
        outputs = model(batch, self.outputs)
        if on_losses is not None:
            on_losses(-outputs["log_probs"].detach())
        loss_T = self.per_token(outputs, batch.labels)
        weight_T = self.weights(batch)
        self.log_nll(ctx, outputs, weight_T)
        return (loss_T * weight_T).sum(), weight_T.sum()

    def is_fused(self, model: nn.Module, batch: PackedBatch) -> bool:
        """Whether the model's own sum is this loss: its head computes loss and gradient in one pass over the logits."""
        is_plain = self.settings == TokenLoss() and WEIGHT not in batch.token_fields
        return is_plain and "loss" in getattr(model, "provides", ())

    def log_nll(self, ctx: StepContext, outputs: Mapping[str, Tensor], weight_T: Tensor) -> None:
        """Log the loss without the terms of options, so that runs with other options stay comparable."""
        if self.settings != TokenLoss():
            ctx.log("nll", -(outputs["log_probs"].detach() * weight_T).sum(), weight_T.sum())

    def per_token(self, outputs: Mapping[str, Tensor], labels_T: Tensor) -> Tensor:
        """The loss of each token; 0 for a token without a label."""
        smoothing = self.settings.label_smoothing
        z_loss = self.settings.z_loss
        loss_T = -outputs["log_probs"]
        if smoothing:
            loss_T = (1 - smoothing) * loss_T - smoothing * outputs["mean_log_probs"]
        if z_loss:
            loss_T = loss_T + z_loss * outputs["log_z"].square()
        return torch.where(labels_T == IGNORE, 0.0, loss_T)

    def weights(self, batch: PackedBatch) -> Tensor:
        """The weight of each token: 1 if it has a label, times `token_fields["weight"]` where the batch has it."""
        weight_T = (batch.labels != IGNORE).float()
        own: Any = batch.token_fields.get(WEIGHT)
        return weight_T if own is None else weight_T * own


# Values of tokens and of sequences, for losses that compare sequences. Legend: T tokens, S sequences.


def sequence_sums(values_T: Tensor, batch: PackedBatch) -> Tensor:
    """The sum over each sequence's tokens, in a fixed order: an `index_add` on a GPU has none."""
    offsets = batch.cu_seqlens.long()
    sums: Tensor = torch.segment_reduce(values_T.float(), "sum", offsets=offsets, unsafe=True)
    return sums


def sequence_log_probs(log_probs_T: Tensor, batch: PackedBatch) -> Tensor:
    """The log-prob of each sequence's answer: the sum over its tokens with a label."""
    return sequence_sums(torch.where(batch.labels == IGNORE, 0.0, log_probs_T), batch)


def per_token(values_S: Tensor, batch: PackedBatch) -> Tensor:
    """The value of each token's sequence."""
    return values_S.repeat_interleave(batch.lengths, output_size=batch.num_tokens)


def last_token_scores(values_T: Tensor, batch: PackedBatch) -> Tensor:
    """The value of each sequence at its last token."""
    return values_T[batch.cu_seqlens[1:].long() - 1]
