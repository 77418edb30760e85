"""Weights for a model that was built on the meta device and is parallelized already: loaded, or random from the seed.

Random weights are initialized unit by unit (a block, or all that is outside of blocks), unsharded, on the CPU, by the
model's own rules; each rank then copies its shards. So they are the same on every layout, and no rank holds more than
one unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data import derived_seed
from mvp_engine.distributed.dtensor import local_shards, shard_slices
from mvp_engine.distributed.fsdp import blocks
from mvp_engine.errors import UserError
from mvp_engine.model_engine.adapter import ModelAdapter

Modules = dict[str, nn.Module]  # by name


def materialize_weights(
    model: nn.Module,
    adapter: ModelAdapter,
    skeleton: nn.Module,
    device: torch.device,
    seed: int,
) -> None:
    """`skeleton` is the same model on the meta device, as it was before it was parallelized."""
    _allocate(model, device)
    loaded = adapter.load_weights(skeleton)
    real = dict(model.state_dict(keep_vars=True)) | dict(model.named_buffers())
    owners = _init_owners(skeleton)
    for name, modules in _units(skeleton):
        unit_seed = derived_seed(seed, "weights", name)
        initialize_random(modules, owners, real, loaded, unit_seed)


def _tensors_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """The parameters and buffers of one module: the dict that holds them, name, tensor."""
    for registry in (module._parameters, module._buffers):
        for name, tensor in list(registry.items()):
            if tensor is not None:
                yield registry, name, tensor


def _empty_like(tensor: Tensor, device: torch.device | str) -> Tensor:
    empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate this rank's shards of all meta tensors; tied parameters stay tied."""
    allocated: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for registry, name, tensor in _tensors_of(module):
            if not tensor.is_meta:
                continue
            if tensor not in allocated:
                allocated[tensor] = _empty_like(tensor, device)
            registry[name] = allocated[tensor]


def _units(skeleton: nn.Module) -> Iterator[tuple[str, Modules]]:
    """The blocks of a model, then everything outside of them."""
    names = {module: name for name, module in skeleton.named_modules()}
    inside: set[nn.Module] = set()
    for block in blocks(skeleton):
        inside |= set(block.modules())
        yield names[block], {names[module]: module for module in block.modules()}
    yield "", {name: module for module, name in names.items() if module not in inside}


def initialize_random(
    modules: Modules,
    owners: dict[nn.Module, Any],
    real: dict[str, Tensor],
    loaded: set[str],
    seed: int,
) -> None:
    """Initialize the tensors of some skeleton modules that were not loaded, and copy this rank's shards of them."""
    unsharded, ties = _put_on_cpu(modules, loaded)
    if not unsharded:
        return
    versions = {name: value._version for name, value in unsharded.items()}
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(seed)
        for module in reversed(list(modules.values())):
            _init_module(module, owners[module])
    for name, value in unsharded.items():
        _check_initialized(name, value, versions[name])
        with torch.no_grad():
            for offset, shard in local_shards(real[name]):
                shard.copy_(value[shard_slices(offset, shard)])
    _put_back(modules, ties)


def _put_on_cpu(
    modules: Modules, loaded: set[str]
) -> tuple[dict[str, Tensor], dict[Tensor, Tensor]]:
    """Give the skeleton's modules CPU tensors to initialize.

    Returns them by name, and by the meta tensor that they replace.
    """
    unsharded: dict[str, Tensor] = {}
    ties: dict[Tensor, Tensor] = {}
    for prefix, module in modules.items():
        for registry, name, tensor in _tensors_of(module):
            full_name = f"{prefix}.{name}" if prefix else name
            if full_name in loaded:
                continue
            if tensor not in ties:
                empty = torch.empty_like(tensor, device="cpu")
                if empty.is_floating_point():
                    empty.fill_(float("nan"))  # to find what no rule initializes
                is_param = isinstance(tensor, nn.Parameter)
                ties[tensor] = nn.Parameter(empty) if is_param else empty
            registry[name] = ties[tensor]
            unsharded[full_name] = ties[tensor]
    return unsharded, ties


def _put_back(modules: Modules, ties: dict[Tensor, Tensor]) -> None:
    """Return the skeleton's modules to the meta device."""
    back = {new: old for old, new in ties.items()}
    for module in modules.values():
        for registry, name, tensor in _tensors_of(module):
            if tensor in back:
                registry[name] = back[tensor]


def _check_initialized(name: str, value: Tensor, version: int) -> None:
    # Integers have no NaN: whether they were written shows in their version counter.
    unset = value.isnan().any() if value.is_floating_point() else value._version == version
    if value.numel() and bool(unset):
        raise UserError(
            f"{name} has no value: its model's _init_weights does not set it. Set it there, or load it from a "
            "folder that has it (model.path)"
        )


def _init_owners(model: nn.Module) -> dict[nn.Module, Any]:
    """For each module, the innermost model around it that has `_init_weights`."""
    owners: dict[nn.Module, Any] = {}

    def walk(module: nn.Module, owner: Any) -> None:
        owner = module if hasattr(module, "_init_weights") else owner
        owners[module] = owner
        for child in module.children():
            walk(child, owner)

    walk(model, None)
    return owners


def _init_module(module: nn.Module, owner: Any) -> None:
    if owner is not None:
        owner._init_weights(module)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]
