"""A reward model: chosen answers get higher scores than rejected ones, or rows get the scores that a column has.

Legend: T tokens, S sequences. The sides of a pair are adjacent sequences of one pack, the chosen one first, so
`x_S.roll(-1)` is, at a chosen side, the value of its rejected side. No shape depends on the data.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.errors import UserError
from mvp_engine.kit import MLLMEngine, MLLMModelKit
from mvp_engine.kit.loss import last_token_scores
from mvp_engine.kit.preference import check_last_tokens, check_pairs, log_pairs

from .settings import ReviewsConfig


class ReviewsEngine(MLLMEngine):
    config_class = ReviewsConfig
    config: ReviewsConfig
    title = "A reward model"

    # ---- Model: a language model with a linear head of one output, instead of that over the vocabulary

    def prepare_model(self) -> nn.Module:
        model = self.config.model
        if model.type != "value_model":
            raise UserError(f"model.type={model.type}: a reward model has a value head. Set model.type=value_model")
        return MLLMModelKit(self.config.lora).of_engine(self)

    # ---- Data: packs of pairs (`data.pairs`), or of rows with a score (`data.fields`) ------------

    def prepare_dataloader(self, split: str) -> Any:
        if self.config.reward_loss.target is None:
            self.data.require_pairs(split)
        return self.data.engine_loader(self, split)

    # ---- Optimizer and schedule ------------------------------------------------------------------

    def prepare_optimizer(self, model: nn.Module) -> Any:
        return self.optim.build_optimizer(model)  # of the section `optim`, by default AdamW

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    # ---- One step --------------------------------------------------------------------------------

    def train_pre_step(self, ctx: StepContext) -> None:
        super().train_pre_step(ctx)
        if self.config.reward_loss.target is None:
            check_pairs(ctx.micro_batches)
        check_last_tokens(self.model, ctx.micro_batches)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The loss summed over pairs (with `reward_loss.target`: over rows), and their number."""
        settings = self.config.reward_loss
        ctx.count("tokens", micro_batch.num_tokens)
        # The score of a sequence is its value at the last token, which has seen all of it.
        scores_S = last_token_scores(self.model(micro_batch, ["values"])["values"], micro_batch)
        if settings.target is not None:
            return self.regression(ctx, micro_batch, scores_S, settings.target)
        other_S = scores_S.roll(-1)
        margin_S = 0.0 if settings.margin is None else micro_batch.sequence_fields[settings.margin]
        loss_S = -F.logsigmoid(scores_S - other_S - margin_S)  # Bradley-Terry
        if settings.centring:
            loss_S = loss_S + settings.centring * (scores_S + other_S).square()
        is_chosen_S = micro_batch.sequence_fields["side"] == 1
        log_pairs(ctx, micro_batch, scores_S.detach())
        return torch.where(is_chosen_S, loss_S, 0.0).sum(), is_chosen_S.sum()

    def regression(self, ctx: StepContext, batch: PackedBatch, scores_S: Tensor, column: str) -> tuple[Tensor, Tensor]:
        """The squared error, or Huber loss, of each row's score."""
        targets_S = batch.sequence_fields[column].float()
        is_row_S = torch.ones_like(targets_S, dtype=torch.bool)
        if "sample" in batch.sequence_fields:
            is_row_S = batch.sequence_fields["sample"] >= 0  # none in a pack of bad rows only
        rows = is_row_S.sum()
        loss_S = (scores_S - targets_S).square()
        if self.config.reward_loss.huber is not None:
            loss_S = F.huber_loss(scores_S, targets_S, reduction="none", delta=self.config.reward_loss.huber)
        error_S = (scores_S.detach() - targets_S).abs()
        ctx.log("absolute_error", torch.where(is_row_S, error_S, 0.0).sum(), rows)
        ctx.log("score", torch.where(is_row_S, scores_S.detach(), 0.0).sum(), rows)
        return torch.where(is_row_S, loss_S, 0.0).sum(), rows

    # ---- Evaluation: the same loss and metrics on held-out rows. Export: a sequence classifier ---

    def describe_training(self) -> dict[str, Any]:
        return {"next_steps": {"Train with it": "mvp train RL_CONFIG reward.model={export}"}}
