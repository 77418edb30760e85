"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from mvp_engine.config import Section
from mvp_engine.config.schema import NonNegative, Positive
from mvp_engine.kit import MLLMConfig


class Made(Section):
    kind: Literal["text", "images"] = "text"
    folder: str  # rows and processor are built into it, once
    rows: int  # pairs for training; of images: how many of the 1,797 digits


class RewardLoss(Section):
    """The config section of the loss of scores: Bradley-Terry on pairs, or regression on a column."""

    margin: str | None = None
    """A column of mllm.fields: by how much the chosen score should exceed the rejected one; null: 0 for all rows."""
    centring: NonNegative = 0.0
    """Weight of the squared sum of a pair's two scores, which keeps scores near 0; 0.01 is usual."""
    target: str | None = None
    """A column of mllm.fields: the score that each row should have (squared error); null: rows are pairs."""
    huber: Positive | None = None
    """With target: the Huber loss, which is linear where an error is larger than this; null: the squared error."""


class ReviewsConfig(MLLMConfig):
    reward: RewardLoss = RewardLoss()
    """The loss of scores."""
    made: Made | None = None  # synthetic data; null: mllm.sources are files of your own

    @model_validator(mode="after")
    def _rows_fit_the_loss(self) -> ReviewsConfig:
        reward = self.reward
        if reward.target is None:
            if not self.mllm.pairs:
                raise ValueError(
                    "a reward model compares pairs: set mllm.pairs=true, or reward.target to a column of scores"
                )
            if reward.huber is not None:
                raise ValueError("reward.huber: pairs have no targets. Set reward.target, or remove it")
        elif self.mllm.pairs or reward.margin is not None or reward.centring:
            raise ValueError(
                "reward.target: rows with a score are no pairs. Set mllm.pairs=false and remove margin and centring"
            )
        for key in ("margin", "target"):
            column = getattr(reward, key)
            if column is not None and column not in self.mllm.fields:
                raise ValueError(f"reward.{key}={column} is no column of numbers: set mllm.fields={{{column}: float}}")
        if self.eval_generation is not None:
            raise ValueError("eval_generation: a reward model generates nothing. Remove it")
        return self
