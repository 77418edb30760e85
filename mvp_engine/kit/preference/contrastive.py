"""Losses on all rows of a step: negatives from all ranks and micro-batches, by gradient caching.

Legend: B rows of a step or micro-batch, D width of an embedding, 2 the two views of a row.

A step embeds all rows without gradients, computes the loss of the whole step and its gradient with respect to each
embedding, then embeds each micro-batch again and multiplies. By the chain rule these are the gradients of one big
batch, on any split and any number of ranks. It costs one more forward and no memory. Both forwards of a micro-batch
draw the same random numbers, so that dropout has the same masks.

Micro-batches may be PackedBatches, with media and on sharded ranks: a row is then as many adjacent sequences for each
row of the micro-batch, such as two, one for each view.
"""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mvp_engine.data import derived_seed
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import Engine, StepContext
from mvp_engine.errors import UserError

# Per-sequence fields of packed micro-batches, with the values of a row at its first sequence.
LOSSES = "contrastive_losses"
GRADS = "contrastive_grads"


def info_nce(logits_BB: Tensor) -> Tensor:
    """(B,) losses from similarities: the softmax over all rows of the step, in both directions."""
    rows_B = torch.arange(len(logits_BB), device=logits_BB.device)
    to_second_B = F.cross_entropy(logits_BB, rows_B, reduction="none")
    to_first_B = F.cross_entropy(logits_BB.T, rows_B, reduction="none")
    return (to_second_B + to_first_B) / 2


def siglip(logits_BB: Tensor) -> Tensor:
    """(B,) losses from similarities: each pair of rows by itself, own views 1 and others 0."""
    is_own_BB = torch.eye(len(logits_BB), dtype=torch.bool, device=logits_BB.device)
    return -F.logsigmoid(torch.where(is_own_BB, logits_BB, -logits_BB)).sum(1)


class CachedRows(NamedTuple):
    """The losses of a micro-batch's rows, and the gradients with respect to their embeddings."""

    losses: Tensor  # (B,)
    grads: Tensor  # (B, 2, D)

    def add_to(self, batch: PackedBatch) -> None:
        """Put them into the batch itself: the model engine plans forwards by the media of PackedBatches."""
        rows = len(self.losses)
        size = batch.num_sequences // rows  # sequences of a row
        if size * rows != batch.num_sequences:
            raise UserError(
                f"embed returned {rows} rows for {batch.num_sequences} packed sequences: each row needs the same "
                "number of adjacent sequences"
            )
        for name, values in ((LOSSES, self.losses), (GRADS, self.grads.flatten(1))):
            field = values.new_zeros(batch.num_sequences, *values.shape[1:])
            field[::size] = values
            batch.sequence_fields[name] = field.to(batch.input_ids.device)

    @staticmethod
    def of(batch: PackedBatch, rows: int) -> CachedRows:
        size = batch.num_sequences // rows
        grads = batch.sequence_fields[GRADS][::size]
        return CachedRows(batch.sequence_fields[LOSSES][::size], grads.unflatten(1, (2, -1)))


class CachedBatch(NamedTuple):
    """A micro-batch of any other type with its rows."""

    micro_batch: Any
    rows: CachedRows
    number: int  # of the micro-batch in its step


class WholeStepLoss(Protocol):
    """What a recipe defines, in its engine."""

    def embed(self, micro_batch: Any) -> Tensor:
        """(B, 2, D): the embeddings of both views of each row, normalized."""

    def scalars(self) -> dict[str, Tensor]:
        """Parameters of the model that `losses` uses itself, such as a learnt temperature."""

    def losses(self, views_B2D: Tensor, scalars: dict[str, Tensor]) -> Tensor:
        """(B,): the loss of each row, from the views of all rows of the step."""


