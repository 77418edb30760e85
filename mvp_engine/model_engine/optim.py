"""The optimizer and the learning-rate schedule that the engine uses unless a recipe brings its own."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.config.schema import Optim
from mvp_engine.errors import UserError


def build_optimizer(model: nn.Module, config: Optim) -> torch.optim.AdamW:
    """Fused AdamW. Weight decay reaches matrices only: not norms, not biases, not embeddings."""
    embeddings = {p for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) for p in m.parameters()}
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for param in model.parameters():
        if param.requires_grad:
            (plain if param.ndim < 2 or param in embeddings else decay).append(param)
    if not decay and not plain:
        raise UserError("the model has no parameter that requires a gradient; there is nothing to train")
    groups = [
        {"params": decay, "weight_decay": config.weight_decay, "name": "decay"},
        {"params": plain, "weight_decay": 0.0, "name": "no_decay"},
    ]
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW([g for g in groups if g["params"]], config.lr, betas, config.eps, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, config: Optim, total_steps: int | None) -> LambdaLR:
    if total_steps is None and config.schedule != "constant":
        raise UserError(
            f"optim.schedule={config.schedule} needs the number of steps, and the loader has no length: "
            "set loop.total_steps, or optim.schedule=constant"
        )
    return LambdaLR(optimizer, partial(lr_factor, config=config, total_steps=total_steps or 0))


def lr_factor(step: int, config: Optim, total_steps: int) -> float:
    """What optim.lr is multiplied with in update number `step`, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    shape = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape
