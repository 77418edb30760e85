"""The model types on the Megatron backend: the FSDP engine, with Megatron's layers inside of the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mvp_engine.distributed import Layout
from mvp_engine.distributed.pipeline import StageLink
from mvp_engine.errors import UserError
from mvp_engine.hf import PackedModel
from mvp_engine.hf.model.adapter import HFAdapter
from mvp_engine.model_engine.base import Settings
from mvp_engine.model_engine.fsdp.engine import FSDPEngine
from mvp_engine.model_engine.megatron.layers import (
    mark_ends,
    require_megatron,
    use_megatron_layers,
)
from mvp_engine.model_engine.types import LanguageModelEngine, ValueModelEngine


class MegatronAdapter(HFAdapter):
    compiles_by_default = False

    def replace_layers(self, layout: Layout, settings: Settings) -> None:
        self._layers = use_megatron_layers(self.model, layout)

    def cut_stage(self, link: StageLink, skeleton: nn.Module | None) -> None:
        super().cut_stage(link, skeleton)
        held = set(self.model.modules())
        mark_ends([forward for forward in self._layers if forward.layer in held])

    def preflight(self, layout: Layout, exact: bool) -> None:
        super().preflight(layout, exact)
        if self.model.padded_rows:  # which run transformers' own layers
            raise UserError(
                f"model.backend=megatron runs packed sequences only: {self.model.padded_rows}. "
                "Set model.backend=fsdp"
            )


class _MegatronEngine(FSDPEngine):
    check_packages = staticmethod(require_megatron)

    def __init__(self, model: nn.Module, layout: Layout, settings: Settings | None = None) -> None:
        super().__init__(model, layout, settings)
        check_supported(model, layout, self.settings)
        require_megatron()
        self.adapter = MegatronAdapter(model)  # type: ignore[arg-type, assignment]


class MegatronLanguageModelEngine(_MegatronEngine, LanguageModelEngine):
    """A language model: per-token log-probs, entropy and loss."""


class MegatronValueModelEngine(_MegatronEngine, ValueModelEngine):
    """A value model: one number per token."""


# Which models the Megatron backend supports, and what it refuses, with the fix.

FAMILIES = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
BIASED = ("q_proj.bias", "k_proj.bias", "v_proj.bias")  # parameters that may have a bias


def check_supported(model: Any, layout: Layout, settings: Settings) -> None:
    """Raise `UserError` for a model, a layout or a setting that this backend does not run exactly."""
    if not isinstance(model, PackedModel):
        raise _refuse(f"{type(model).__name__} is no Hugging Face model")
    config: Any = model.hf.config
    if config.model_type not in FAMILIES:
        raise _refuse(f"{config.model_type} is none of {', '.join(FAMILIES)}")
    if config.hidden_act != "silu":
        raise _refuse(f"{config.model_type} with hidden_act={config.hidden_act} is not supported")
    layers: Any = model.decoder()
    for name, _ in layers.layers.named_parameters():
        if name.endswith(".bias") and not name.endswith(BIASED):
            raise _refuse(f"{name.removesuffix('.bias')} has a bias")
    if getattr(config, "router_jitter_noise", 0.0):
        raise _refuse(f"{config.model_type} with router_jitter_noise is not supported")
    if model.lora is not None:
        raise _refuse("LoRA adapters are not supported")
    if settings.quantize or _is_set(settings.fp8):
        raise _refuse("model.fp8 and model.quantize are not supported")
    if layout.tensor > 1 and _is_set(settings.compile) and settings.compile != "auto":
        raise UserError(
            f"model.backend=megatron: model.compile is not supported with parallel.tensor={layout.tensor}. "
            "Set model.compile=null"
        )


def _is_set(setting: Any) -> bool:
    """Whether a setting, which may be given by part, is on anywhere."""
    return any(setting.values()) if isinstance(setting, Mapping) else bool(setting)


def _refuse(reason: str) -> UserError:
    return UserError(f"model.backend=megatron: {reason}. Set model.backend=fsdp")
