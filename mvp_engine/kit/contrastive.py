"""ContrastiveEngine: InfoNCE and SigLIP with negatives from all ranks and micro-batches, by gradient caching.

Legend: B rows of a step or micro-batch, D width of an embedding, 2 the two views of a row.

A step embeds all rows without gradients, computes the loss of the whole step and its gradient with respect to each
embedding, then embeds each micro-batch again and multiplies. By the chain rule these are the gradients of one big
batch, on any split and any number of ranks. It costs one more forward and no memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mvp_engine.config.schema import Config
from mvp_engine.engine import Engine, StepContext
from mvp_engine.kit.contrastive_settings import ContrastiveConfig, ContrastiveLoss


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
    """A micro-batch with the losses of its rows, and the gradients with respect to their embeddings."""

    micro_batch: Any
    losses: Tensor  # (B,)
    grads: Tensor  # (B, 2, D)
    scalar_grads: dict[str, Tensor]  # this micro-batch's share


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
        with self.model_engine.eval_mode():
            own = list(self.model_engine.infer_micro_batches(ctx.micro_batches, self.embed))
        views_B2D, start = self.gather(own)
        views_B2D.requires_grad_()
        scalars = {name: value.detach().requires_grad_() for name, value in self.scalars().items()}
        loss_B = self.contrastive(views_B2D, scalars)
        grads = torch.autograd.grad(loss_B.sum(), [views_B2D, *scalars.values()])
        for index, embedded in enumerate(own):
            rows = slice(start, start + len(embedded))
            share = len(embedded) / len(loss_B)
            of_scalars = {n: grad * share for n, grad in zip(scalars, grads[1:], strict=True)}
            cached = CachedRows(
                ctx.micro_batches[index], loss_B.detach()[rows], grads[0][rows], of_scalars
            )
            ctx.micro_batches[index] = cached
            start += len(embedded)

    def forward_step(self, ctx: StepContext, micro_batch: CachedRows) -> tuple[Tensor, int]:
        along = (self.embed(micro_batch.micro_batch).float() * micro_batch.grads).sum()
        for name, value in self.scalars().items():
            along = along + value * micro_batch.scalar_grads[name]
        # The value of the loss, with the gradient of the product.
        loss_sum = micro_batch.losses.sum() + along - along.detach()
        return loss_sum, len(micro_batch.losses)

    def gather(self, own: list[Tensor]) -> tuple[Tensor, int]:
        """The embeddings of all ranks, and the place of this rank's first row among them."""
        mine = torch.cat([one.float().cpu() for one in own]) if own else None
        of_ranks = self.world.all_gather(mine)[:: self.layout.model_parallel_size]
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
        if self.world.is_main:
            ctx.log("loss", loss_B.sum(), len(loss_B))
            found = (similar_BB.argmax(1) == rows_B).sum()
            found_back = (similar_BB.argmax(0) == rows_B).sum()
            ctx.log("accuracy_first_to_second", found, len(loss_B))
            ctx.log("accuracy_second_to_first", found_back, len(loss_B))
