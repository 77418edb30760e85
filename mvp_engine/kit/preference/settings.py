"""The configs of the engines of this kit. It imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mvp_engine.config.schema import Config, Fraction, NonNegative, Positive, Section
from mvp_engine.kit.settings import MLLMConfig

Reference = Literal["copy", "adapters_off", "cached", "none"]
WITHOUT_REFERENCE = ("simpo", "orpo")


class PreferenceLoss(Section):
    """The config section of the preference losses."""

    loss: Literal["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo", "kto"] = "sigmoid"
    """The loss: DPO (sigmoid, ipo, hinge, robust), SimPO, ORPO on pairs; KTO on rows with a label."""
    beta: Positive = 0.1
    """Scale of the implicit reward. Of orpo: the weight of the odds-ratio term. SimPO uses 2 to 10."""
    label_smoothing: Fraction = Field(default=0.0, lt=0.5)
    """The share of pairs that is taken to be labelled the wrong way round; of sigmoid, robust and simpo."""
    gamma: NonNegative = 0.5
    """The margin by which SimPO wants the chosen reward above the rejected one."""
    nll: NonNegative | None = None
    """Weight of the NLL per token of chosen answers (and of rows that are no pairs); null: 1 for orpo, else 0."""
    reference: Reference | None = None
    """The reference model: copy (a second, frozen model), adapters_off (the model without its LoRA adapters), cached
    (its log-probs, computed once before training and kept on disk), none. Null: none for simpo and orpo, adapters_off
    with LoRA, else copy."""
    desirable_weight: NonNegative = 1.0
    """KTO: the weight of rows with label 1."""
    undesirable_weight: NonNegative = 1.0
    """KTO: the weight of rows with label 0."""

    @model_validator(mode="after")
    def _consistent(self) -> PreferenceLoss:
        without = self.loss in WITHOUT_REFERENCE
        if self.reference is not None and without != (self.reference == "none"):
            needs = (
                "has no reference model: set reference: none"
                if without
                else "needs a reference model"
            )
            raise ValueError(f"loss: {self.loss} {needs}")
        if self.label_smoothing and self.loss not in ("sigmoid", "robust", "simpo"):
            raise ValueError(f"loss: {self.loss} has no label_smoothing")
        if self.loss == "kto" and self.reference == "cached":
            raise ValueError(
                "loss: kto needs the reference's log-probs of mismatched answers, which differ in every step: "
                "set reference to copy or adapters_off"
            )
        return self

    @property
    def nll_weight(self) -> float:
        if self.nll is None:
            return 1.0 if self.loss == "orpo" else 0.0
        return self.nll


class PreferenceConfig(MLLMConfig):
    """The config of a PreferenceEngine."""

    preference: PreferenceLoss = PreferenceLoss()
    """The loss on preference pairs, and its reference model."""

    @property
    def reference(self) -> Reference:
        """The reference that `preference.reference` names, or stands for."""
        named = self.preference.reference
        if named is not None:
            return named
        if self.preference.loss in WITHOUT_REFERENCE:
            return "none"
        return "copy" if self.lora is None else "adapters_off"

    @model_validator(mode="after")
    def _rows_fit_the_loss(self) -> PreferenceConfig:
        loss = self.preference.loss
        if loss == "kto":
            if "label" not in self.mllm.fields or self.mllm.pairs:
                raise ValueError(
                    "preference.loss=kto reads rows with a label: set mllm.fields={label: int} and mllm.pairs=false"
                )
        elif not self.mllm.pairs:
            raise ValueError(f"preference.loss={loss} compares pairs: set mllm.pairs=true")
        if self.reference == "adapters_off" and self.lora is None:
            raise ValueError(
                "preference.reference=adapters_off needs LoRA: set lora, or reference=copy"
            )
        if self.reference == "copy" and self.model.quantize:
            raise ValueError(
                "preference.reference=copy would not have the weights in 4 bits that model.quantize trains adapters "
                "on: set preference.reference to adapters_off or cached"
            )
        if self.reference == "adapters_off" and self.lora is not None and self.lora.train:
            raise ValueError(
                "preference.reference=adapters_off: lora.train changes weights that no switch turns back. "
                "Set preference.reference=copy"
            )
        return self


class RewardLoss(Section):
    """The config section of the loss of scores: Bradley-Terry on pairs, or regression on a column."""

    margin: str | None = None
    """A column of mllm.fields: by how much the chosen score should exceed the rejected one; null: 0 for all rows."""
    centring: NonNegative = 0.0
    """Weight of the squared sum of a pair's two scores, which keeps scores near 0; 0.01 is usual."""
    target: str | None = None
    """A column of mllm.fields: the score that each row should have (squared error); null: rows are pairs."""
    huber: Positive | None = None
    """With target: the Huber loss, which is linear where an error is larger than this; null: the squared error."""


class RewardConfig(MLLMConfig):
    """The config of a RewardEngine."""

    reward: RewardLoss = RewardLoss()
    """The loss of scores."""

    @model_validator(mode="after")
    def _rows_fit_the_loss(self) -> RewardConfig:
        reward = self.reward
        if reward.target is None:
            if not self.mllm.pairs:
                raise ValueError(
                    "a reward model compares pairs: set mllm.pairs=true, or reward.target to a column of scores"
                )
            if reward.huber is not None:
                raise ValueError(
                    "reward.huber: pairs have no targets. Set reward.target, or remove it"
                )
        elif self.mllm.pairs or reward.margin is not None or reward.centring:
            raise ValueError(
                "reward.target: rows with a score are no pairs. Set mllm.pairs=false and remove margin and centring"
            )
        for key in ("margin", "target"):
            column = getattr(reward, key)
            if column is not None and column not in self.mllm.fields:
                raise ValueError(
                    f"reward.{key}={column} is no column of numbers: set mllm.fields={{{column}: float}}"
                )
        if self.eval_generation is not None:
            raise ValueError("eval_generation: a reward model generates nothing. Remove it")
        return self


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


class DistilConfig(MLLMConfig):
    """The config of a DistilEngine."""

    distil: Distil
    """The teacher, and the divergence from it."""

    @model_validator(mode="after")
    def _a_language_model_on_answers(self) -> DistilConfig:
        if self.model.type != "language_model":
            raise ValueError(
                f"model.type={self.model.type}: distillation compares distributions over tokens. "
                "Set model.type=language_model"
            )
        if self.mllm.pairs:
            raise ValueError("mllm.pairs: distillation reads rows with one answer. Set it to false")
        if self.loss.z_loss or self.loss.label_smoothing:
            raise ValueError(
                "loss: distillation has terms of its own. Remove z_loss and label_smoothing"
            )
        return self


class ContrastiveLoss(Section):
    """The config section of contrastive losses."""

    loss: Literal["infonce", "siglip"] = "infonce"
    """InfoNCE: softmax over all rows of the step, in both directions. SigLIP: each pair of rows by itself."""
    temperature: Positive = 0.07
    """Similarities are divided by it, unless the model learns a `log_scale`. SigLIP starts with 0.1."""
    bias: float = -10.0
    """SigLIP: added to scaled similarities, unless the model learns a `bias`."""


class ContrastiveConfig(Config):
    """The config of a ContrastiveEngine."""

    contrastive: ContrastiveLoss = ContrastiveLoss()
    """The loss on pairs of views."""
