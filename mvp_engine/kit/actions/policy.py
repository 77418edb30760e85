"""Actions of an action model, on every layout: what a closed loop asks for at each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine.hooks import StepContext
from mvp_engine.kit.actions.action_model import with_noise
from mvp_engine.model_engine import ModelEngine


def sample_actions(
    engine: ModelEngine,
    batch: PackedBatch,
    noise: Tensor | None = None,
    steps: int | None = None,
    budget: int | None = None,
) -> Tensor:
    """Normalized actions (S, C, A) on the CPU. Where ranks share a forward, all of them call it.

    `noise` (S, C, A): where a flow head starts; None: the first draw of the batch. `steps`: Euler steps, by default
    those of the model's config. `budget`: tokens of a micro-batch; None: all sequences in one.
    """
    batch = with_noise(batch, noise)
    split = batch.split(batch.num_tokens if budget is None else budget)
    model: Any = engine.model

    def act(part: PackedBatch) -> Tensor:
        actions: Tensor = model(part, ["actions"], steps=steps)["actions"]
        return actions.cpu()

    with engine.eval_mode():
        parts = list(engine.infer_micro_batches(split.parts, act))
    order = torch.tensor([sequence for members in split.members for sequence in members])
    return torch.cat(parts)[order.argsort()]


# The loss of action models: a mean over all entries of action chunks that carry loss, and over text labels.
#
# Sums and weights, as in every kit: the engine divides once by the weights of all micro-batches and ranks.


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
