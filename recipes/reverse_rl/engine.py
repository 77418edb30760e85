"""Reinforcement learning on text: the policy learns to write a number backwards, from rewards alone."""

from typing import Any

from mvp_engine.kit.rl import Answer, RLEngine

from .data import prepare
from .settings import ReverseConfig


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
