"""FSDP2 applied to an untouched model: each block, then the rest. Gradients are summed, never averaged."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_model(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> None:
    """Shard the parameters over the mesh's last dimension and replicate them over its first, if it has two.

    They are kept and their gradients summed in float32; on the way to a computation in `dtype` they travel as that.
    """
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: the entries of its outermost lists of modules."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += [entry for entry in child if any(True for _ in entry.parameters())]
        else:
            found += blocks(child)
    return found


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
