"""ContrastiveEngine: InfoNCE and SigLIP with negatives from all ranks and micro-batches, by gradient caching.

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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mvp_engine.config.schema import Config
from mvp_engine.data import derived_seed
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import Engine, StepContext
from mvp_engine.errors import UserError
from mvp_engine.kit.preference.settings import ContrastiveConfig, ContrastiveLoss

# Per-sequence fields of packed micro-batches, with the values of a row at its first sequence.
LOSSES = "contrastive_losses"
GRADS = "contrastive_grads"


class ContrastiveLossKit:
    """The loss of each row, from both views of all rows and the scale of their similarities."""

    def __init__(self, settings: ContrastiveLoss | None = None) -> None:
        self.settings = settings or ContrastiveLoss()

    def __call__(self, views_B2D: Tensor, scalars: dict[str, Tensor] | None = None) -> Tensor:
        """(B,) losses. `scalars` are learnt values of `log_scale` and `bias`, in place of the settings'."""
        given = scalars or {}
        scale = given["log_scale"].exp() if "log_scale" in given else 1 / self.settings.temperature
        first_BD, second_BD = views_B2D.unbind(1)
        logits_BB = scale * first_BD @ second_BD.T
        if self.settings.loss == "siglip":
            logits_BB = logits_BB + given.get("bias", self.settings.bias)
            is_own_BB = torch.eye(len(logits_BB), dtype=torch.bool, device=logits_BB.device)
            return -F.logsigmoid(torch.where(is_own_BB, logits_BB, -logits_BB)).sum(1)
        rows_B = torch.arange(len(logits_BB), device=logits_BB.device)
        to_second_B = F.cross_entropy(logits_BB, rows_B, reduction="none")
        to_first_B = F.cross_entropy(logits_BB.T, rows_B, reduction="none")
        return (to_second_B + to_first_B) / 2


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


class ContrastiveEngine(Engine):
    """An engine for rows that are pairs of views. A recipe defines `embed`, and the model and data as usual."""

    config_class: type[Config] = ContrastiveConfig
    config: ContrastiveConfig

    def embed(self, micro_batch: Any) -> Tensor:
        """(B, 2, D): the embeddings of both views of each row, normalized."""
        raise NotImplementedError(f"{type(self).__name__} must define embed(micro_batch)")

    def scalars(self) -> dict[str, Tensor]:
        """Parameters of the model that the loss uses itself: `log_scale` and `bias`, if they are learnt."""
        return {}

    @property
    def contrastive(self) -> ContrastiveLossKit:
        return ContrastiveLossKit(self.config.contrastive)

    # ---- Training -----------------------------------------------------------------------------------------

    def train_pre_step(self, ctx: StepContext) -> None:
        super().train_pre_step(ctx)
        own = self._embed_step(ctx)
        views_B2D, start = self.gather(own)
        views_B2D.requires_grad_()
        scalars = {name: value.detach().requires_grad_() for name, value in self.scalars().items()}
        loss_B = self.contrastive(views_B2D, scalars)
        grads = torch.autograd.grad(loss_B.sum(), [views_B2D, *scalars.values()])
        # A row's share of the gradients of the scalars: the rows of all forwards add up to all of it.
        self._scalar_grads = dict(
            zip(scalars, [grad / len(loss_B) for grad in grads[1:]], strict=True)
        )
        for index, embedded in enumerate(own):
            places = slice(start, start + len(embedded))
            rows = CachedRows(loss_B.detach()[places], grads[0][places])
            micro_batch = ctx.micro_batches[index]
            if isinstance(micro_batch, PackedBatch):
                rows.add_to(micro_batch)
            else:
                ctx.micro_batches[index] = CachedBatch(micro_batch, rows, index)
            start += len(embedded)

    def _embed_step(self, ctx: StepContext) -> list[Tensor]:
        """The embeddings of all micro-batches, without gradients but with dropout."""
        modes = [(module, module.training) for module in self.model.modules()]
        indices = count()
        with self.model_engine.eval_mode():
            for module, training in modes:
                module.training = training
            results = self.model_engine.infer_micro_batches(
                ctx.micro_batches, lambda one: self._embed(ctx, one, next(indices))
            )
            return list(results)

    def _embed(self, ctx: StepContext, micro_batch: Any, index: int) -> Tensor:
        """`embed` with random numbers that depend on the step and the micro-batch alone."""
        which = micro_batch.num_tokens if isinstance(micro_batch, PackedBatch) else index
        seed = (self.config.seed, "contrastive", ctx.step, self.layout.data_rank, which)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(derived_seed(*seed))
            return self.embed(micro_batch)

    def forward_step(self, ctx: StepContext, micro_batch: Any) -> tuple[Tensor, int]:
        if isinstance(micro_batch, PackedBatch):
            views_B2D = self._embed(ctx, micro_batch, 0)
            rows = CachedRows.of(micro_batch, len(views_B2D))
        else:
            views_B2D = self._embed(ctx, micro_batch.micro_batch, micro_batch.number)
            rows = micro_batch.rows
        along = (views_B2D.float() * rows.grads).sum()
        for name, value in self.scalars().items():
            along = along + value * self._scalar_grads[name] * len(rows.losses)
        # The value of the loss, with the gradient of the product.
        loss_sum = rows.losses.sum() + along - along.detach()
        return loss_sum, len(rows.losses)

    def gather(self, own: list[Tensor]) -> tuple[Tensor, int]:
        """The embeddings of all ranks, and the place of this rank's first row among them."""
        mine = torch.cat([one.float().cpu() for one in own]) if own else None
        of_ranks = self.layout.of_data_ranks(self.world.all_gather(mine))
        before = of_ranks[: self.layout.data_rank]
        start = sum(len(one) for one in before if one is not None)
        return torch.cat([one for one in of_ranks if one is not None]).to(self.device), start

    # ---- Evaluation ---------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float | None]:
        self._held_out: list[Tensor] = []
        return super().evaluate()

    def eval_step(self, ctx: StepContext, micro_batch: Any) -> None:
        views_B2D = self.embed(micro_batch)
        if not ctx.is_dummy:
            self._held_out.append(views_B2D)

    def eval_end(self, ctx: StepContext) -> None:
        """Loss and retrieval accuracy in both directions, among all held-out rows."""
        views_B2D, _ = self.gather(self._held_out)
        scalars = {name: value.detach() for name, value in self.scalars().items()}
        loss_B = self.contrastive(views_B2D, scalars)
        first_BD, second_BD = views_B2D.unbind(1)
        rows_B = torch.arange(len(loss_B), device=loss_B.device)
        similar_BB = first_BD @ second_BD.T
        if self.layout.is_metrics_rank:
            ctx.log("loss", loss_B.sum(), len(loss_B))
            found = (similar_BB.argmax(1) == rows_B).sum()
            found_back = (similar_BB.argmax(0) == rows_B).sum()
            ctx.log("accuracy_first_to_second", found, len(loss_B))
            ctx.log("accuracy_second_to_first", found_back, len(loss_B))
