"""The global norm of gradients, over any mix of meshes, and the first parameter with a non-finite gradient."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mvp_engine.distributed.dtensor import local_tensor


class GradNorms(NamedTuple):
    """Norms of this rank's shards of some gradients."""

    params: list[Tensor]
    norms: Tensor


def local_grad_norm_sq(params: list[Any], world_size: int) -> tuple[Tensor, list[GradNorms]]:
    """What this rank adds to the squared norm of all gradients, in float64.

    An element that several ranks hold is added by each of them, with a weight of one over their number. So one
    all-reduce over all ranks gives the whole, whatever meshes the gradients are sharded over.
    """
    groups: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # by number of shards
    for param in params:
        members, grads = groups.setdefault(_num_shards(param.grad), ([], []))
        members.append(param)
        grads.append(local_grad(param))
    device = params[0].device if params else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    every: list[GradNorms] = []
    for shards, (members, grads) in groups.items():
        # Converted together: one kernel, not hundreds.
        norms = torch.stack(torch._foreach_norm(grads)).double()
        total += norms.square().sum() * (shards / world_size)
        every.append(GradNorms(members, norms))
    return total, every


def local_grad(param: Any) -> Tensor:
    """This rank's shard of a gradient."""
    return local_tensor(param.grad)


def _num_shards(grad: Tensor) -> int:
    if not isinstance(grad, DTensor):
        return 1
    sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


def first_nonfinite_grad(model: nn.Module, norms: list[GradNorms]) -> str | None:
    """The name of the last parameter with a non-finite gradient: backward reaches the last one first."""
    bad: set[int] = set()
    for group in norms:
        values = group.norms.tolist()
        pairs = zip(group.params, values, strict=True)
        bad |= {id(param) for param, norm in pairs if not math.isfinite(norm)}
    names = [name for name, param in model.named_parameters() if id(param) in bad]
    return names[-1] if names else None
