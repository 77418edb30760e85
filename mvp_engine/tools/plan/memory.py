"""Bytes that a rank holds between steps: of its own engine, and of other ranks, from the placements of DTensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from mvp_engine.distributed.dtensor import dim_slices, local_tensor


def held_bytes(engine: Any) -> dict[str, int]:
    """Bytes of this rank by kind, after a step."""
    return {kind: _local_bytes(tensors) for kind, tensors in _held(engine).items()}


def _held(engine: Any) -> dict[str, list[Tensor]]:
    model = engine.model
    states = tree_leaves(list(engine.optimizer.state.values()))
    if getattr(engine.optimizer, "offload", False):
        states = []  # on the host
    return {
        "weights": [*model.parameters(), *model.buffers()],
        "gradients": [param.grad for param in model.parameters() if param.grad is not None],
        "optimizer states": [one for one in states if isinstance(one, Tensor)],
    }


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    local = [local_tensor(tensor) for tensor in tensors]
    return sum(one.numel() * one.element_size() for one in local)


def bytes_of_ranks(engine: Any) -> dict[int, int]:
    """Bytes by rank, for the ranks that share the parameters of this engine's rank.

    A rank holds what the placements of the DTensors give it, so none has to be simulated for that.
    """
    sharded = Counter[_Sharding]()
    whole = 0  # bytes of tensors that no rank shards
    for tensor in [one for tensors in _held(engine).values() for one in tensors]:
        if isinstance(tensor, DTensor):
            sharded[_Sharding.of(tensor)] += tensor.element_size()
        else:
            whole += tensor.numel() * tensor.element_size()
    if not sharded:
        return {engine.world.rank: whole}
    ranks = set.intersection(*(set(sharding.ranks) for sharding in sharded))
    found = dict.fromkeys(sorted(ranks), whole)
    for sharding, size in sharded.items():
        for rank, elements in zip(sharding.ranks, sharding.elements(), strict=True):
            if rank in found:
                found[rank] += size * elements
    return found


@dataclass(frozen=True)
class _Sharding:
    """The shape of a DTensor, and how it is placed on a mesh."""

    shape: tuple[int, ...]
    placements: tuple[Any, ...]
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]  # of the mesh, the last dimension fastest

    @classmethod
    def of(cls, tensor: DTensor) -> _Sharding:
        mesh = tensor.device_mesh
        ranks = tuple(mesh.mesh.flatten().tolist())
        return cls(tuple(tensor.shape), tuple(tensor.placements), tuple(mesh.shape), ranks)

    def elements(self) -> list[int]:
        """The elements of each rank of the mesh."""
        found = []
        for coordinate in product(*map(range, self.mesh_shape)):
            lengths = []
            for dim, size in enumerate(self.shape):
                slices = dim_slices(size, dim, self.placements, self.mesh_shape, coordinate)
                lengths.append(sum(one.length for one in slices))
            found.append(prod(lengths))
        return found