class GradientCache:
    """The two passes of a step over its rows, for an engine with the methods of `WholeStepLoss`."""

    def __init__(self, engine: Any) -> None:
        self.engine: Any = engine
        self._scalar_grads: dict[str, Tensor] = {}

    def first_pass(self, ctx: StepContext) -> None:
        """Embed all rows of the step, and put the gradients of its loss into the micro-batches."""
        engine = self.engine
        embedded = self._embed_step(ctx)
        views_B2D, start = gather_views(engine, embedded)
        views_B2D.requires_grad_()
        scalars = {name: one.detach().requires_grad_() for name, one in engine.scalars().items()}
        loss_B = engine.losses(views_B2D, scalars)
        grads = torch.autograd.grad(loss_B.sum(), [views_B2D, *scalars.values()])
        # A row's share of the gradients of the scalars: the rows of all forwards add up to all of it.
        shares = [grad / len(loss_B) for grad in grads[1:]]
        self._scalar_grads = dict(zip(scalars, shares, strict=True))
        for index, views in enumerate(embedded):
            places = slice(start, start + len(views))
            rows = CachedRows(loss_B.detach()[places], grads[0][places])
            micro_batch = ctx.micro_batches[index]
            if isinstance(micro_batch, PackedBatch):
                rows.add_to(micro_batch)
            else:
                ctx.micro_batches[index] = CachedBatch(micro_batch, rows, index)
            start += len(views)

    def second_pass(self, ctx: StepContext, micro_batch: Any) -> tuple[Tensor, int]:
        """`(loss_sum, weight)` of a micro-batch: the loss of its rows, with their share of the gradient."""
        if isinstance(micro_batch, PackedBatch):
            views_B2D = self._embed(ctx, micro_batch, 0)
            rows = CachedRows.of(micro_batch, len(views_B2D))
        else:
            views_B2D = self._embed(ctx, micro_batch.micro_batch, micro_batch.number)
            rows = micro_batch.rows
        along = (views_B2D.float() * rows.grads).sum()
        for name, value in self.engine.scalars().items():
            along = along + value * self._scalar_grads[name] * len(rows.losses)
        # The value of the loss, with the gradient of the product.
        return rows.losses.sum() + along - along.detach(), len(rows.losses)

    def _embed_step(self, ctx: StepContext) -> list[Tensor]:
        """The embeddings of all micro-batches, without gradients but with dropout."""
        engine = self.engine
        modes = [(module, module.training) for module in engine.model.modules()]
        indices = count()
        with engine.model_engine.eval_mode():
            for module, training in modes:
                module.training = training
            results = engine.model_engine.infer_micro_batches(
                ctx.micro_batches, lambda batch: self._embed(ctx, batch, next(indices))
            )
            return list(results)

    def _embed(self, ctx: StepContext, micro_batch: Any, index: int) -> Tensor:
        """`embed` with random numbers that depend on the step and the micro-batch alone."""
        engine = self.engine
        which = micro_batch.num_tokens if isinstance(micro_batch, PackedBatch) else index
        seed = (engine.config.seed, "contrastive", ctx.step, engine.layout.data_rank, which)
        with torch.random.fork_rng([engine.device] if engine.device.type == "cuda" else []):
            torch.manual_seed(derived_seed(*seed))
            views: Tensor = engine.embed(micro_batch)
            return views


def gather_views(engine: Engine, views: list[Tensor]) -> tuple[Tensor, int]:
    """The embeddings of all ranks, and the place of this rank's first row among them. All ranks call it."""
    mine = torch.cat([one.float().cpu() for one in views]) if views else None
    of_ranks = engine.layout.of_data_ranks(engine.world.all_gather(mine))
    before = of_ranks[: engine.layout.data_rank]
    start = sum(len(one) for one in before if one is not None)
    return torch.cat([one for one in of_ranks if one is not None]).to(engine.device), start


def retrieval_accuracy(views_B2D: Tensor) -> tuple[Tensor, Tensor]:
    """How many rows find their second view by the first one among all rows, and the other way round."""
    first_BD, second_BD = views_B2D.unbind(1)
    rows_B = torch.arange(len(first_BD), device=first_BD.device)
    similar_BB = first_BD @ second_BD.T
    return (similar_BB.argmax(1) == rows_B).sum(), (similar_BB.argmax(0) == rows_B).sum()
