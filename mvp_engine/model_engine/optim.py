"""The optimizer and the learning-rate schedule that the engine uses unless a recipe brings its own."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.config.schema import Optim
from mvp_engine.errors import UserError
from mvp_engine.hf.parts import matching


def build_optimizer(model: nn.Module, config: Optim) -> torch.optim.AdamW:
    """Fused AdamW. Weight decay reaches matrices only: not norms, not biases, not embeddings."""
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(
        parameter_groups(model, config), config.lr, betas, config.eps, fused=True
    )


def parameter_groups(model: nn.Module, config: Optim) -> list[dict[str, Any]]:
    """What trains, by rate and by whether it decays; each group has a name."""
    rates, plain = _rates(model, config), without_decay(model)
    groups: dict[str, dict[str, Any]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            pattern, rate = rates.get(name, (None, config.lr))
            label = "no_decay" if param in plain else "decay"
            group = groups.setdefault(
                label if pattern is None else f"{pattern}/{label}",
                {
                    "params": [],
                    "lr": rate,
                    "weight_decay": 0.0 if param in plain else config.weight_decay,
                },
            )
            group["params"].append(param)
    if not groups:
        raise UserError(
            "the model has no parameter that requires a gradient; there is nothing to train"
        )
    return [{**group, "name": name} for name, group in sorted(groups.items())]


def without_decay(model: nn.Module) -> set[nn.Parameter]:
    """Vectors, norms of any shape, and embeddings: modules of such, or tables that a model keeps by itself."""
    found: set[nn.Parameter] = set()
    for module in model.modules():
        is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        is_norm = "norm" in type(module).__name__.lower() and not any(
            True for _ in module.children()
        )
        for name, param in module.named_parameters(recurse=False):
            if is_table or is_norm or param.ndim < 2 or "embed" in name or name.endswith("_token"):
                found.add(param)
    return found


def _rates(model: nn.Module, config: Optim) -> dict[str, tuple[str, float]]:
    """For each parameter that `optim.lr_by_part` speaks of, the first pattern that fits, and its rate."""
    found: dict[str, tuple[str, float]] = {}
    for pattern, rate in config.lr_by_part.items():
        for name in matching(model, pattern, "optim.lr_by_part"):
            found.setdefault(name, (pattern, rate))
    return found


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: Optim, total_steps: int | None
) -> LambdaLR:
    needs = [f"optim.schedule={config.schedule}"] if config.schedule != "constant" else []
    needs += ["optim.warmup_ratio"] if config.warmup_ratio is not None else []
    if total_steps is None and needs:
        raise UserError(
            f"{needs[0]} needs the number of steps, and the loader has no length: "
            "set loop.total_steps, or optim.schedule=constant with a warm-up in steps"
        )
    return LambdaLR(optimizer, partial(lr_factor, config=config, total_steps=total_steps or 0))


def lr_factor(step: int, config: Optim, total_steps: int) -> float:
    """What optim.lr is multiplied with in update number `step`, counted from 0."""
    warmup = config.warmup_steps
    if config.warmup_ratio is not None:
        warmup = math.ceil(config.warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    begin = warmup  # of the way down
    if config.schedule == "wsd":
        begin = max(warmup, total_steps - math.ceil(config.decay_ratio * total_steps))
    done = min(1.0, max(0, step - begin) / max(1, total_steps - begin))
    shapes = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        "wsd": 1.0
        - math.sqrt(done),  # ends lower than a straight line does for the same number of steps
    }
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shapes[config.schedule]
