"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from __future__ import annotations

from pydantic import model_validator

from mvp_engine.config import Section
from mvp_engine.config.schema import NonNegative, Positive
from mvp_engine.kit import MLLMConfig


class RewardLoss(Section):
    """The config section of the loss of scores: Bradley-Terry on pairs, or regression on a column."""

    margin: str | None = None
    """A column of data.fields: by how much the chosen score should exceed the rejected one; null: 0 for all rows."""
    centring: NonNegative = 0.0
    """Weight of the squared sum of a pair's two scores, which keeps scores near 0; 0.01 is usual."""
    target: str | None = None
    """A column of data.fields: the score that each row should have (squared error); null: rows are pairs."""
    huber: Positive | None = None
    """With target: the Huber loss, which is linear where an error is larger than this; null: the squared error."""


class ReviewsConfig(MLLMConfig):
    reward_loss: RewardLoss = RewardLoss()
    """The loss of scores."""

    @model_validator(mode="after")
    def _rows_fit_the_loss(self) -> ReviewsConfig:
        reward_loss = self.reward_loss
        if reward_loss.target is None:
            if not self.data.pairs:
                raise ValueError(
                    "a reward model compares pairs: set data.pairs=true, or reward_loss.target to a column of scores"
                )
            if reward_loss.huber is not None:
                raise ValueError("reward_loss.huber: pairs have no targets. Set reward_loss.target, or remove it")
        elif self.data.pairs or reward_loss.margin is not None or reward_loss.centring:
            raise ValueError(
                "reward_loss.target: rows with a score are no pairs. Set data.pairs=false and remove margin "
                "and centring"
            )
        for key in ("margin", "target"):
            column = getattr(reward_loss, key)
            if column is not None and column not in self.data.fields:
                raise ValueError(
                    f"reward_loss.{key}={column} is no column of numbers: set data.fields={{{column}: float}}"
                )
        if self.eval.generation is not None:
            raise ValueError("eval.generation: a reward model generates nothing. Remove it")
        return self
