"""RewardLossKit: the Bradley-Terry loss of a reward model on packed pairs, or regression on a number of each row.

Legend: S sequences. The model is a value model; the score of a sequence is its value at the last token, which has seen
all of it. An export is a sequence classifier with one label, which reads the same place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.config.schema import Config
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine.hooks import StepContext
from mvp_engine.errors import UserError
from mvp_engine.kit.loss import last_token_scores
from mvp_engine.kit.mllm import MLLMEngine
from mvp_engine.kit.preference.losses import check_pairs
from mvp_engine.kit.preference.settings import RewardConfig, RewardLoss


class RewardLossKit:
    """-log sigmoid(chosen - rejected - margin) of each pair, and optionally the centring of scores at 0.

    With a `target` it is the squared error (or Huber loss) of each row's score instead.
    """

    def __init__(self, settings: RewardLoss | None = None) -> None:
        self.settings = settings or RewardLoss()

    def __call__(
        self, ctx: StepContext, model: nn.Module, batch: PackedBatch
    ) -> tuple[Tensor, Tensor]:
        """`(loss_sum, weight)` of a micro-batch; the weight is its number of pairs, or of rows with a target."""
        ctx.count("tokens", batch.num_tokens)
        scores_S = last_token_scores(model(batch, ["values"])["values"], batch)
        if self.settings.target is not None:
            return self._regression(ctx, batch, scores_S, self.settings.target)
        is_chosen_S = batch.sequence_fields["side"] == 1
        other_S = scores_S.roll(-1)  # of a chosen side: its rejected one
        loss_S = -F.logsigmoid(scores_S - other_S - self._margins(batch))
        if self.settings.centring:
            loss_S = loss_S + self.settings.centring * (scores_S + other_S).square()
        pairs = is_chosen_S.sum()
        self._log(ctx, batch, scores_S.detach(), pairs)
        return torch.where(is_chosen_S, loss_S, 0.0).sum(), pairs

    def _regression(
        self, ctx: StepContext, batch: PackedBatch, scores_S: Tensor, target: str
    ) -> tuple[Tensor, Tensor]:
        targets_S = batch.sequence_fields[target].float()
        is_row_S = torch.ones_like(targets_S, dtype=torch.bool)
        if "sample" in batch.sequence_fields:
            is_row_S = batch.sequence_fields["sample"] >= 0  # none in a pack of bad rows only
        rows = is_row_S.sum()
        if self.settings.huber is None:
            loss_S = (scores_S - targets_S).square()
        else:
            loss_S = F.huber_loss(scores_S, targets_S, reduction="none", delta=self.settings.huber)
        error_S = (scores_S.detach() - targets_S).abs()
        ctx.log("absolute_error", torch.where(is_row_S, error_S, 0.0).sum(), rows)
        ctx.log("score", torch.where(is_row_S, scores_S.detach(), 0.0).sum(), rows)
        return torch.where(is_row_S, loss_S, 0.0).sum(), rows

    def _margins(self, batch: PackedBatch) -> Tensor | float:
        if self.settings.margin is None:
            return 0.0
        return batch.sequence_fields[self.settings.margin]

    def _log(self, ctx: StepContext, batch: PackedBatch, scores_S: Tensor, pairs: Tensor) -> None:
        sides_S = batch.sequence_fields["side"]
        difference_S = scores_S - scores_S.roll(-1)
        ctx.log("rewards/chosen", torch.where(sides_S == 1, scores_S, 0.0).sum(), pairs)
        ctx.log("rewards/rejected", torch.where(sides_S == -1, scores_S, 0.0).sum(), pairs)
        ctx.log("margin", torch.where(sides_S == 1, difference_S, 0.0).sum(), pairs)
        ctx.log("accuracy", ((sides_S == 1) & (difference_S > 0)).sum(), pairs)


class RewardEngine(MLLMEngine):
    """An MLLMEngine that trains a value model: chosen answers above rejected ones, or rows with their scores."""

    config_class: type[Config] = RewardConfig
    config: RewardConfig
    title = "A reward model"

    def describe_training(self) -> dict[str, Any]:
        return {"next_steps": {"Train with it": "mvp train RL_CONFIG reward.model={export}"}}

    @property
    def reward(self) -> RewardLossKit:
        return RewardLossKit(self.config.reward)

    def prepare_dataloader(self, split: str) -> Any:
        if self.config.reward.target is None:
            self.data.require_pairs(split)
        return super().prepare_dataloader(split)

    def train_pre_step(self, ctx: StepContext) -> None:
        super().train_pre_step(ctx)
        for batch in ctx.micro_batches:
            if self.config.reward.target is None:
                check_pairs(batch)
            self._check_last_tokens(batch)

    def _check_last_tokens(self, batch: PackedBatch) -> None:
        """transformers' classifiers read the last token that is not the pad token: it must be the last one."""
        model: Any = self.model
        pad = getattr(model.hf.config.get_text_config(), "pad_token_id", None)
        last_S = batch.input_ids[batch.cu_seqlens[1:].long() - 1]
        if pad is not None and bool((last_S == pad).any()):
            raise UserError(
                f"a row ends with the pad token {pad} of the model's config: an exported classifier would read its "
                "score one token earlier. Set model.config.pad_token_id to a token that no row ends with"
            )

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return self.reward(ctx, self.model, micro_batch)

    def prepare_model(self) -> nn.Module:
        if self.config.model.type != "value_model":
            raise UserError(
                f"model.type={self.config.model.type}: a reward model has a value head. Set model.type=value_model"
            )
        return super().prepare_model()
