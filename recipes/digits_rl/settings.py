"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from __future__ import annotations

from pydantic import model_validator

from mvp_engine.kit.rl import RLConfig

ALGORITHMS = ("grpo", "dapo", "dr_grpo")


class DigitsConfig(RLConfig):
    @model_validator(mode="after")
    def _is_grpo(self) -> DigitsConfig:
        if self.rl.algorithm not in ALGORITHMS:
            raise ValueError(
                f"rl.algorithm={self.rl.algorithm}: the step of digits_rl is that of {', '.join(ALGORITHMS)}. Use one "
                "of them, or engine: reverse_rl, which has all algorithms"
            )
        for name in ("dual_clip", "entropy"):
            if getattr(self.rl, name):
                raise ValueError(f"rl.{name}: the loss of digits_rl has no such term. Use engine: reverse_rl")
        return self
