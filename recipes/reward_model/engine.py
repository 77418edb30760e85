"""A reward model: chosen answers get higher scores than rejected ones."""

from typing import Any

from mvp_engine.kit import RewardEngine

from .data import prepare
from .settings import ReviewsConfig


class ReviewsEngine(RewardEngine):
    config_class = ReviewsConfig
    config: ReviewsConfig

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        if config.made is not None:
            prepare(config.made)
        return super().data_kit(config)
