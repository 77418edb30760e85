"""The config of an engine of speech: sections that speech adds to those of an MLLMEngine. It imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import model_validator

from mvp_engine.config.schema import Count, NonNegative, Section
from mvp_engine.errors import UserError
from mvp_engine.kit.data.settings import MLLMData
from mvp_engine.kit.settings import EvalGeneration, MLLMConfig, MLLMEval

# Layouts whose ranks have no whole model, or no whole sequence.
_NOT_SPOKEN = ("shard", "ulysses", "context")


class SpeechData(Section):
    """Audio in assistant turns as targets of a model that speaks (`model.type=omni_model`)."""

    codec: str | None = None
    """The codec that makes codes of sounds: the folder of Mimi or of a ResidualKMeans, or `file.py:Class` with a Codec
    of your own; null: the rows have codes."""
    books: Count = 16
    """Codebooks that the model speaks; of a codec that has more, the first ones."""
    require: bool = False
    """Whether an assistant turn with loss and without a sound is a bad row; false: it is learnt as text alone."""


class SpeechMLLMData(MLLMData):
    """The settings of the data of a model that speaks."""

    speech: SpeechData | None = None
    """Learn to speak the audio of assistant turns; null: rows with such audio are bad."""

    @property
    def targets(self) -> tuple[str, ...]:
        return () if self.speech is None else ("audio",)

    def row_part(self, model_config: Any, cache: Path) -> Any:
        if self.speech is None:
            return None
        # Here: it imports torch, which a config does not need.
        from mvp_engine.kit.speech.row_part import SpeechPart

        return SpeechPart(self.speech, model_config, cache, self.limits)

    @model_validator(mode="after")
    def _check_speech(self) -> SpeechMLLMData:
        if self.speech is not None and self.pairs:
            raise ValueError(
                "data.speech: sounds of preference pairs are not supported; set data.pairs=false"
            )
        return self


class SpeechLoss(Section):
    """The config section of the loss of speech."""

    residual_weight: NonNegative = 1.0
    """Factor of the mean loss of the codebooks after the first."""
    weight: NonNegative = 1.0
    """Factor of the loss of speech next to that of text."""


class SpeechGeneration(Section):
    """Generation of speech, as Qwen3-Omni's own `generate` does it by default."""

    max_frames: Count = 1024
    """The most frames of a sound."""
    temperature: NonNegative = 0.9
    """Of the first code of a frame, with a repetition penalty of 1.05; 0: greedy, without one."""


class SpeechEvalGeneration(EvalGeneration):
    """Generation in every evaluation: completions of held-out prompts, which the model may speak."""

    speech: SpeechGeneration | None = None
    """Speak the completions too, of a model that speaks; null: text alone. The report page plays them."""


class SpeechEval(MLLMEval):
    """Evaluations, with generated answers, which the model may speak."""

    generation: SpeechEvalGeneration | None = None
    """Generate answers in every evaluation; null: evaluations have losses only."""


class SpeechConfig(MLLMConfig):
    """The config of an MLLMEngine whose model also speaks."""

    data: SpeechMLLMData
    eval: SpeechEval

    @model_validator(mode="after")
    def _check_speech(self) -> SpeechConfig:
        if self.eval.generation is None or self.eval.generation.speech is None:
            return self
        if self.data.speech is None:
            raise ValueError(
                "eval.generation.speech needs a model that speaks: set data.speech, or remove it"
            )
        shared = [name for name in _NOT_SPOKEN if getattr(self.parallel, name) > 1]
        if shared:
            raise ValueError(
                f"eval.generation.speech: ranks that share a model (parallel.{shared[0]} > 1) do not speak in "
                "evaluations. Set it to null; export the model, and speak with mvp chat --speak"
            )
        if self.model.path is None and self.data.speech.codec is None:
            raise ValueError(
                "eval.generation.speech has nothing to play codes with: set data.speech.codec"
            )
        return self

    def check_engine(self) -> None:
        """Raise for spoken answers that no talker would learn, and for a talker without any."""
        speaks = self.model.type == "omni_model"
        if speaks and self.data.speech is None:
            raise UserError(
                "model.type=omni_model: its talker learns from spoken answers. Set data.speech, or train the text "
                "alone with model.type=language_model and engine: sft"
            )
        if not speaks:
            given = "" if self.data.speech is None else "data.speech: "
            raise UserError(
                f"{given}model.type={self.model.type} has no talker that would learn spoken answers. Set "
                "model.type=omni_model, or train the text alone, without data.speech, with engine: sft"
            )
