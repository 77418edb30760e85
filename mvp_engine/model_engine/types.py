"""The model types on the FSDP backend: what a model outputs."""

from __future__ import annotations

from torch import nn

from mvp_engine.hf import LanguageModel, PackedModel, ValueModel
from mvp_engine.model_engine.base import ModelSource
from mvp_engine.model_engine.fsdp.engine import FSDPEngine
from mvp_engine.model_engine.registry import register


class PackedModelEngine(FSDPEngine):
    """A model of `hf/` on the FSDP backend."""

    model_class: type[PackedModel]

    @classmethod
    def build_model(cls, source: ModelSource) -> nn.Module:
        return cls.model_class.on_meta(source.path, source.config)


@register("language_model", "fsdp")
class LanguageModelEngine(PackedModelEngine):
    """A language model: per-token log-probs, entropy and loss."""

    model_class = LanguageModel


@register("value_model", "fsdp")
class ValueModelEngine(PackedModelEngine):
    """A value model: one number per token."""

    model_class = ValueModel
