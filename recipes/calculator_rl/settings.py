"""The config class of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from collections.abc import Sequence
from typing import ClassVar

from mvp_engine.kit.rl import RLConfig


class CalculatorConfig(RLConfig):
    step_of: ClassVar[Sequence[str]] = (
        "grpo",
        "dapo",
        "gspo",
        "gmpo",
        "cispo",
        "sapo",
    )  # advantages of `train_step`, and a loss by name
