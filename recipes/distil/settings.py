"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from mvp_engine.config import Section
from mvp_engine.config.schema import NonNegative, Positive
from mvp_engine.kit import MLLMConfig


class Distil(Section):
    """The config section of distillation."""

    teacher: str
    """The teacher: a folder, or a model of the Hub, with the student's tokenizer."""
    divergence: Literal["forward", "reverse"] = "forward"
    """The KL divergence per token: forward (teacher to student, covers all that the teacher may say) or reverse
    (student to teacher, prefers what the teacher finds likely)."""
    temperature: Positive = 1.0
    """By which the logits of both models are divided."""
    nll: NonNegative = 0.0
    """Weight of the NLL per token of the rows' own answers; 0: the teacher alone."""


class StudentConfig(MLLMConfig):
    distil: Distil
    """The teacher, and the divergence from it."""

    @model_validator(mode="after")
    def _a_language_model_on_answers(self) -> StudentConfig:
        if self.model.type != "language_model":
            raise ValueError(
                f"model.type={self.model.type}: distillation compares distributions over tokens. "
                "Set model.type=language_model"
            )
        if self.data.pairs:
            raise ValueError("data.pairs: distillation reads rows with one answer. Set it to false")
        if self.loss.z_loss or self.loss.label_smoothing:
            raise ValueError("loss: distillation has terms of its own. Remove z_loss and label_smoothing")
        return self
