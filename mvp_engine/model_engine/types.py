"""The model types: what comes out of a model, whatever it runs on."""

from __future__ import annotations

from torch import nn

from mvp_engine.hf import LanguageModel, ValueModel
from mvp_engine.model_engine.base import ModelSource, register
from mvp_engine.model_engine.fsdp.engine import FSDPEngine


@register("language_model", "fsdp")
class LanguageModelEngine(FSDPEngine):
    """Per-token log-probs and entropy."""

    @classmethod
    def build_model(cls, source: ModelSource) -> nn.Module:
        return LanguageModel.on_meta(source.path, source.config)


@register("value_model", "fsdp")
class ValueModelEngine(FSDPEngine):
    """One number per token."""

    @classmethod
    def build_model(cls, source: ModelSource) -> nn.Module:
        return ValueModel.on_meta(source.path, source.config)
