"""Contrastive training: numbers as digits and as words find each other. Two small towers, no labels.

Legend: B rows, D width of an embedding, 2 the two views of a row.

The loss compares each row with all rows of the step, on all ranks. So a step has two passes: the first one embeds all
rows without gradients, and computes the loss and its gradient with respect to each embedding; the second one embeds
each micro-batch again and multiplies. The gradients are those of one big batch (docs/whole_step_loss.md).
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mvp_engine.engine import Engine, StepContext
from mvp_engine.kit.preference import GradientCache, gather_views, info_nce, retrieval_accuracy, siglip
from mvp_engine.model_engine.optim import build_optimizer, build_scheduler

from .model import DIGITS, LETTERS, TwoTowers
from .settings import NumbersConfig

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HELD_OUT = 500  # numbers, by chance


class NumbersEngine(Engine):
    config_class = NumbersConfig
    config: NumbersConfig

    # ---- Model, data, optimizer and schedule -----------------------------------------------------

    def prepare_model(self) -> nn.Module:
        return TwoTowers(self.config.towers, self.config.contrastive.loss)

    def prepare_dataloader(self, split: str) -> Any:
        numbers = torch.randperm(10**DIGITS, generator=torch.Generator().manual_seed(0)).tolist()
        numbers = numbers[:HELD_OUT] if split == "eval" else numbers[HELD_OUT:]
        texts = [f"{n:0{DIGITS}d}" for n in numbers]
        digits = torch.tensor([[int(digit) for digit in text] for text in texts])
        letters = torch.tensor([_letters(WORDS[d]) for d in range(10)])[digits].flatten(1)
        return self.sample_loader(TensorDataset(digits, letters), split)

    def prepare_optimizer(self, model: nn.Module) -> Any:
        return build_optimizer(model, self.config.optim)  # AdamW

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return build_scheduler(optimizer, self.config.optim, self.total_steps)

    # ---- The loss --------------------------------------------------------------------------------

    def embed(self, micro_batch: Any) -> Tensor:
        """(B, 2, D): the embeddings of both views of each row, normalized."""
        views: Tensor = self.model(*micro_batch)
        return views

    def scalars(self) -> dict[str, Tensor]:
        """Parameters of the model that the loss uses itself."""
        model: Any = self.model
        learnt = {"log_scale": model.log_scale}
        return learnt | ({"bias": model.bias} if self.config.contrastive.loss == "siglip" else {})

    def losses(self, views_B2D: Tensor, scalars: dict[str, Tensor]) -> Tensor:
        """(B,): the loss of each row among all rows. Change the objective here."""
        settings = self.config.contrastive
        scale = scalars["log_scale"].exp() if "log_scale" in scalars else 1 / settings.temperature
        first_BD, second_BD = views_B2D.unbind(1)
        logits_BB = scale * first_BD @ second_BD.T
        if settings.loss == "siglip":
            return siglip(logits_BB + scalars.get("bias", settings.bias))
        return info_nce(logits_BB)

    # ---- One step --------------------------------------------------------------------------------

    @cached_property
    def cache(self) -> GradientCache:
        return GradientCache(self)

    def train_pre_step(self, ctx: StepContext) -> None:
        """The loss of the whole step, and its gradient with respect to each embedding."""
        self.cache.first_pass(ctx)

    def forward_step(self, ctx: StepContext, micro_batch: Any) -> tuple[Tensor, int]:
        """The loss summed over the rows of a micro-batch, and their number."""
        return self.cache.second_pass(ctx, micro_batch)

    # ---- Evaluation: all held-out rows among each other ------------------------------------------

    def evaluate(self) -> dict[str, float | None]:
        self.held_out: list[Tensor] = []
        return super().evaluate()

    def eval_step(self, ctx: StepContext, micro_batch: Any) -> None:
        views_B2D = self.embed(micro_batch)
        if not ctx.is_dummy:
            self.held_out.append(views_B2D)

    def eval_end(self, ctx: StepContext) -> None:
        """Loss and retrieval accuracy in both directions."""
        views_B2D, _ = gather_views(self, self.held_out)
        scalars = {name: value.detach() for name, value in self.scalars().items()}
        loss_B = self.losses(views_B2D, scalars)
        to_second, to_first = retrieval_accuracy(views_B2D)
        if self.layout.is_metrics_rank:
            ctx.log("loss", loss_B.sum(), len(loss_B))
            ctx.log("accuracy_first_to_second", to_second, len(loss_B))
            ctx.log("accuracy_second_to_first", to_first, len(loss_B))


def _letters(word: str) -> list[int]:
    return [ord(letter) - ord("a") + 1 if letter != " " else 0 for letter in word.ljust(LETTERS)]
