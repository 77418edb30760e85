"""Reinforcement learning on images: the policy learns to name handwritten digits, from rewards alone."""

from typing import Any

from mvp_engine.config import Section
from mvp_engine.kit.rl import Answer, RLConfig, RLEngine

from .data import prepare


class Made(Section):
    folder: str  # images, rows and processor are built into it, once
    digits: int  # how many of the 1,797 digits; a fifth is held out


class DigitsConfig(RLConfig):
    made: Made | None = None  # synthetic data; null: mllm.sources are files of your own


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
