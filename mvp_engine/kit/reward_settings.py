"""The config of a RewardEngine. It imports no torch."""

from __future__ import annotations

from pydantic import model_validator

from mvp_engine.config.schema import NonNegative, Section
from mvp_engine.kit.settings import MLLMConfig


class RewardLoss(Section):
    """The config section of the Bradley-Terry loss."""

    margin: str | None = None
    """A column of mllm.fields: by how much the chosen score should exceed the rejected one; null: 0 for all rows."""
    centring: NonNegative = 0.0
    """Weight of the squared sum of a pair's two scores, which keeps scores near 0; 0.01 is usual."""


class RewardConfig(MLLMConfig):
    """The config of a RewardEngine."""

    reward: RewardLoss = RewardLoss()
    """The loss on preference pairs."""

    @model_validator(mode="after")
    def _rows_are_pairs(self) -> RewardConfig:
        if not self.mllm.pairs:
            raise ValueError("a reward model compares pairs: set mllm.pairs=true")
        margin = self.reward.margin
        if margin is not None and margin not in self.mllm.fields:
            raise ValueError(
                f"reward.margin={margin} is no column of numbers: set mllm.fields={{{margin}: float}}"
            )
        if self.eval_generation is not None:
            raise ValueError("eval_generation: a reward model generates nothing. Remove it")
        return self
