"""The loss of action models: a mean over all entries of action chunks that carry loss, and over text labels.

Sums and weights, as in every kit: the engine divides once by the weights of all micro-batches and ranks.
"""

from __future__ import annotations

from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine.context import StepContext


def action_loss(
    ctx: StepContext, model: nn.Module, batch: PackedBatch, text_weight: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`(loss_sum, weight)` of a micro-batch, for a recipe to return from `forward_step`.

    Each entry of a chunk has weight 1. `text_weight` is that of a text label, in packs with rows of a vision-language
    data set; at 0 the model computes no text loss.
    """
    ctx.count("tokens", batch.num_tokens)
    names = ["action_losses"] if text_weight == 0 else ["action_losses", "loss"]
    outputs = model(batch, names)
    loss_sum = outputs["action_losses"].sum()
    entries = batch.sequence_fields["action_mask"].sum()
    if text_weight == 0:
        return loss_sum, entries
    labels = batch.num_loss_tokens
    ctx.log("action_loss", loss_sum.detach(), entries)
    ctx.log("text_loss", outputs["loss"].detach(), labels)
    return loss_sum + text_weight * outputs["loss"], entries + text_weight * labels
