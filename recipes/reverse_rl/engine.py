"""Reinforcement learning on text: the policy learns to write a number backwards, from rewards alone."""

from typing import Any

from mvp_engine.config import Section
from mvp_engine.kit.rl import Answer, RLConfig, RLEngine

from .data import prepare


class Made(Section):
    folder: str  # rows and tokenizer are built into it, once
    digits: int  # of the numbers
    rows: int  # numbers for training


class ReverseConfig(RLConfig):
    made: Made | None = None  # synthetic data; null: mllm.sources are files of your own


class ReverseEngine(RLEngine):
    config_class = ReverseConfig
    config: ReverseConfig

    def reward(self, row: dict[str, Any], answer: Answer) -> float:
        """The share of right characters; an answer of another length has none."""
        wanted = row["answer"]
        if len(answer.text) != len(wanted):
            return 0.0
        return sum(a == b for a, b in zip(answer.text, wanted, strict=True)) / len(wanted)

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        if config.made is not None:
            prepare(config.made)
        return super().data_kit(config)
