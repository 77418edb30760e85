"""Weights in buckets: streams of (name, tensor) as lists of limited size, between the ranks of a group, and hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from mvp_engine.distributed import World

Bucket = list[tuple[str, Tensor]]


def in_buckets(
    weights: Iterable[tuple[str, Tensor]], limit: int, keep: Callable[[Tensor], Tensor] | None
) -> Iterator[Bucket]:
    """Lists with at most `limit` bytes, or with one larger tensor; `keep` makes the entry of a tensor.

    Without `keep` the lists are empty: every rank of a model runs the same collectives.
    """
    bucket: Bucket = []
    num_bytes = 0
    for name, value in weights:
        if num_bytes and num_bytes + value.nbytes > limit:
            yield bucket
            bucket = []
            num_bytes = 0
        if keep is not None:
            bucket.append((name, keep(value.detach())))
        num_bytes += value.nbytes
    if num_bytes:
        yield bucket


def host_copy(value: Tensor) -> Tensor:
    """A copy in host memory, which an update of the model does not change."""
    return value.to("cpu", copy=True)


def broadcast_bucket(bucket: Bucket | None, world: World) -> Bucket:
    """The bucket of rank 0 on all ranks, by one collective on the device."""
    if world.size == 1:
        assert bucket is not None
        return bucket
    described = [(name, value.dtype, value.shape) for name, value in bucket or []]
    described = world.broadcast(described)
    sizes = [dtype.itemsize * shape.numel() for _, dtype, shape in described]
    if bucket is None:
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=world.device)
    else:
        raw = [value.contiguous().reshape(-1).view(torch.uint8) for _, value in bucket]
        flat = torch.cat([one.to(world.device) for one in raw])
    dist.broadcast(flat, src=0)
    received: Bucket = []
    for (name, dtype, shape), part in zip(described, flat.split(sizes), strict=True):
        # A copy: a slice may not be aligned to the size of its elements.
        received.append((name, part.clone().view(dtype).reshape(shape)))
    return received


def checksum(value: Tensor) -> str:
    """A hash of a tensor's dtype, shape and bytes."""
    found = hashlib.blake2b(f"{value.dtype} {tuple(value.shape)}".encode(), digest_size=16)
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    found.update(raw.numpy().data)
    return found.hexdigest()
