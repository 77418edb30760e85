"""What a checkpoint holds, as flat names: `model.<name>`, `optim.<name>.<state>`, `shared`, `rank.<n>`.

The names are those of the parameters, not their positions, so a checkpoint does not depend on the number of ranks or
on the order of the parameter groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mvp_engine.checkpoint import storage
from mvp_engine.errors import UserError


@dataclass(frozen=True)
class SavedState:
    """The small state of a run. `shared` is the same on all ranks, `ranks` has one entry for each rank that saved."""

    shared: dict[str, Any]
    ranks: list[dict[str, Any]]


def collect(
    model: nn.Module, optimizer: torch.optim.Optimizer, shared: dict[str, Any], own: dict[str, Any], rank: int
) -> dict[str, Tensor]:
    """Everything this rank has to save. Tensors are still those of the model and the optimizer."""
    tensors, other = {}, {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            tensors[f"model.{name}"] = value
        else:
            other[name] = value  # a module's get_extra_state
    names = _names(model)
    scalars: dict[str, dict[str, Any]] = {}
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optim.{_name(names, param)}.{key}"] = value
            else:
                scalars.setdefault(_name(names, param), {})[key] = value
    groups = [
        {**{k: v for k, v in g.items() if k != "params"}, "params": [_name(names, p) for p in g["params"]]}
        for g in optimizer.param_groups
    ]
    shared = {**shared, "model_extra": other, "optim_groups": groups, "optim_scalars": scalars}
    if rank == 0:
        tensors["shared"] = storage.to_bytes(shared)
    tensors[f"rank.{rank:05d}"] = storage.to_bytes(own)
    return tensors


def restore(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    group: dist.ProcessGroup | None,
    whole_groups: bool = False,
) -> SavedState:
    """Load a checkpoint into the model and, where given, the optimizer; gives the small state.

    Of the parameter groups only the learning rates are taken, unless `whole_groups`: the rest is the config's, which
    may have been changed.
    """
    saved = storage.entries(folder)
    blobs = {n: torch.empty(e.size, dtype=torch.uint8) for n, e in saved.items() if n == "shared" or n[:5] == "rank."}
    tensors: dict[str, Tensor] = dict(blobs)
    weights = {f"model.{n}": v for n, v in model.state_dict().items() if isinstance(v, Tensor)}
    _check_fit(folder, weights, saved)
    tensors |= weights
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for name, param in model.named_parameters() if optimizer else ():
        prefix = f"optim.{name}."
        for key in [n for n in saved if n.startswith(prefix) and "." not in n[len(prefix) :]]:
            entry = saved[key]
            dtype = entry.properties.dtype
            # Moments are laid out like their parameter; step counts are plain scalars.
            like = entry.size == param.shape
            tensors[key] = (
                torch.empty_like(param.detach(), dtype=dtype) if like else torch.empty(entry.size, dtype=dtype)
            )
            states.setdefault(param, {})[key[len(prefix) :]] = tensors[key]
    storage.read(folder, tensors, group)
    shared = storage.from_bytes(tensors["shared"])
    if shared["model_extra"]:
        model.load_state_dict(shared["model_extra"], strict=False)
    if optimizer:
        _restore_optimizer(model, optimizer, states, shared, folder, whole_groups)
    return SavedState(shared, [storage.from_bytes(tensors[n]) for n in sorted(blobs) if n != "shared"])


def _restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    states: dict[nn.Parameter, dict[str, Any]],
    shared: dict[str, Any],
    folder: Path,
    whole_groups: bool,
) -> None:
    names = _names(model)
    params = dict(model.named_parameters())
    for name, scalars in shared["optim_scalars"].items():
        states.setdefault(params[name], {}).update(scalars)
    saved_group = {name: g for g in shared["optim_groups"] for name in g["params"]}
    for group in optimizer.param_groups:
        known = [saved_group[_name(names, p)] for p in group["params"] if _name(names, p) in saved_group]
        if len(known) != len(group["params"]):
            lost = [_name(names, p) for p in group["params"] if _name(names, p) not in saved_group]
            raise UserError(f"checkpoint {folder} has no optimizer state for {lost[:3]}: was it frozen then?")
        group.update(
            {k: v for k, v in known[0].items() if k in ("lr", "initial_lr") or (whole_groups and k != "params")}
        )
    order = [p for group in optimizer.param_groups for p in group["params"]]
    # Through the optimizer's own loader, which knows where each kind of state has to live.
    packed = optimizer.state_dict()
    packed["state"] = {i: states[p] for i, p in enumerate(order) if p in states}
    optimizer.load_state_dict(packed)


def _check_fit(folder: Path, weights: dict[str, Tensor], saved: dict[str, Any]) -> None:
    missing = [n for n in weights if n not in saved]
    extra = [n for n in saved if n.startswith("model.") and n not in weights]
    shapes = [n for n, w in weights.items() if n in saved and saved[n].size != w.shape]
    if missing or extra or shapes:
        parts = []
        if shapes:
            n = shapes[0]
            parts.append(f"{n} is {tuple(saved[n].size)} there and {tuple(weights[n].shape)} here")
        if missing:
            parts.append(f"it lacks {', '.join(missing[:3])}")
        if extra:
            parts.append(f"it also has {', '.join(extra[:3])}")
        raise UserError(
            f"checkpoint {folder} does not fit this model: {'; '.join(parts)}. Was the model config changed?"
        )


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {param: name for name, param in model.named_parameters()}


def _name(names: dict[Tensor, str], param: Tensor) -> str:
    if param not in names:
        raise UserError("the optimizer holds a parameter that is no part of the model; register it on the model")
    return names[param]
