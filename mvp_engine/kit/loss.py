"""The loss of language models: a mean over all tokens that carry loss, of all micro-batches and ranks.

The kit gives sums and weights; the engine adds them up over everything and divides once. What it computes per token
comes out of the chunked head, so no option here makes logits of a whole batch alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from mvp_engine.config.schema import Fraction, NonNegative, Section
from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.engine.context import StepContext


class TokenLoss(Section):
    """The config section of this kit."""

    z_loss: NonNegative = 0.0  # times the square of log z: keeps the softmax's denominator near 1
    label_smoothing: Fraction = Field(
        default=0.0, lt=1
    )  # this share of the target lies evenly over the vocabulary


class TokenNormedLossKit:
    def __init__(self, settings: TokenLoss | None = None) -> None:
        self.settings = settings or TokenLoss()

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the loss needs of a model."""
        more = ("log_z",) if self.settings.z_loss else ()
        return ("log_probs", *more, *(("mean_log_probs",) if self.settings.label_smoothing else ()))

    def __call__(
        self,
        ctx: StepContext,
        model: nn.Module,
        batch: PackedBatch,
        each: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`(loss_sum, weight)` of a micro-batch, for a recipe to return from `forward_step`.

        `each` is called with the plain loss of each token, without a gradient, for whatever is to be logged of it.
        """
        if (
            self.settings == TokenLoss()
            and "weight" not in batch.token_fields
            and "loss" in getattr(model, "provides", ())
        ):
            ctx.count("tokens", batch.num_tokens)
            given = model(batch, ["loss", "losses"])
            if each is not None:
                each(given["losses"])
            return given["loss"], batch.num_loss_tokens
        scores = model(batch, self.outputs)
        if each is not None:
            each(-scores["log_probs"].detach())
        loss_T = self.per_token(scores, batch.labels)
        weight_T = self.weights(batch)
        if (
            self.settings != TokenLoss()
        ):  # what a model is compared by has none of the options in it
            ctx.log("nll", -(scores["log_probs"].detach() * weight_T).sum(), weight_T.sum())
        ctx.count("tokens", batch.num_tokens)
        return (loss_T * weight_T).sum(), weight_T.sum()

    def per_token(self, scores: Mapping[str, Tensor], labels_T: Tensor) -> Tensor:
        """The loss of each token; 0 where there is no label."""
        smooth, z = self.settings.label_smoothing, self.settings.z_loss
        loss_T = -scores["log_probs"]
        if smooth:
            loss_T = (1 - smooth) * loss_T - smooth * scores["mean_log_probs"]
        if z:
            loss_T = loss_T + z * scores["log_z"].square()
        return torch.where(labels_T == IGNORE, 0.0, loss_T)

    def weights(self, batch: PackedBatch) -> Tensor:
        """How much each token counts: 1 where it has a label, times `tokens["weight"]` if the batch has such."""
        weight_T = (batch.labels != IGNORE).float()
        own: Any = batch.token_fields.get("weight")
        return weight_T if own is None else weight_T * own
