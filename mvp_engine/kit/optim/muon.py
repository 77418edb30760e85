"""Muon's direction: the momentum of a matrix with all its singular values brought near 1, on any layout.

The whole matrix is needed. Ranks that share matrices take turns: of as many matrices as there are ranks, each rank
works on one, and gives the result to the others. Where ranks share a stack of matrices (experts) by whole matrices,
each works on its own, and nothing travels.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mvp_engine.distributed.dtensor import full_tensor, local_tensor, shard_offsets, shard_slices

STEPS = 5
_A, _B, _C = (
    3.4445,
    -4.7750,
    2.0315,
)  # a steep polynomial: values above 0.01 end between 0.68 and 1.13


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix of orthonormal rows or columns, about, by five Newton-Schulz steps; stacks matrix by matrix.

    In bfloat16 on a GPU, where it is fast and exact enough; in float32 on the CPU.
    """
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


def scale(shape: torch.Size) -> float:
    """Brings the update to the size of AdamW's, whose rate and decay then fit."""
    return 0.2 * max(shape[-2:]) ** 0.5


def directions(momenta: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """For each of the momenta, in some order: its place in the list, and what this rank holds of its direction.

    Ranks that share matrices call it together, with the same ones, and go through to the end.
    """
    shared = []
    for i, momentum in enumerate(momenta):
        if _is_whole_here(momentum):
            here = local_tensor(momentum)
            yield i, (orthogonal(here) if here.numel() else here)
        else:
            shared.append(i)
    # The largest first: those of one turn are then of about the same size.
    shared.sort(key=lambda i: (_ranks(momenta[i]), -momenta[i].numel(), i))
    for _, members in groupby(shared, key=lambda i: _ranks(momenta[i])):
        yield from _in_turns(momenta, list(members))


def _is_whole_here(momentum: Tensor) -> bool:
    """Does this rank hold whole matrices, so that it can do its own?"""
    if not isinstance(momentum, DTensor):
        return True
    cut = {getattr(placement, "dim", -1) for placement in momentum.placements}
    return momentum.ndim > 2 and max(cut) < momentum.ndim - 2


def _ranks(momentum: Tensor) -> list[int]:
    assert isinstance(momentum, DTensor)
    return [int(rank) for rank in momentum.device_mesh.mesh.flatten()]


def _in_turns(momenta: list[Tensor], members: list[int]) -> Iterator[tuple[int, Tensor]]:
    ranks = _ranks(momenta[members[0]])
    me = ranks.index(dist.get_rank())
    for begin in range(0, len(members), len(ranks)):
        turn = members[begin : begin + len(ranks)]
        result: Tensor | None = None
        for owner, i in enumerate(turn):
            full = full_tensor(
                momenta[i].bfloat16() if momenta[i].is_cuda else momenta[i]
            )  # as it is worked on
            if owner == me:
                result = orthogonal(full).contiguous()
        for owner, i in enumerate(turn):
            momentum = momenta[i]
            assert isinstance(momentum, DTensor)
            here = torch.empty_like(
                local_tensor(momentum), dtype=torch.bfloat16 if momentum.is_cuda else torch.float32
            )
            full = result if owner == me and result is not None else here.new_empty(momentum.shape)
            _broadcast(full, owner, momentum.device_mesh)
            for offset, index in shard_offsets(momentum):
                here[index] = full[shard_slices(offset, here[index])]
            yield i, here


def _broadcast(tensor: Tensor, owner: int, mesh: DeviceMesh) -> None:
    """From the `owner`-th rank of a mesh to all others of it: along its first dimension, then along the next."""
    source = [int(place) for place in torch.unravel_index(torch.tensor(owner), mesh.shape)]
    here = list(mesh.get_coordinate() or ())
    for axis in range(mesh.ndim):
        if here[axis + 1 :] == source[axis + 1 :]:
            dist.broadcast(tensor, group=mesh.get_group(axis), group_src=source[axis])
