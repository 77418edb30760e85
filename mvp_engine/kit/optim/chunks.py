"""Geometry of a parameter on this rank: chunks to work on, and what its layout allows.

Chunks bound the memory of an update in plain tensor operations, which makes float32 copies of the states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from mvp_engine.distributed.dtensor import Index, Offset, local_tensor, shard_offsets
from mvp_engine.kit.optim.blockwise import BLOCK, blocks_of

CHUNK = 2**22  # elements of a chunk: 16 MiB per float32 copy


@dataclass(frozen=True)
class Chunk:
    """A slice of a parameter: its offset in the full tensor, and its index in the local tensor."""

    offset: Offset
    index: Index

    @property
    def scales_index(self) -> Index:
        """The index of the chunk's scales in the local tensor of scales."""
        *rows, columns = self.index
        blocks = slice(columns.start // BLOCK, blocks_of(columns.stop))
        return (*rows, blocks)


def chunks(param: Tensor) -> Iterator[Chunk]:
    """All that this rank holds of a parameter, some rows at a time."""
    for offset, index in shard_offsets(param):
        if not index:  # a scalar
            yield Chunk(offset, index)
            continue
        rows, *other_dims = index
        row_size = prod(_length(dim) for dim in other_dims)
        rows_at_once = max(1, CHUNK // max(1, row_size))
        for start in range(rows.start, rows.stop, rows_at_once):
            stop = min(start + rows_at_once, rows.stop)
            first_row = offset[0] + start - rows.start
            yield Chunk(
                offset=(first_row, *offset[1:]),
                index=(slice(start, stop), *other_dims),
            )


def _length(index: slice) -> int:
    return int(index.stop - index.start)


def rows_of(tensor: Tensor, rows: slice | None) -> Tensor:
    """Some rows of this rank's part of a tensor, or all of it."""
    local = local_tensor(tensor)
    return local if rows is None else local[rows]


def has_whole_blocks(param: Tensor) -> bool:
    """Whether every rank holds whole blocks of `BLOCK` elements: yes, unless rows are sharded at other places."""
    if not isinstance(param, DTensor):
        return True
    row_shards: list[int] = []
    for placement, ranks in zip(param.placements, param.device_mesh.shape, strict=True):
        if getattr(placement, "dim", None) == param.ndim - 1:
            if type(placement) is not Shard:
                return False
            row_shards.append(ranks)
    return not row_shards or param.shape[-1] % (BLOCK * prod(row_shards)) == 0


def flat_offset(param: Tensor) -> int | None:
    """The position of this rank's first element in the full parameter, if it holds one contiguous range of it."""
    shards = shard_offsets(param)
    if len(shards) != 1 or param.ndim == 0:
        return None
    if not local_tensor(param).is_contiguous():
        return None
    offset, index = shards[0]
    row_shape = list(param.shape[1:])
    local_row_shape = [_length(dim) for dim in index[1:]]
    if any(offset[1:]) or local_row_shape != row_shape:
        return None
    return offset[0] * prod(row_shape)
