"""A reward model: chosen answers get higher scores than rejected ones."""

from typing import Any, Literal

from mvp_engine.config import Section
from mvp_engine.kit import RewardConfig, RewardEngine

from .data import prepare


class Made(Section):
    kind: Literal["text", "images"] = "text"
    folder: str  # rows and processor are built into it, once
    rows: int  # pairs for training; of images: how many of the 1,797 digits


class ReviewsConfig(RewardConfig):
    made: Made | None = None  # synthetic data; null: mllm.sources are files of your own


class ReviewsEngine(RewardEngine):
    config_class = ReviewsConfig
    config: ReviewsConfig

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        if config.made is not None:
            prepare(config.made)
        return super().data_kit(config)
