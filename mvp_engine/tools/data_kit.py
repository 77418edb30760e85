"""The data kit that a tool works on: the one of a recipe's config, or one for a single data file."""

from __future__ import annotations

import os
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.hf.config_source import read_config
from mvp_engine.kit.actions.kit import ActionDataKit
from mvp_engine.kit.actions.rows import is_lerobot
from mvp_engine.kit.actions.settings import ActionData
from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.processor import load_processor
from mvp_engine.kit.data.settings import DATA_KIT_FIX, MLLMData, data_section
from mvp_engine.kit.estimate.auto import global_batch, with_defaults
from mvp_engine.kit.estimate.training import changed


def config_data_kit(engine_class: Any, config: Any, model: str | None = None) -> MLLMDataKit:
    """The kit that the recipe's `data_kit(config)` builds, else one from its MLLMData section and model folder.

    `model` names another folder to take the processor from. Packs of `auto` have the size that it has without a GPU.
    """
    if any(isinstance(value, MLLMData) for _, value in config):
        plain = with_defaults(config)
        if data_section(config)[1].global_batch_tokens == "auto":
            kit = config_data_kit(engine_class, plain, model)
            plain = with_defaults(changed(config, global_batch(config, kit).values))
        config = plain
    if model is None and hasattr(engine_class, "data_kit"):
        return engine_class.data_kit(config)
    _, settings = data_section(config)
    folder = model or config.model.path
    if folder is None:
        raise UserError(
            f"the config has no model.path to load a processor from: {DATA_KIT_FIX}, or give --model MODEL"
        )
    return MLLMDataKit(settings, load_processor(folder), num_workers=config.data.num_workers)


def file_data_kit(path: str, model: str, pack_tokens: int) -> MLLMDataKit:
    """A kit for one data file; any number of bad rows is allowed."""
    settings = MLLMData.model_validate(
        {
            "sources": [{"path": path}],
            "micro_batch_tokens": pack_tokens,
            "max_bad_fraction": 1.0,
            "pairs": True,
        }
    )
    workers = os.cpu_count() or 1
    processor = load_processor(model)
    if is_lerobot(path):
        model_config = read_config(model, {})
        return ActionDataKit(
            settings, ActionData(), processor, model_config=model_config, num_workers=workers
        )
    return MLLMDataKit(settings, processor, num_workers=workers)
