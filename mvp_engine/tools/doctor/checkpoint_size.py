"""The size of a config's checkpoints, from its model on the meta device."""

from __future__ import annotations

from typing import Any

import torch

from mvp_engine.kit import MLLMModelKit
from mvp_engine.kit.optim.settings import STATE_BYTES
from mvp_engine.model_engine.fsdp.parallelize import freeze


def checkpoint_sizes(config: Any) -> tuple[int, int] | None:
    """Bytes of one checkpoint, and how many exist at a time; None for a model that only prepare_model() knows."""
    if config.model.type == "module":
        return None
    lora = getattr(config, "lora", None)
    with torch.device("meta"):
        model = MLLMModelKit(lora).build(config.model)
    freeze(model, config.model.freeze)
    params = list(model.parameters())
    trained = sum(p.numel() for p in params if p.requires_grad)
    checkpoint = config.checkpoint
    trainable_only = checkpoint.trainable_only
    if trainable_only is None:
        trainable_only = lora is not None
    saved = trained if trainable_only else sum(p.numel() for p in params)
    optim = config.optim
    states = STATE_BYTES[getattr(optim, "state_dtype", "float32")]
    if getattr(optim, "ema", None) is not None:
        states += 4.0
    return int(4 * saved + states * trained), _count(config)


def _count(config: Any) -> int:
    """Checkpoints that are kept, the best one, and one that is being written."""
    checkpoint = config.checkpoint
    kept = checkpoint.keep_n
    steps = config.loop.total_steps
    if kept is None:
        has_interval = steps and isinstance(checkpoint.interval, int)
        kept = steps // checkpoint.interval if has_interval else 1
    if checkpoint.keep_every and steps:
        kept += steps // checkpoint.keep_every
    has_best = checkpoint.best_metric is not None and config.loop.eval_interval is not None
    return int(kept) + has_best + 1


def head_size(config: Any) -> int | None:
    """The head size of the text model; None for a model that only prepare_model() knows."""
    if config.model.type == "module":
        return None
    with torch.device("meta"):
        model: Any = MLLMModelKit().build(config.model)
    text = model.hf.config.get_text_config()
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
