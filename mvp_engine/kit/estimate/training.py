"""What an estimate needs of a config: its settings, and its model on the meta device."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from mvp_engine.errors import UserError
from mvp_engine.hf.lora.quantize import quantize_layers
from mvp_engine.hf.model.adapter import cast_frozen_base
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.kit.estimate.settings import EstimateSettings
from mvp_engine.kit.model import MLLMModelKit
from mvp_engine.model_engine.base import DTYPES
from mvp_engine.model_engine.fsdp.parallelize import freeze


def settings_of(config: Any, parallel: Any, gpu: str) -> EstimateSettings:
    """`parallel`: the section of the layout, which in an RL config is that of the actor."""
    precision = config.loop.precision
    if parallel.pipeline > 1:
        raise UserError(
            "an estimate does not know parallel.pipeline > 1: mvp plan does. Or estimate with parallel.pipeline=1 "
            "and as many more shards, whose ranks hold as many weights"
        )
    return EstimateSettings.from_config(
        config,
        "bf16" if precision == "auto" else precision,
        gpu=gpu,
        state_dtype=getattr(config.optim, "state_dtype", "float32"),
        offload_states=getattr(config.optim, "offload", False),
        reference_copy=getattr(config, "reference", None) == "copy",
        teacher=config.distil.teacher if hasattr(config, "distil") else None,
        text_loss=_has_text_loss(config),
        shard=parallel.shard,
        ulysses=parallel.ulysses,
        context=parallel.context,
        tensor=parallel.tensor,
        expert=parallel.expert,
        reshard=parallel.reshard,
    )


def _has_text_loss(config: Any) -> bool:
    if config.model.type != "action_model":
        return True
    return hasattr(config, "actions") and config.actions.text_weight > 0


def meta_model(config: Any, settings: EstimateSettings) -> PackedModel:
    """The model of a config without weights: frozen, cast and quantized as the model engine does it."""
    model: Any = MLLMModelKit(getattr(config, "lora", None)).build(config.model)
    assert isinstance(model, PackedModel)
    freeze(model, config.model.freeze)
    if settings.half_precision:
        cast_frozen_base(model, DTYPES[settings.precision])
    if settings.quantize:
        quantize_layers(model, settings.quantize, DTYPES[settings.precision])
    return model


def changed(config: Any, changes: dict[str, Any]) -> Any:
    """The config with other values of some keys, validated."""
    values = config.model_dump()
    for key, value in changes.items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section[part] = section[part] or {}  # lora is null without adapters
            section = section[part]
        section[name] = value
    try:
        return type(config).model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise UserError(f"{key}: {problem['msg'].removeprefix('Value error, ')}") from None
