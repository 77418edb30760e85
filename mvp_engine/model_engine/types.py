"""The model types on the FSDP backend: what a model outputs."""

from __future__ import annotations

from torch import nn

from mvp_engine.hf import ActionModel, LanguageModel, OmniModel, ValueModel
from mvp_engine.model_engine.base import ModelSource
from mvp_engine.model_engine.fsdp.engine import FSDPEngine
from mvp_engine.model_engine.registry import register


@register("language_model", "fsdp")
class LanguageModelEngine(FSDPEngine):
    """A language model: per-token log-probs, entropy and loss."""

    @classmethod
    def build_model(cls, source: ModelSource) -> nn.Module:
        return LanguageModel.on_meta(source.path, source.config)


@register("omni_model", "fsdp")
class OmniModelEngine(FSDPEngine):
    """A language model that also speaks: the outputs of its thinker, and log-probs, entropy and loss of speech."""

    @classmethod
    def build_model(cls, source: ModelSource) -> nn.Module:
        return OmniModel.on_meta(source.path, source.config)


@register("value_model", "fsdp")
class ValueModelEngine(FSDPEngine):
    """A value model: one number per token."""

    @classmethod
    def build_model(cls, source: ModelSource) -> nn.Module:
        return ValueModel.on_meta(source.path, source.config)


@register("action_model", "fsdp")
class ActionModelEngine(FSDPEngine):
    """An action model: chunks of actions from images, a prompt and a state."""

    @classmethod
    def build_model(cls, source: ModelSource) -> nn.Module:
        return ActionModel.on_meta(source.path, source.config)
