"""Fill the weights of a model that was built on the meta device and is sharded already: load them, or initialize them.

Initialization goes one unit at a time: a transformer block, and at the end all modules outside of blocks. A unit is
initialized unsharded, on the CPU, by the model's own `_init_weights` (else `reset_parameters`), with a seed of its own;
each rank then copies its shards. So random weights are identical for every world size and sharding, and no rank holds
more than one unsharded unit at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data import derived_seed
from mvp_engine.distributed.data_parallel import blocks
from mvp_engine.distributed.dtensor import local_shards, shard_slices
from mvp_engine.errors import UserError
from mvp_engine.hf.model.adapter import ModelAdapter
from mvp_engine.ops.nf4 import Nf4Linear, quantized_layers

Modules = dict[str, nn.Module]  # by full name in the model


def materialize_weights(
    model: nn.Module, adapter: ModelAdapter, skeleton: nn.Module, device: torch.device, seed: int
) -> None:
    """Allocate and fill all parameters and buffers of `model`, in place.

    `skeleton` is a copy of the model on the meta device, made before it was sharded: it has the same names, the
    unsharded shapes and the rules of initialization.
    """
    allocate(model, device)
    loaded = adapter.load_weights(skeleton)  # into the model; returns names, tied ones under each
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= model.named_buffers(remove_duplicate=False)
    owners = _init_owners(skeleton)
    quantized = quantized_layers(model)
    waiting: dict[str, Tensor] = {}
    for name, modules in _units(skeleton):
        if name and not any(one in tensors or one in quantized for one in _names(modules)):
            continue  # a block of another pipeline stage
        unit_seed = derived_seed(seed, "weights", name)
        unset = initialize_random(modules, owners, tensors, loaded, unit_seed, quantized, waiting)
        # A rule outside of the blocks may set buffers inside of them (Falcon-H1), and that unit is the last one.
        waiting = {n: v for n, v in unset.items() if name and not isinstance(v, nn.Parameter)}
        for missing in sorted(unset.keys() - waiting.keys()):
            raise UserError(
                f"{missing} has no value: its model's _init_weights does not set it. Set it there, or load it from a "
                "folder that has it (model.path)"
            )


def _tensors_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield (dict, name, tensor) of each parameter and buffer of one module, so that the caller can replace it."""
    for registry in (module._parameters, module._buffers):
        for name, tensor in list(registry.items()):  # a copy: callers replace entries
            if tensor is not None:
                yield registry, name, tensor


def _empty_like(tensor: Tensor, device: torch.device | str) -> Tensor:
    empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate this rank's shards of all meta tensors. Unlike `Module.to_empty`, tied parameters stay tied."""
    allocated: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for registry, name, tensor in _tensors_of(module):
            if not tensor.is_meta:
                continue
            if tensor not in allocated:
                allocated[tensor] = _empty_like(tensor, device)
            registry[name] = allocated[tensor]


def _units(skeleton: nn.Module) -> Iterator[tuple[str, Modules]]:
    """The blocks of a model, then everything outside of them under the name "". The name is part of the seed."""
    names = {module: name for name, module in skeleton.named_modules()}
    inside: set[nn.Module] = set()
    for block in blocks(skeleton):
        inside |= set(block.modules())
        yield names[block], {names[module]: module for module in block.modules()}
    yield "", {name: module for module, name in names.items() if module not in inside}


def _names(modules: Modules) -> Iterator[str]:
    for prefix, module in modules.items():
        for _, name, _ in _tensors_of(module):
            yield f"{prefix}.{name}" if prefix else name


def initialize_random(
    modules: Modules,
    owners: dict[nn.Module, Any],
    tensors: dict[str, Tensor],
    loaded: set[str],
    seed: int,
    quantized: Mapping[str, Nf4Linear],
    waiting: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Initialize those tensors of one unit that were not loaded, and copy this rank's shards into the model.

    `tensors` are those of the model, by name; `quantized` are layers by the names of their weights; `waiting` are
    tensors of earlier units that their rules did not set. Returns those that are still not set.
    """
    unsharded, cpu_of_meta = _attach_cpu_tensors(modules, loaded)
    unsharded |= waiting
    if not unsharded:
        return {}
    versions = {name: value._version for name, value in unsharded.items()}  # see _is_unset
    unset: dict[str, Tensor] = {}
    with torch.random.fork_rng([]), torch.no_grad():  # []: the CPU generator only
        torch.default_generator.manual_seed(seed)
        # Children before parents, so that the rule of a parent may overwrite theirs. Loaded tensors are still on the
        # meta device here, where writing does nothing.
        for module in reversed(list(modules.values())):
            if owners[module] is not None:
                owners[module]._init_weights(module)
            elif hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
    for name, value in unsharded.items():
        if _is_unset(value, versions[name]):
            unset[name] = value
            continue
        if name not in tensors and name not in quantized:  # another pipeline stage has it
            continue
        with torch.no_grad():
            if name in quantized:
                quantized[name].fill(value.__getitem__)
                continue
            for offset, shard in local_shards(tensors[name]):
                shard.copy_(value[shard_slices(offset, shard)])
    freed = {old: new for old, new in cpu_of_meta.items() if new not in {*unset.values()}}
    _restore_meta_tensors(modules, freed)
    return unset


def _attach_cpu_tensors(
    modules: Modules, loaded: set[str]
) -> tuple[dict[str, Tensor], dict[Tensor, Tensor]]:
    """Replace meta tensors of the skeleton by CPU tensors to initialize.

    Returns two dicts: full name -> CPU tensor, and meta tensor -> CPU tensor.
    """
    unsharded: dict[str, Tensor] = {}
    cpu_of_meta: dict[Tensor, Tensor] = {}  # tied tensors are one key
    for prefix, module in modules.items():
        for registry, name, tensor in _tensors_of(module):
            full_name = f"{prefix}.{name}" if prefix else name
            if full_name in loaded:
                continue
            if tensor not in cpu_of_meta:
                cpu_of_meta[tensor] = _empty_like(tensor, "cpu")
                if tensor.is_floating_point():
                    # _is_unset finds what no rule has written.
                    cpu_of_meta[tensor].data.fill_(float("nan"))
            registry[name] = cpu_of_meta[tensor]
            unsharded[full_name] = cpu_of_meta[tensor]
    return unsharded, cpu_of_meta


def _restore_meta_tensors(modules: Modules, cpu_of_meta: dict[Tensor, Tensor]) -> None:
    """Put the meta tensors of the skeleton back, which frees the CPU tensors."""
    meta_of_cpu = {new: old for old, new in cpu_of_meta.items()}
    for module in modules.values():
        for registry, name, tensor in _tensors_of(module):
            if tensor in meta_of_cpu:
                registry[name] = meta_of_cpu[tensor]


def _is_unset(value: Tensor, version: int) -> bool:
    # Integers have no NaN, but in-place writes raise autograd's version counter.
    if value.is_floating_point():
        return bool(value.isnan().any())
    return value.numel() > 0 and value._version == version


def _init_owners(model: nn.Module) -> dict[nn.Module, Any]:
    """For each module, the innermost module around it (itself included) that has `_init_weights`, or None."""
    owners: dict[nn.Module, Any] = {}

    def walk(module: nn.Module, owner: Any) -> None:
        owner = module if hasattr(module, "_init_weights") else owner
        owners[module] = owner
        for child in module.children():
            walk(child, owner)

    walk(model, None)
    return owners
