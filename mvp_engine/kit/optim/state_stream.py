"""StateStream: optimizer states that live on the host, and are on the device for the time of their update.

A step goes over buckets of states. While the states of one bucket are updated, those of the next one are copied to the
device and those of the one before it back to the host, each on a stream of its own: at most `SLOTS` buckets are on the
device. Large parameters are divided into slices of rows. The arithmetic is that of an update without buckets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.errors import UserError
from mvp_engine.ops import side_stream
from mvp_engine.ops.host_memory import GIB, available_host_memory, pinned_zeros

KEY = "optim.offload"
FIX = "Free host memory, set optim.state_dtype=bfloat16 or int8, or leave optim.offload out"


def host_zeros_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros on the host with the shape and the placements of a tensor."""
    shape = local_tensor(tensor.detach()).shape
    is_pinned = torch.cuda.is_available()
    host = pinned_zeros(shape, dtype, KEY, FIX) if is_pinned else torch.zeros(shape, dtype=dtype)
    if not isinstance(tensor, DTensor):
        return host
    # Of a mesh of GPUs, with a local tensor on the host: `DTensor.from_local` would move it to the GPU.
    sharded = torch.empty_like(tensor.detach(), dtype=dtype, device="cpu")
    assert isinstance(sharded, DTensor)
    sharded._local_tensor = host
    return sharded


def host_copy(value: Tensor) -> Tensor:
    """A state on the host: itself if it is there already, in memory that `host_zeros_like` has allocated."""
    local = local_tensor(value)
    is_pinned = local.is_pinned() or not torch.cuda.is_available()
    if local.device.type == "cpu" and is_pinned:
        return value
    copy = host_zeros_like(value, value.dtype)
    local_tensor(copy).copy_(local)
    return copy


def check_host_memory(size: int) -> None:
    """Raise for states of this rank that do not fit into the memory of this machine, before its first step.

    The other ranks of the machine need about as much.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = ranks * size
    available = available_host_memory()
    if available is not None and needed > available:
        raise UserError(
            f"optim.offload keeps {needed / GIB:.1f} GiB of optimizer states in the memory of this machine, for "
            f"{ranks} of its ranks, and {available / GIB:.1f} GiB are available. Set optim.state_dtype=bfloat16 or "
            "int8, shard the model (parallel.shard), or leave optim.offload out"
        )


SLOTS = 3  # buckets on the device: one is loaded, one is updated, one is stored
BUCKET_BYTES = 2**28  # of states; 5 ms over PCIe 5
SMALL = 2**16  # elements; states of smaller parameters stay on the device, where they need little
# Slices start at multiples of so many elements. torch's fused AdamW on a CPU rounds elements at the end of a tensor,
# behind the last full vector, in another way: so these stay at the end of the last slice.
ALIGNED_ELEMENTS = 64
ALIGNED_BYTES = 512

Group = dict[str, Any]


def is_host(device: torch.device) -> bool:
    """Whether states on this device are on the host already."""
    return device.type == "cpu"


@dataclass(frozen=True, eq=False)
class StateSlice:
    """Some rows of what this rank holds of a parameter, with its states on the host, which are tensors of all rows."""

    param: Tensor
    rows: slice
    is_last: bool  # of the parameter
    states: Mapping[str, Tensor]

    def host(self) -> Iterator[tuple[str, Tensor]]:
        for key, state in self.states.items():
            yield key, local_tensor(state)[self.rows]

    @property
    def num_bytes(self) -> int:
        """Bytes in a buffer of the device."""
        return sum(_aligned(state.nbytes) for _, state in self.host())


@dataclass(frozen=True, eq=False)
class Bucket:
    """Slices of one parameter group that are on the device at the same time."""

    group: Group
    slices: list[StateSlice]

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self.slices)


@dataclass(frozen=True, eq=False)
class StagedSlice:
    """A slice whose states are on the device."""

    origin: StateSlice
    states: dict[str, Tensor]


Update = Callable[[Group, list[StagedSlice]], None]


def make_buckets(
    group: Group,
    params: Iterable[tuple[Tensor, Mapping[str, Tensor]]],
    *,
    can_slice: Callable[[Tensor], bool],
) -> Iterator[Bucket]:
    """Buckets of about `BUCKET_BYTES` of the states of these parameters, in their order.

    A parameter that `can_slice` denies is in one bucket, which may then be larger. Such buckets end at the same
    parameters on all ranks, since their updates may be collectives: by the share of a rank, not by its own rows.
    """
    slices: list[StateSlice] = []
    size = 0.0
    for param, states in params:
        if can_slice(param):
            parts = _row_slices(param, states)
        else:
            rows = slice(0, len(_with_rows(param)))
            parts = iter([StateSlice(param, rows, True, states)])
        for part in parts:
            part_size = part.num_bytes if can_slice(param) else _share_of_rank(param, states)
            if slices and size + part_size > BUCKET_BYTES:
                yield Bucket(group, slices)
                slices = []
                size = 0.0
            slices.append(part)
            size += part_size
    if slices:
        yield Bucket(group, slices)


def _row_slices(param: Tensor, states: Mapping[str, Tensor]) -> Iterator[StateSlice]:
    """Slices of at most `BUCKET_BYTES`, or of as few rows as can be aligned."""
    local = _with_rows(param)
    rows = len(local)
    row_elements = prod(local.shape[1:])
    row_bytes = sum(local_tensor(state).nbytes for state in states.values()) / max(1, rows)
    step = ALIGNED_ELEMENTS // gcd(ALIGNED_ELEMENTS, max(1, row_elements))
    step *= max(1, int(BUCKET_BYTES / max(1.0, row_bytes)) // step)
    for start in range(0, max(1, rows), step):
        stop = min(start + step, rows)
        yield StateSlice(param, slice(start, stop), stop == rows, states)


def _with_rows(param: Tensor) -> Tensor:
    local = local_tensor(param.detach())
    assert local.ndim, "scalars are small, and stay on the device"
    return local


def _share_of_rank(param: Tensor, states: Mapping[str, Tensor]) -> float:
    """Bytes of a parameter's states on a rank that shards it with others equally."""
    size = sum(float(state.numel() * state.element_size()) for state in states.values())
    mesh = getattr(param, "device_mesh", None)
    return size / (1 if mesh is None else mesh.size())


