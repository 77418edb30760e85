"""Which boxes of a tensor a rank holds, and which of the ranks that hold the same box writes it.

Worked out from the placements, without asking anybody. torch's own helpers give one box a rank, but a rank can hold
several: of a fused weight, whose parts are shared out each by itself, it has some of every part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


def local_shards(tensor: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """The boxes of a tensor that this rank holds: where in the whole each begins, and a view of its data."""
    data = local_tensor(tensor.detach())
    return [(offset, data[index]) for offset, index in shard_offsets(tensor)]


def shard_offsets(tensor: Tensor) -> list[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """The same without the data: where in the whole each box begins, and where in what this rank holds it lies."""
    everything = ((0,) * tensor.ndim, tuple(slice(0, size) for size in local_tensor(tensor).shape))
    if not isinstance(tensor, DTensor):
        return [everything]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    if tensor.numel() == 0:
        return [everything]  # nothing to share out, but there
    layout = (tensor.placements, tensor.device_mesh.shape, coordinate)
    sides = [dim_slices(size, dim, *layout) for dim, size in enumerate(tensor.shape)]
    here = tuple(tensor.to_local().shape)
    if here != tuple(sum(length for _, _, length in side) for side in sides):
        raise ValueError(f"{tuple(tensor.shape)} as {layout} should be {sides} here, but is {here}")
    return [
        (
            tuple(begin for begin, _, _ in side),
            tuple(slice(start, start + length) for _, start, length in side),
        )
        for side in product(*sides)
    ]


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def empty_sharded_like(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor of another size that the ranks share as they share `tensor`."""
    if not isinstance(tensor, DTensor):
        return torch.empty(*shape, dtype=dtype, device=tensor.device)
    mesh, size = tensor.device_mesh, torch.Size(shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "only ranks of its mesh hold a tensor"
    sides = [
        dim_slices(n, dim, tensor.placements, mesh.shape, coordinate) for dim, n in enumerate(size)
    ]
    here = torch.empty(
        [sum(length for _, _, length in side) for side in sides], dtype=dtype, device=tensor.device
    )
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        here, mesh, tensor.placements, run_check=False, shape=size, stride=stride
    )


def shard_slices(offset: Sequence[int], part: Tensor) -> tuple[slice, ...]:
    """Where a piece lies in the whole."""
    return tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))


def dim_slices(
    size: int,
    dim: int,
    placements: Sequence[Placement],
    mesh: Sequence[int],
    coordinate: Sequence[int],
) -> list[tuple[int, int, int]]:
    """What the rank at `coordinate` of a mesh holds of dimension `dim`: (begin in the whole, begin here, length).

    DTensor cuts by the placements from left to right. FSDP2, which is applied last but named first, instead cuts what
    the placements right of its own have left, and says so with a `_StridedShard` of as many splits as they make
    shards. Only while sizes divide is that the same. A `_StridedShard` of any other number is a fused weight; what
    stands left of one is FSDP2 too (torch 2.11 does not mark it).
    """
    cuts: list[tuple[int, int]] = []  # (mesh dimension, splits), in the order of cutting
    for axis, placement in reversed(list(enumerate(placements))):
        if placement.is_partial():
            raise ValueError("a tensor with sums still pending has no value to save or to fill")
        if getattr(placement, "dim", None) == dim:
            splits = getattr(placement, "split_factor", 1)
            shards = prod(mesh[axis] for axis, _ in cuts)
            if cuts and (cuts[0][1] > 1 or 1 < splits == shards):
                cuts.append((axis, 1))
            else:
                cuts.insert(0, (axis, splits))
    held = torch.arange(size if cuts else 0)
    for axis, splits in cuts:
        parts = [_share(held, splits, part) for part in range(splits)]
        held = torch.cat([_share(part, mesh[axis], coordinate[axis]) for part in parts])
    starts = [0, *(1 + (held.diff() != 1).nonzero().flatten()).tolist()]
    found = [
        (int(held[a]), a, b - a)
        for a, b in zip(starts, [*starts[1:], len(held)], strict=True)
        if a < b
    ]
    return found if cuts else [(0, 0, size)]


def _share(held: Tensor, shares: int, index: int) -> Tensor:
    step = -(-len(held) // shares)  # as torch.chunk rounds: the last shares may be short or empty
    return held[index * step : (index + 1) * step]


def is_writer(name: str, tensor: Tensor) -> bool:
    """Is this rank the one that writes its part of a tensor, among those that have the same?

    The name chooses a rank, so that the work is spread and nobody has to ask. Of a DTensor those write whose copy is
    the chosen rank's: on the same mesh, at the same place along the dimensions that hold copies.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    chosen = crc32(name.encode()) % ranks
    if not isinstance(tensor, DTensor):
        return rank == chosen
    here, there = (
        (tensor.device_mesh.mesh == r).nonzero().flatten().tolist() for r in (rank, chosen)
    )
    copies = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return bool(here and there) and all(here[axis] == there[axis] for axis in copies)


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank that holds a part of it; they call it together."""
    if not isinstance(tensor, DTensor):
        return tensor
    if all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        return tensor.full_tensor()
    # torch puts a fused weight that FSDP2 has cut once more together in the wrong order. Here each rank puts its boxes
    # where they belong; they are added up as bytes, since -0.0 + 0.0 is another number.
    out = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    for offset, part in local_shards(tensor):
        out[shard_slices(offset, part)] = part
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(out.view(torch.uint8), group=tensor.device_mesh.get_group(axis))
    return out
