"""Preference training (DPO, SimPO, ORPO, KTO) of text and vision-language models."""

from typing import Any

from mvp_engine.engine import StepContext
from mvp_engine.kit import Answer, PreferenceEngine

from .settings import PairsConfig


class PairsEngine(PreferenceEngine):
    config_class = PairsConfig
    config: PairsConfig

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        if config.made is not None:
            from .data import prepare

            prepare(config.made)
        return super().data_kit(config)

    def score(self, ctx: StepContext, name: str, answers: list[Answer]) -> None:
        """Log how often a generated answer is of the preferred kind: a sentence, or the right digit."""
        super().score(ctx, name, answers)
        if self.config.made and self.config.made.kind == "text":
            sentences = sum(answer.written.startswith("The next number is") for answer in answers)
            ctx.log("preferred", sentences, len(answers))