def _aligned(size: int) -> int:
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


class _Slot:
    """A buffer on the device for the states of one bucket, and when it is free again."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.is_free = side_stream.event(device)


@dataclass(frozen=True, eq=False)
class _Staged:
    slot: _Slot
    slices: list[StagedSlice]
    is_loaded: torch.cuda.Event | None


class StateStream:
    """Copies the states of buckets to a device and back, next to their updates on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._to_device = side_stream.new_stream(device)
        self._to_host = side_stream.new_stream(device)

    def run(self, buckets: list[Bucket], update: Update) -> None:
        """Call `update` for each bucket with its states on the device.

        The current stream waits for the last copy to the host, so what waits for it can read the states there.
        """
        if not buckets:
            return
        compute = side_stream.current_stream(self.device)
        # Allocated by the current stream for the time of the step: activations are freed by now.
        size = max(bucket.num_bytes for bucket in buckets)
        slots = [_Slot(size, self.device) for _ in buckets[:SLOTS]]
        staged = [self._load(buckets[0], slots[0])]
        for i, bucket in enumerate(buckets):
            if i + 1 < len(buckets):
                staged.append(self._load(buckets[i + 1], slots[(i + 1) % SLOTS]))
            current = staged.pop(0)
            side_stream.wait(current.is_loaded, compute)
            update(bucket.group, current.slices)
            self._store(current)
        for slot in slots:
            side_stream.wait(slot.is_free, compute)

    def _load(self, bucket: Bucket, slot: _Slot) -> _Staged:
        slices: list[StagedSlice] = []
        offset = 0
        with side_stream.on(self._to_device, slot.is_free):
            for part in bucket.slices:
                states: dict[str, Tensor] = {}
                for key, host in part.host():
                    place = slot.buffer[offset : offset + host.nbytes]
                    states[key] = place.view(host.dtype).view(host.shape)
                    states[key].copy_(host, non_blocking=True)
                    offset += _aligned(host.nbytes)
                slices.append(StagedSlice(part, states))
            return _Staged(slot, slices, side_stream.event(self.device))

    def _store(self, staged: _Staged) -> None:
        with side_stream.on(self._to_host, side_stream.event(self.device)):
            for part in staged.slices:
                for key, host in part.origin.host():
                    host.copy_(part.states[key], non_blocking=True)
            staged.slot.is_free = side_stream.event(self.device)
