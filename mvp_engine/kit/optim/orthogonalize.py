"""Newton-Schulz orthogonalisation of matrices, also of matrices that several ranks shard.

It needs the full matrix. Ranks that shard matrices split the work by matrix: of as many matrices as there are ranks,
each rank gathers and orthogonalises one, and broadcasts the result. A stack of matrices (experts) that is sharded by
whole matrices needs no communication.
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
# Coefficients of the quintic polynomial, steep at zero: singular values above 0.01 end between 0.68 and 1.13.
A = 3.4445
B = -4.7750
C = 2.0315


def orthogonalize(matrix: Tensor) -> Tensor:
    """The nearest orthonormal matrix, approximately, by five Newton-Schulz steps; of a stack, each matrix."""
    x = matrix.to(_work_dtype(matrix))
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:  # the Gram matrix of the short side is the smaller one
        x = x.mT
    norm = x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = B * gram + C * gram @ gram
        x = A * x + polynomial @ x
    return x.mT if is_tall else x


def _work_dtype(matrix: Tensor) -> torch.dtype:
    """bfloat16 on a GPU, where matmuls are fast and the result is approximate anyway; float32 on the CPU."""
    return torch.bfloat16 if matrix.is_cuda else torch.float32


def orthogonalize_all(matrices: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield the position of each matrix in the list and this rank's part of the orthogonalised matrix, in any order.

    A collective: ranks that shard matrices call it with the same list and iterate to the end.
    """
    sharded: list[int] = []
    for i, matrix in enumerate(matrices):
        if not _has_whole_matrices(matrix):
            sharded.append(i)
            continue
        local = local_tensor(matrix)
        yield i, orthogonalize(local) if local.numel() else local
    # Sorted by size, so that the ranks of one round have about equal work.
    sharded.sort(key=lambda i: (_ranks(matrices[i]), -matrices[i].numel(), i))
    for ranks, members in groupby(sharded, key=lambda i: _ranks(matrices[i])):
        own_index = ranks.index(dist.get_rank())
        positions = list(members)
        while positions:
            this_round = positions[: len(ranks)]
            yield from _one_matrix_per_rank(matrices, this_round, own_index)
            del positions[: len(ranks)]


def _has_whole_matrices(matrix: Tensor) -> bool:
    """Whether this rank holds whole matrices: an unsharded one, or some of a stack."""
    if not isinstance(matrix, DTensor):
        return True
    sharded_dims = [getattr(placement, "dim", -1) for placement in matrix.placements]
    return matrix.ndim > 2 and max(sharded_dims) < matrix.ndim - 2


def _ranks(matrix: Tensor) -> list[int]:
    """The ranks that shard or replicate a matrix."""
    assert isinstance(matrix, DTensor)
    return [int(rank) for rank in matrix.device_mesh.mesh.flatten()]


def _one_matrix_per_rank(
    matrices: list[Tensor], positions: list[int], own_index: int
) -> Iterator[tuple[int, Tensor]]:
    """The matrices of one round: the rank with index n of their mesh orthogonalises the n-th of them."""
    results: dict[int, Tensor] = {}  # of this rank: one, or none in the last round
    for owner, i in enumerate(positions):
        # Gathered in the dtype of the work: half of the traffic on a GPU.
        matrix = matrices[i].to(_work_dtype(matrices[i]))
        full = full_tensor(matrix)
        if owner == own_index:
            results[i] = orthogonalize(full).contiguous()
    for owner, i in enumerate(positions):
        matrix = matrices[i]
        assert isinstance(matrix, DTensor)
        dtype = _work_dtype(matrix)
        local = torch.empty_like(local_tensor(matrix), dtype=dtype)
        full = results[i] if i in results else local.new_empty(matrix.shape)
        _broadcast(full, owner, matrix.device_mesh)
        for offset, index in shard_offsets(matrix):
            shard = local[index]
            shard.copy_(full[shard_slices(offset, shard)])
        yield i, local


def _broadcast(tensor: Tensor, owner: int, mesh: DeviceMesh) -> None:
    """Broadcast from the rank with this index to all of a mesh: along its first dimension, then along the next."""
    coordinate = torch.unravel_index(torch.tensor(owner), mesh.shape)
    source = [int(index) for index in coordinate]
    own = list(mesh.get_coordinate() or ())
    for axis in range(mesh.ndim):
        # The ranks that differ from the source only along this axis and those before it.
        if own[axis + 1 :] == source[axis + 1 :]:
            group = mesh.get_group(axis)
            dist.broadcast(tensor, group=group, group_src=source[axis])
