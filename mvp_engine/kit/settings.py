"""The config of an MLLMEngine: its sections, and how they depend on each other. It imports no torch.

Sections of the data, the optimizer and LoRA are next to their code.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from mvp_engine.config.schema import Config, Count, Fraction, NonNegative, Positive, Section
from mvp_engine.errors import UserError
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.kit.data.cpus import default_num_workers
from mvp_engine.kit.data.settings import MLLMData
from mvp_engine.kit.optim.settings import OptimSettings

_NOT_SPOKEN = (
    "shard",
    "ulysses",
    "context",
)  # layouts whose ranks have no whole model, or sequence


class TokenLoss(Section):
    """The config section of the loss kit."""

    z_loss: NonNegative = 0.0
    """Factor of the squared log z: keeps the softmax denominator z near 1."""
    label_smoothing: Fraction = Field(default=0.0, lt=1)
    """The share of the target that is spread evenly over the vocabulary."""


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
    """Of the first code of a frame; 0: greedy."""
    repetition_penalty: Positive = 1.05
    """Codes of earlier frames are this much less likely."""


class EvalGeneration(Section):
    """Generation in every evaluation: completions of held-out prompts."""

    max_new_tokens: Count = 32
    """The most tokens of a completion."""
    every_n_samples: Count = 1
    """Every n-th held-out row is completed."""
    max_samples: Count | None = None
    """The most rows that an evaluation completes, spread over all that it reads; null: no limit."""
    prompt_tokens: Count = 16
    """The prompt of a row that is plain text, not a chat: its first tokens, this many."""
    speech: SpeechGeneration | None = None
    """Speak the completions too, of a model that speaks; null: text alone. The report page plays them."""


class MLLMConfig(Config):
    """The config of an MLLMEngine."""

    optim: OptimSettings
    mllm: MLLMData
    """Sources of rows, packs, limits of media."""
    processor: str | None = None
    """The folder, or the model of the Hub, with the processor or tokenizer; null: that of the model."""
    lora: Lora | None = None
    """LoRA adapters on the frozen model; null: full fine-tuning."""
    loss: TokenLoss = TokenLoss()
    """Terms of the token loss."""
    speech_loss: SpeechLoss = SpeechLoss()
    """The loss of the speech of Omni models."""
    eval_generation: EvalGeneration | None = None
    """Generate answers in every evaluation; null: evaluations have losses only."""
    export: str | None = None
    """A symlink to the Hugging Face folder of the newest finished run; null: no export after training."""

    @model_validator(mode="before")
    @classmethod
    def _default_workers(cls, values: dict[str, Any]) -> dict[str, Any]:
        data = values.get("data")
        if isinstance(data, dict) and data.get("num_workers") == "auto":
            return {**values, "data": {**data, "num_workers": default_num_workers()}}
        return values

    @model_validator(mode="after")
    def _check_sections(self) -> MLLMConfig:
        self.mllm.check_global_batch(self.data.global_batch_size)  # raises if two keys set it
        if self.eval_generation is None or self.eval_generation.speech is None:
            return self
        if self.mllm.speech is None:
            raise ValueError(
                "eval_generation.speech needs a model that speaks: set mllm.speech, or remove it"
            )
        shared = [name for name in _NOT_SPOKEN if getattr(self.parallel, name) > 1]
        if shared:
            raise ValueError(
                f"eval_generation.speech: ranks that share a model (parallel.{shared[0]} > 1) do not speak in "
                "evaluations. Set it to null; export the model, and speak with mvp chat --speak"
            )
        if self.model.path is None and self.mllm.speech.codec is None:
            raise ValueError(
                "eval_generation.speech has nothing to play codes with: set mllm.speech.codec"
            )
        return self

    def check_speech(self) -> None:
        """Raise for spoken answers that no talker would learn, and for a talker without any."""
        speaks = self.model.type == "omni_model"
        if speaks and self.mllm.speech is None:
            raise UserError(
                "model.type=omni_model: its talker learns from spoken answers. Set mllm.speech, or train the text "
                "alone with model.type=language_model"
            )
        if not speaks and self.mllm.speech is not None:
            raise UserError(
                f"mllm.speech: model.type={self.model.type} has no talker that would learn spoken answers. Set "
                "model.type=omni_model, or remove mllm.speech"
            )
