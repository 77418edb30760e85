"""Does an optimizer come back from a checkpoint as it was? `mvp check` asks it, after some steps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mvp_engine.checkpoint import state
from mvp_engine.distributed import World
from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.distributed.world import raise_on_all_ranks


def optimizer_round_trip(
    model: nn.Module,
    trained: Optimizer,
    loaded: Any,
    folder: Path,
    world: World,
    *,
    initial_groups: Any,
    whole_groups: bool,
) -> list[str]:
    """Save `trained` into `folder`, load it into a new optimizer of the same model; what differs. All ranks call it.

    It saves and loads one parameter for each kind of state and each parameter group, the smallest.
    """
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    chosen = _one_of_each_kind(trained)
    part = nn.Module()
    parameters: dict[str, Any] = {names[param]: param for param in chosen}
    part._parameters.update(parameters)
    saved: Any = object.__new__(type(trained))  # of the chosen parameters only
    saved.state = {param: trained.state[param] for param in chosen if param in trained.state}
    saved.param_groups = _groups_of(chosen, trained)
    loaded.param_groups = _groups_of(chosen, loaded)
    state.check_ranks_agree(model, trained, world)
    with raise_on_all_ranks(world.host_group):
        tensors = state.collect(part, saved, {}, {}, world.rank, initial_groups=initial_groups)
    state.save(folder, tensors, world)
    state.restore(folder, part, loaded, world.host_group, whole_groups)
    return [*chain(*world.all_gather(optimizer_differences(saved, loaded, names)))]


def changed_attributes(trained: Optimizer, loaded: Optimizer) -> list[str]:
    """Numbers and tensors that training changed on the optimizer itself, which no checkpoint saves."""
    return [
        key
        for key, value in vars(trained).items()
        if type(value) in (int, float) or isinstance(value, Tensor)  # schedulers set flags
        if key not in ("found_inf", "grad_scale")  # of the model engine
        if not _is_same(value, vars(loaded).get(key))
    ]


def _groups_of(chosen: set[Tensor], optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups with these parameters only."""
    groups = []
    for group in optimizer.param_groups:
        groups.append({**group, "params": [param for param in group["params"] if param in chosen]})
    return groups


def _one_of_each_kind(optimizer: Optimizer) -> set[Tensor]:
    """The smallest parameter of each group, and the smallest with each kind of state."""
    smallest: dict[Any, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in sorted(group["params"], key=lambda param: param.numel()):
            param_state = optimizer.state.get(param, {})
            kind = tuple((key, *_kind(param, value)) for key, value in param_state.items())
            for key in (index, kind):
                if key not in smallest or param.numel() < smallest[key].numel():
                    smallest[key] = param
    return set(smallest.values())


def _kind(param: Tensor, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Tensor):
        return (type(value),)
    is_contiguous = local_tensor(value).is_contiguous()
    return type(value), value.dtype, value.device.type, value.shape == param.shape, is_contiguous


def optimizer_differences(
    saved: Optimizer, loaded: Optimizer, names: Mapping[Tensor, str]
) -> list[str]:
    """What differs between an optimizer and one that was loaded from its checkpoint: keys, layouts, bits."""
    differences = []
    for group, other in zip(saved.param_groups, loaded.param_groups, strict=True):
        for key in sorted({*group, *other} - {"params"}) if group["params"] else []:
            if not _is_same(group.get(key), other.get(key)):
                differences.append(f"param_groups have another {key!r}")
    for param, param_state in saved.state.items():
        other_state = loaded.state.get(param, {})
        for key in {**param_state, **other_state}:
            if not _is_same(param_state.get(key), other_state.get(key)):
                differences.append(f"{names[param]} has another state {key!r}")
    return differences


def _is_same(value: Any, other: Any) -> bool:
    """Equal in type, layout and bits, also inside of containers."""
    if type(value) is not type(other):
        return False
    if isinstance(value, Mapping):
        same_keys = value.keys() == other.keys()
        return same_keys and all(_is_same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if not isinstance(value, Tensor):
        return bool(value == other) or repr(value) == repr(other)  # NaN
    a, b = local_tensor(value.detach()), local_tensor(other.detach())
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return _layout(value, a) == _layout(other, b) and torch.equal(*bits)


def _layout(value: Tensor, local: Tensor) -> tuple[Any, ...]:
    placements = getattr(value, "placements", None)  # of a DTensor
    return placements, value.shape, local.dtype, local.device, local.shape, local.stride()
