"""The config of an MLLMEngine: its sections, and how they depend on each other. It imports no torch.

Sections of the data, the optimizer and LoRA are next to their code.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from mvp_engine import plugins
from mvp_engine.config.schema import Config, Count, Eval, Fraction, NonNegative, Section
from mvp_engine.errors import UserError
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.kit.data.settings import MLLMData
from mvp_engine.kit.optim.settings import OptimSettings


class TokenLoss(Section):
    """The config section of the loss kit."""

    z_loss: NonNegative = 0.0
    """Factor of the squared log z: keeps the softmax denominator z near 1."""
    label_smoothing: Fraction = Field(default=0.0, lt=1)
    """The share of the target that is spread evenly over the vocabulary."""


class EvalGeneration(Section):
    """Generation in every evaluation: completions of held-out prompts."""

    max_new_tokens: Count = 32
    """The most tokens of a completion."""
    max_samples: Count | None = None
    """The most rows that an evaluation completes, spread over all that it reads; null: no limit."""
    prompt_tokens: Count = 16
    """The prompt of a row that is plain text, not a chat: its first tokens, this many."""


class MLLMEval(Eval):
    """Evaluations, with generated answers."""

    generation: EvalGeneration | None = None
    """Generate answers in every evaluation; null: evaluations have losses only."""


class HarnessTask(Section):
    """A task of an evaluation harness, with settings that differ from its own."""

    task: str
    """A task or group of lm-eval or lmms-eval, or a YAML file in its format; lm:NAME, lmms:NAME: of this harness."""
    limit: Count | None = None
    """Only so many of its first examples; null: all."""
    fewshot: Annotated[int, Field(ge=0)] | None = None
    """Solved examples in the prompt; null: as the task says."""
    chat_template: bool | None = None
    """Prompts are user messages (of lmms-eval always); null: if the model has a chat template."""
    system: str | None = None
    """The system message."""


_BY_NAME = AfterValidator(lambda one: HarnessTask(task=one) if isinstance(one, str) else one)


class EvalHarness(Section):
    """Tasks of lm-eval and lmms-eval in evaluations."""

    tasks: Annotated[list[Annotated[str | HarnessTask, _BY_NAME]], Field(min_length=1)]
    """Names, files, or {task: NAME, limit: ..., fewshot: ..., chat_template: ..., system: ...} (docs/harness.md)."""
    every: Count = 1
    """Run them in every n-th evaluation of a training, and in the last one."""


class MLLMConfig(Config):
    """The config of an MLLMEngine."""

    optim: OptimSettings
    data: MLLMData
    """Sources of rows, packs, loading, limits of media."""
    eval: MLLMEval
    """Evaluations."""
    eval_harness: EvalHarness | None = None
    """Tasks of lm-eval and lmms-eval in evaluations; null: none."""
    processor: str | None = None
    """The folder, or the model of the Hub, with the processor or tokenizer; null: that of the model."""
    lora: Lora | None = None
    """LoRA adapters on the frozen model; null: full fine-tuning."""
    loss: TokenLoss = TokenLoss()
    """Terms of the token loss."""
    made: Any = None
    """Data that a function writes once, before they are read: {by: ../data.py:build, folder: FOLDER, ...}. `by` is next
    to the config, or module:function; it gets the folder and the other values. null: the data exist."""
    export_link: str | None = None
    """A symlink to the Hugging Face folder of the newest finished run, or the URL of a copy; null: no export after
    training."""

    @model_validator(mode="after")
    def _check_sections(self) -> MLLMConfig:
        self.data.check_global_batch(self.data.global_batch_size)  # raises if two keys set it
        return self

    def check_engine(self) -> None:
        """Raise if a kit trains `model.type`, and the engine is none of this kit."""
        needed = plugins.load("config", self.model.type)
        if needed is not None and not isinstance(self, needed):
            raise UserError(
                f"model.type={self.model.type} needs an engine whose config_class derives from {needed.__name__}, "
                f"not {type(self).__name__} (docs/plugins.md)"
            )
