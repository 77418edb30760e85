"""Reinforcement learning on images: the policy learns to name handwritten digits, from rewards alone."""

from typing import Any

from mvp_engine.kit.rl import Answer, RLEngine

from .data import prepare
from .settings import DigitsConfig


class DigitsEngine(RLEngine):
    config_class = DigitsConfig
    config: DigitsConfig

    def reward(self, row: dict[str, Any], answer: Answer) -> float:
        """1 for the right answer and nothing else."""
        return float(answer.text.strip() == row["answer"])

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        if config.made is not None:
            prepare(config.made)
        return super().data_kit(config)
