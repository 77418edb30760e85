"""The default optimizer (fused AdamW), its parameter groups, and the learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.config.schema import Optim, default_values
from mvp_engine.errors import UserError
from mvp_engine.hf.model.model_parts import matching

# ---- Optimizer --------------------------------------------------------------------------------------------------


def build_optimizer(model: nn.Module, config: Optim) -> torch.optim.AdamW:
    """torch's fused AdamW on the groups of `parameter_groups`."""
    return torch.optim.AdamW(
        parameter_groups(model, config),
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )


def parameter_groups(model: nn.Module, config: Optim) -> list[dict[str, Any]]:
    """The trainable parameters, grouped by learning rate and by weight decay; each group has a name."""
    learning_rates = _learning_rates_by_part(model, config)
    no_decay = without_decay(model)
    groups: dict[str, dict[str, Any]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        pattern, lr = learning_rates.get(name, (None, config.lr))
        group_name = "no_decay" if param in no_decay else "decay"
        if pattern is not None:
            group_name = f"{pattern}/{group_name}"
        if group_name not in groups:
            weight_decay = 0.0 if param in no_decay else config.weight_decay
            groups[group_name] = {"params": [], "lr": lr, "weight_decay": weight_decay}
        groups[group_name]["params"].append(param)
    if not groups:
        raise UserError(
            "no parameter of the model requires a gradient, so nothing can be trained. Check model.freeze"
        )
    return [{**group, "name": name} for name, group in sorted(groups.items())]


def without_decay(model: nn.Module) -> set[nn.Parameter]:
    """The parameters without weight decay: vectors, norms of any shape, and embeddings.

    Embeddings are found as modules and, by name, as bare parameters of a model (`pos_embed`, `cls_token`).
    """
    found: set[nn.Parameter] = set()
    for module in model.modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        is_leaf = next(module.children(), None) is None
        is_norm = is_leaf and "norm" in type(module).__name__.lower()
        for name, param in module.named_parameters(recurse=False):
            is_bare_embedding = "embed" in name or name.endswith("_token")
            if is_embedding or is_norm or is_bare_embedding or param.ndim < 2:
                found.add(param)
    return found


def _learning_rates_by_part(model: nn.Module, config: Optim) -> dict[str, tuple[str, float]]:
    """The first pattern of `optim.lr_by_part` that matches a parameter, and its learning rate, by parameter name."""
    found: dict[str, tuple[str, float]] = {}
    for pattern, lr in config.lr_by_part.items():
        for name in matching(model, pattern, "optim.lr_by_part"):
            found.setdefault(name, (pattern, lr))
    return found


# Keys that an optimizer reads; the others of the section are of the schedule, the EMA and recipes.
OPTIMIZER_KEYS = ["name", "lr", "betas", "eps", "weight_decay", "lr_by_part"]
OPTIMIZER_KEYS += [
    "state_dtype",
    "offload",
    "muon_exclude",
]  # those of the optimizer kit


def ignored_keys(config: Optim, read: Set[str]) -> list[str]:
    """The keys with other values than their defaults that an optimizer was built without; `read`: attributes."""
    if read & {"__dict__", "__pydantic_serializer__"}:
        return []  # all were read: model_dump() and the like
    defaults = default_values("optim")
    ignored = []
    for key in OPTIMIZER_KEYS:
        field = type(config).model_fields.get(key)
        if field is not None and key not in read:
            default = defaults.get(key, field.get_default(call_default_factory=True))
            if getattr(config, key) != default:
                ignored.append(key)
    return ignored


# ---- Schedule ---------------------------------------------------------------------------------------------------


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: Optim, total_steps: int | None
) -> LambdaLR:
    """The schedule of `optim.schedule` with its warm-up. Some need the number of all steps."""
    if total_steps is None:
        _check_without_total_steps(config)
    return LambdaLR(optimizer, partial(lr_factor, config=config, total_steps=total_steps or 0))


def _check_without_total_steps(config: Optim) -> None:
    key = None
    if config.schedule != "constant":
        key = f"optim.schedule={config.schedule}"
    elif isinstance(config.warmup, float):
        key = f"optim.warmup={config.warmup}"
    if key is not None:
        raise UserError(
            f"{key} needs the number of steps, and the loader has no length: "
            "set train.max_steps, or optim.schedule=constant with a warm-up in steps"
        )


def lr_factor(step: int, config: Optim, total_steps: int) -> float:
    """The factor of `optim.lr` at a step, counted from 0."""
    is_share = isinstance(config.warmup, float)
    warmup = math.ceil(config.warmup * total_steps) if is_share else config.warmup
    if step < warmup:
        return (step + 1) / warmup
    decay_start = warmup
    if config.schedule == "wsd":
        decay_steps = math.ceil(config.decay_ratio * total_steps)
        decay_start = max(warmup, total_steps - decay_steps)
    progress = max(0, step - decay_start) / max(1, total_steps - decay_start)
    factor = _decay_factor(config.schedule, min(1.0, progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * factor


def _decay_factor(schedule: str, progress: float) -> float:
    """From 1 to 0 as the decay progresses from 0 to 1."""
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule == "wsd":
        return 1.0 - math.sqrt(progress)  # ends at a lower loss than a linear decay of equal length
    return 1.0  # constant


@contextmanager
def with_learning_rate(optimizer: Optimizer, lr: float | None) -> Iterator[None]:
    """A context for an update with this learning rate; None: with that of the schedule.

    Where groups have their own, it is the highest one, and they keep their ratios.
    """
    if lr is None:
        yield
        return
    groups = optimizer.param_groups
    before = [group["lr"] for group in groups]
    initial = [float(group.get("initial_lr", group["lr"])) for group in groups]
    given = [lr * own / max(initial) if max(initial) else float(lr) for own in initial]
    for group, rate in zip(groups, given, strict=True):
        group["lr"] = rate
    try:
        yield
    finally:
        for group, rate, own in zip(groups, given, before, strict=True):
            if group["lr"] is rate:  # else the schedule has advanced, and set the next one
                group["lr"] = own
