"""A tiny Qwen3-VL, from random weights, learns to read handwritten digits and to talk about them."""

from pathlib import Path
from typing import Any

from mvp_engine.config import Section
from mvp_engine.engine import StepContext
from mvp_engine.kit import Answer, MLLMConfig, MLLMEngine

from .data import conclusion, prepare
from .show import show


class Digits(Section):
    folder: str  # where pictures, rows and processor are made, once
    count: int  # of the 1,797 digits; a fifth is held out
    drawings: int  # of each, on paper of other sizes


class DigitsConfig(MLLMConfig):
    digits: Digits


class DigitsEngine(MLLMEngine):
    config_class = DigitsConfig
    config: DigitsConfig

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        digits = config.digits
        return prepare(Path(digits.folder), digits.count, digits.drawings)

    def score(self, ctx: StepContext, name: str, answers: list[Answer]) -> None:
        """Whether the answer is right, and whether every word of it is."""
        right = sum(conclusion(one.written) == conclusion(one.expected) for one in answers)
        ctx.log(f"accuracy_{name}", right, len(answers))
        super().score(ctx, name, answers)

    def write_page(self, figures: dict[str, float | None], answers: list[Answer], export: Path) -> None:
        show(self, answers, figures, export)
