"""DTensor geometry: which slices of a tensor a rank holds, and which of several ranks with the same slice writes it.

Everything follows from mesh and placements, without a collective. torch's own helpers assume one contiguous shard per
rank, but a rank can hold several: of a fused weight, such as `gate_up_proj`, it holds a slice of each fused part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

Offset = tuple[int, ...]
Index = tuple[slice, ...]


class DimSlice(NamedTuple):
    """A contiguous range of one tensor dimension that a rank holds."""

    global_start: int  # in the full tensor
    local_start: int  # in the local tensor
    length: int

    @property
    def local_index(self) -> slice:
        return slice(self.local_start, self.local_start + self.length)


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns the local part of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shards(tensor: Tensor) -> list[tuple[Offset, Tensor]]:
    """Returns this rank's contiguous shards: the offset of each in the full tensor, and a view of its data."""
    data = local_tensor(tensor.detach())
    return [(offset, data[index]) for offset, index in shard_offsets(tensor)]


def shard_offsets(tensor: Tensor) -> list[tuple[Offset, Index]]:
    """Returns the shards of `local_shards` without data: offset in the full tensor, and index into the local one."""
    local_shape = tuple(local_tensor(tensor).shape)
    whole_local_tensor = ((0,) * tensor.ndim, tuple(slice(0, size) for size in local_shape))
    if not isinstance(tensor, DTensor):
        return [whole_local_tensor]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    if tensor.numel() == 0:
        # One shard without elements, so that a checkpoint has an entry for the tensor.
        return [whole_local_tensor]
    layout = (tensor.placements, tensor.device_mesh.shape, coordinate)
    by_dim = [dim_slices(size, dim, *layout) for dim, size in enumerate(tensor.shape)]
    expected_shape = _shape_of(by_dim)
    if local_shape != expected_shape:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} with layout {layout} should have the local shape "
            f"{expected_shape}, but has {local_shape}"
        )
    shards: list[tuple[Offset, Index]] = []
    for slices in product(*by_dim):
        offset = tuple(part.global_start for part in slices)
        index = tuple(part.local_index for part in slices)
        shards.append((offset, index))
    return shards


def shard_slices(offset: Sequence[int], shard: Tensor) -> Index:
    """Returns the index of a shard in the full tensor."""
    return tuple(
        slice(start, start + size) for start, size in zip(offset, shard.shape, strict=True)
    )


def empty_sharded_like(
    tensor: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    placements: Sequence[Placement] | None = None,
) -> Tensor:
    """Returns an uninitialized tensor of this shape on the mesh of `tensor`. `placements`: None: those of `tensor`."""
    if not isinstance(tensor, DTensor):
        return torch.empty(*shape, dtype=dtype, device=tensor.device)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "only ranks of its mesh hold a tensor"
    placements = placements or tensor.placements
    layout = (placements, mesh.shape, coordinate)
    by_dim = [dim_slices(size, dim, *layout) for dim, size in enumerate(shape)]
    return DTensor.from_local(
        torch.empty(_shape_of(by_dim), dtype=dtype, device=tensor.device),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(torch.Size(shape), device="meta").stride(),
    )


def dim_slices(
    size: int,
    dim: int,
    placements: Sequence[Placement],
    mesh: Sequence[int],
    coordinate: Sequence[int],
) -> list[DimSlice]:
    """Returns the ranges of dimension `dim` that the rank at `coordinate` holds. `mesh` is the shape of the mesh.

    It splits the indices of the dimension as DTensor splits the tensor, then groups what is left into ranges.
    """
    splits = _splits_in_order(dim, placements, mesh)
    if not splits:
        return [DimSlice(0, 0, size)]
    indices = torch.arange(size)
    for axis, split_factor in splits:
        parts = [_chunk(indices, split_factor, i) for i in range(split_factor)]
        indices = torch.cat([_chunk(part, mesh[axis], coordinate[axis]) for part in parts])
    if len(indices) == 0:
        return []
    jumps = (indices.diff() != 1).nonzero().flatten() + 1
    ends = pairwise([0, *jumps.tolist(), len(indices)])
    return [DimSlice(int(indices[start]), start, end - start) for start, end in ends]


def _splits_in_order(
    dim: int, placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> list[tuple[int, int]]:
    """Returns the mesh axes that split dimension `dim`, each with its split factor, in the order of splitting.

    DTensor splits by the placements from left to right. FSDP2 is the exception: its placement is the leftmost, but it
    splits last, after those to its right. It marks this by a `_StridedShard` whose split factor is the number of shards
    to its right; such an axis comes last here, with the split factor 1. The order matters only where a size is not
    divisible by the number of shards. A `_StridedShard` with any other split factor is a fused weight, and the factor
    is the number of its parts. An axis to the left of a fused weight is FSDP2 too, though torch 2.11 does not mark it.
    """
    splits: list[tuple[int, int]] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if placement.is_partial():
            raise ValueError("a Partial DTensor has no value to save or to load")
        if getattr(placement, "dim", None) != dim:  # Replicate has none
            continue
        split_factor = getattr(placement, "split_factor", 1)
        shards_to_the_right = prod(mesh_shape[other] for other, _ in splits)
        is_left_of_fused = bool(splits) and splits[0][1] > 1
        if is_left_of_fused or (splits and 1 < split_factor == shards_to_the_right):
            splits.append((axis, 1))
        else:
            splits.insert(0, (axis, split_factor))
    return splits


def _chunk(indices: Tensor, chunks: int, index: int) -> Tensor:
    """Returns one of `chunks` chunks. Sizes are rounded up as in `torch.chunk`: the last ones may be short or empty."""
    size = -(-len(indices) // chunks)
    return indices[index * size : (index + 1) * size]


def _shape_of(by_dim: list[list[DimSlice]]) -> tuple[int, ...]:
    return tuple(sum(part.length for part in slices) for slices in by_dim)


def is_writer(name: str, tensor: Tensor, holders: range | None = None) -> bool:
    """Whether this rank, and not another with the same shards of a tensor, writes them to a checkpoint.

    `holders`: the ranks that hold the tensor; None: all. A hash of the name chooses one of them, which spreads the
    tensors over ranks without a collective. Scalars, such as the step counts of an optimizer, are all written by the
    first holder, so that a resume opens one file for them. A DTensor is written by the ranks that together hold the
    chosen rank's replica: those with the same coordinate along the replicated dimensions of the mesh.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    holders = holders or range(world_size)
    chosen = holders[crc32(name.encode()) % len(holders) if tensor.ndim else 0]
    if not isinstance(tensor, DTensor):
        return rank == chosen
    mesh = tensor.device_mesh.mesh
    own_coordinate = _coordinate_of(rank, mesh)
    chosen_coordinate = _coordinate_of(chosen, mesh)
    if not own_coordinate or not chosen_coordinate:
        return False
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate() and own_coordinate[axis] != chosen_coordinate[axis]:
            return False
    return True


def _coordinate_of(rank: int, mesh: Tensor) -> list[int]:
    """Returns the coordinate of a global rank in a mesh; empty if the mesh does not contain it."""
    return (mesh == rank).nonzero().flatten().tolist()


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the full tensor. All ranks of its mesh must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    if all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        return tensor.full_tensor()
    # Where FSDP2 has split a fused weight again, torch assembles it in the wrong order. Here each rank writes its
    # shards into zeros, and an all-reduce sums them as bytes: as floats, -0.0 + 0.0 would lose the sign.
    out = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    for offset, shard in local_shards(tensor):
        out[shard_slices(offset, shard)] = shard
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(out.view(torch.uint8), group=tensor.device_mesh.get_group(axis))
    return out
