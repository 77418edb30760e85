"""A tiny Qwen3-VL, trained from random weights to answer questions about handwritten digits."""

from pathlib import Path
from typing import Any

from mvp_engine.engine import StepContext
from mvp_engine.kit import Answer, MLLMEngine

from .data import conclusion, prepare
from .settings import DigitsConfig
from .show import show


class DigitsEngine(MLLMEngine):
    config_class = DigitsConfig
    config: DigitsConfig

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        digits = config.digits
        return prepare(Path(digits.folder), digits.count, digits.drawings)

    def score(self, ctx: StepContext, name: str, answers: list[Answer]) -> list[bool]:
        """Log how often the conclusion is right, and how often every word is."""
        right = [conclusion(answer.written) == conclusion(answer.expected) for answer in answers]
        ctx.log(f"accuracy_{name}", sum(right), len(answers))
        super().score(ctx, name, answers)
        return right

    def write_page(self, figures: Any, answers: list[Answer], export: Path | None) -> None:
        """The page of this recipe; of a training without evaluations, the general one."""
        if answers:
            show(self, answers, figures, export)
        else:
            super().write_page(figures, answers, export)
