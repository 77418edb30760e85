"""Which models the Megatron backend supports, and what it refuses, with the fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mvp_engine.distributed import Layout
from mvp_engine.errors import UserError
from mvp_engine.hf import PackedModel
from mvp_engine.model_engine.base import Settings

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
