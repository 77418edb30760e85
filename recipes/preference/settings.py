"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mvp_engine.config import Section
from mvp_engine.config.schema import Fraction, NonNegative, Positive
from mvp_engine.kit import MLLMConfig

Reference = Literal["copy", "adapters_off", "cached", "none"]
WITHOUT_REFERENCE = ("simpo", "orpo")


class PreferenceLoss(Section):
    """The config section of the preference losses."""

    loss: Literal["dpo", "ipo", "hinge", "robust", "simpo", "orpo", "kto"] = "dpo"
    """The loss: dpo, ipo, hinge, robust (DPO with label noise), simpo or orpo on pairs; kto on rows with a label."""
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
            needs = "has no reference model: set reference: none" if without else "needs a reference model"
            raise ValueError(f"loss: {self.loss} {needs}")
        if self.label_smoothing and self.loss not in ("dpo", "robust", "simpo"):
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


class PairsConfig(MLLMConfig):
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
    def _rows_fit_the_loss(self) -> PairsConfig:
        loss = self.preference.loss
        if loss == "kto":
            if "label" not in self.data.fields or self.data.pairs:
                raise ValueError(
                    "preference.loss=kto reads rows with a label: set data.fields={label: int} and data.pairs=false"
                )
        elif not self.data.pairs:
            raise ValueError(f"preference.loss={loss} compares pairs: set data.pairs=true")
        if self.reference == "adapters_off" and self.lora is None:
            raise ValueError("preference.reference=adapters_off needs LoRA: set lora, or reference=copy")
        if self.reference == "copy" and self.model.quantize:
            raise ValueError(
                "preference.reference=copy would not have the weights in 4 bits that model.quantize trains adapters "
                "on: set preference.reference to adapters_off or cached"
            )
        if self.reference == "adapters_off" and self.lora is not None and self.lora.modules_to_save:
            raise ValueError(
                "preference.reference=adapters_off: lora.modules_to_save changes weights that no switch turns back. "
                "Set preference.reference=copy"
            )
        return self
