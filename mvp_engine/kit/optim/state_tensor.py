"""StateTensor: one optimizer state of one parameter, stored as float32, bfloat16, or 8-bit codes with block scales.

All stored tensors are sharded like the parameter, so a checkpoint saves and reshards them like any other state. 8-bit
states have keys of their own (`exp_avg_codes`, `exp_avg_scales`): an optimizer that does not know them finds no state,
instead of wrong values.

Stochastic rounding with random bits from a hash instead of a random generator.

A value is rounded up or down with probabilities that keep its expected value. Rounding to nearest would freeze a
second moment: in bfloat16, 0.999 * x is x again. The bits are a hash of seed, step, parameter and position in the full
parameter, so they are the same on every layout and after a resume, and no generator state has to be saved.

Block-wise quantisation to 8 bits: codes, and one float32 scale for each block of a row.

A value is scale * (code / max_code) ** 4. The fourth power puts codes close together near zero: neighbours are 3 % of
the block's maximum apart at its top, and less than 20 % of the value apart at a thousandth of the maximum.

Geometry of a parameter on this rank: chunks to work on, and what its layout allows.

Chunks bound the memory of an update in plain tensor operations, which makes float32 copies of the states.

What AdamW and Muon have in common when they update a parameter with plain tensor operations.

On a GPU the engine decides about a step by scalars on the device, so that the host need not wait for them: gradients
are divided by `grad_scale`, and a step with `found_inf` leaves weights, states and step counts as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from mvp_engine.distributed.dtensor import (
    Index,
    Offset,
    empty_sharded_like,
    local_tensor,
    shard_offsets,
    shard_slices,
)
from mvp_engine.errors import UserError
from mvp_engine.kit.optim.state_stream import host_copy, host_zeros_like

# (shift, factor) of each round of the hash; the factors are 0x7FEB352D and 0x846CA68B as int32.
HASH_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))


def hash_int32_(x: Tensor) -> Tensor:
    """Hash int32 numbers in place: every bit of the input changes about half of the output bits."""
    for shift, factor in HASH_ROUNDS:
        x.bitwise_xor_(_logical_shift_right(x, shift))
        x.mul_(factor)
    return x.bitwise_xor_(_logical_shift_right(x, 16))


def _logical_shift_right(x: Tensor, shift: int) -> Tensor:
    """Shift zeros in from the left; torch's own shift of int32 repeats the sign bit."""
    mask = (1 << (32 - shift)) - 1
    return (x >> shift).bitwise_and_(mask)


def rounding_salt(seed: int, name: str, state_key: str) -> int:
    """An int32 that differs between seeds, parameters and their states."""
    return crc32(f"{seed}/{name}/{state_key}".encode()) - 2**31


def rounding_key(salt: int, step: Tensor) -> Tensor:
    """The key of the random bits of one step: an int32 scalar on the device of `step`, without a host sync."""
    count = step.to(torch.int32).reshape(())
    key = count.clone()
    hash_int32_(key.add_(salt))
    return hash_int32_(key.add_(salt))


def random_bits(
    key: Tensor, shape: Sequence[int], offset: Sequence[int], full_shape: Sequence[int]
) -> Tensor:
    """32 random bits for each element of a slice of that shape, which starts at `offset` of the full tensor."""
    position = key.expand(tuple(shape)).clone()
    for dim, size in enumerate(shape):
        stride = math.prod(full_shape[dim + 1 :])
        index = torch.arange(size, device=key.device)
        index = (index + offset[dim]) * stride
        # Positions beyond 2**31 wrap around, as int32 does.
        index = (index + 2**31) % 2**32 - 2**31
        trailing_dims = [1] * (len(shape) - dim - 1)
        position += index.to(torch.int32).view(-1, *trailing_dims)
    return hash_int32_(position)


def round_to_bfloat16(value: Tensor, bits: Tensor) -> Tensor:
    """Stochastic rounding of float32: random low mantissa bits carry into the high half, which is kept."""
    low_bits = bits & 0xFFFF
    carried = value.view(torch.int32) + low_bits
    high_half = carried & -0x10000
    return high_half.view(torch.float32).bfloat16()


BLOCK = 128  # elements of a row that share a scale
MAX_CODE = {torch.int8: 127, torch.uint8: 255}


def blocks_of(elements: int) -> int:
    """The number of blocks in a row of this length; the last one may be short."""
    return -(-elements // BLOCK)


def scales_shape(shape: torch.Size) -> tuple[int, ...]:
    """The shape of the scales of a tensor with this shape."""
    *rows, columns = shape
    return (*rows, blocks_of(columns))


def quantize(value: Tensor, dtype: torch.dtype, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of `value` by stochastic rounding, and the scales of its blocks; uint8 is for values >= 0."""
    max_code = MAX_CODE[dtype]
    row_length = value.shape[-1]
    size = value.abs()
    scales = _block_maximum(size)
    divisors = torch.where(scales > 0, scales, 1.0)
    size = size / _repeat_for_elements(divisors, row_length)

    fourth_root = size.sqrt().sqrt_()
    lower_code = fourth_root.mul_(max_code).floor_()
    lower_code.clamp_(max=max_code - 1)
    lower = _dequantized(lower_code, max_code)
    upper = _dequantized(lower_code + 1, max_code)

    up_probability = (size - lower) / (upper - lower)
    uniform = (bits >> 8).bitwise_and_(0xFFFFFF)
    uniform = uniform * 2.0**-24
    code = lower_code + (uniform < up_probability)

    if dtype is torch.int8:
        return torch.copysign(code, value).to(dtype), scales
    # Code 0 is for exact zeros only. A second moment that rounds to 0 while the first one does not leaves eps as the
    # divisor of the next step: a weight jumped by 7,000 learning rates.
    code = torch.where(size > 0, code.clamp_(min=1), 0.0)
    return code.to(dtype), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of codes and the scales of their blocks."""
    row_length = codes.shape[-1]
    as_float = codes.float()
    value = _dequantized(as_float, MAX_CODE[codes.dtype])
    value.mul_(_repeat_for_elements(scales, row_length))
    if codes.dtype is torch.int8:
        return torch.copysign(value, as_float)
    return value


def _block_maximum(size: Tensor) -> Tensor:
    missing = -size.shape[-1] % BLOCK
    if missing:
        size = torch.nn.functional.pad(size, (0, missing))
    blocks = size.unflatten(-1, (-1, BLOCK))
    return blocks.amax(-1)


def _dequantized(code: Tensor, max_code: int) -> Tensor:
    """The value of codes without scale and sign."""
    share = code / max_code
    return share.square_().square_()


def _repeat_for_elements(scales: Tensor, row_length: int) -> Tensor:
    """The scale of each element of a row; the last block of a row may be short."""
    repeated = scales.repeat_interleave(BLOCK, -1)
    return repeated[..., :row_length]


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


CODES = "_codes"
SCALES = "_scales"
QUANTIZED = (torch.int8, torch.uint8)


def storage_dtype(param: Tensor, name: str, state_dtype: str, signed: bool) -> torch.dtype:
    """The dtype that `optim.state_dtype` gives to a state of this parameter; vectors are never quantised."""
    if state_dtype == "float32" or (state_dtype == "int8" and param.ndim < 2):
        return torch.float32
    if state_dtype == "bfloat16":
        return torch.bfloat16
    if not has_whole_blocks(param):
        assert isinstance(param, DTensor)
        raise UserError(
            f"optim.state_dtype=int8: {name} is sharded inside of rows ({param.placements}), at other places than "
            f"between blocks of {BLOCK}. Set optim.state_dtype=bfloat16, or parallel.tensor=1"
        )
    return torch.int8 if signed else torch.uint8


@dataclass(frozen=True)
class StateSpec:
    """How a state is stored: its key, its dtype, and the salt of the random bits that round it."""

    key: str
    dtype: torch.dtype
    salt: int

    @cached_property
    def is_quantized(self) -> bool:
        return self.dtype in QUANTIZED

    @cached_property
    def stored_keys(self) -> list[str]:
        """The keys of what is stored in the state dict of a parameter."""
        if self.is_quantized:
            return [self.key + CODES, self.key + SCALES]
        return [self.key]


class StateTensor:
    """One state of one parameter in the parameter's state dict, read and written as float32."""

    def __init__(self, param: Tensor, state: dict[str, Any], spec: StateSpec) -> None:
        self.param = param
        self.state = state
        self.key = spec.key
        self.dtype = spec.dtype
        self.salt = spec.salt
        self.is_quantized = spec.is_quantized
        self.stored_keys = spec.stored_keys

    @property
    def stored(self) -> Tensor:
        """This rank's part of what is stored: values, or codes."""
        return local_tensor(self.state[self.stored_keys[0]])

    @property
    def scales(self) -> Tensor:
        """This rank's part of the scales of a quantised state."""
        return local_tensor(self.state[self.key + SCALES])

    def create(self, *, on_host: bool = False) -> None:
        """Store zeros, on the device of the parameter or on the host."""
        zeros_like = host_zeros_like if on_host else torch.zeros_like
        self.state[self.stored_keys[0]] = zeros_like(self.param, dtype=self.dtype)
        if self.is_quantized:
            shape = scales_shape(self.param.shape)
            scales = empty_sharded_like(self.param, shape, torch.float32)
            self.state[self.key + SCALES] = zeros_like(scales, dtype=torch.float32)

    def rounding_key(self, step: Tensor) -> Tensor:
        return rounding_key(self.salt, step)

    def read(self, chunk: Chunk) -> Tensor:
        """A float32 copy of a chunk."""
        stored = self.stored[chunk.index]
        if self.is_quantized:
            return dequantize(stored, self.scales[chunk.scales_index])
        return stored.to(torch.float32, copy=True)

    def write(self, chunk: Chunk, value: Tensor, rounding_key: Tensor, skip: Tensor | None) -> None:
        """Round a chunk and store it; where `skip` is set on the device, keep what is stored."""
        stored = self.stored[chunk.index]
        if self.dtype is torch.float32:
            _store(stored, value, skip)
            return
        bits = random_bits(rounding_key, value.shape, chunk.offset, self.param.shape)
        if self.dtype is torch.bfloat16:
            _store(stored, round_to_bfloat16(value, bits), skip)
            return
        codes, scales = quantize(value, self.dtype, bits)
        _store(stored, codes, skip)
        _store(self.scales[chunk.scales_index], scales, skip)

    def load(
        self, saved: Mapping[str, Any], rounding_key: Tensor, *, on_host: bool = False
    ) -> bool:
        """Take over a saved state, converted if it has another dtype; False if none was saved under this key."""
        if self._fits(saved):
            for key in self.stored_keys:
                value = saved[key]
                self.state[key] = host_copy(value) if on_host else value.to(self.param.device)
            return True
        has_values = self.key in saved
        has_codes = self.key + CODES in saved
        if not has_values and not has_codes:
            return False
        self.create(on_host=on_host)
        for chunk in chunks(self.param):
            value = _saved_values(saved, self.key, chunk).to(rounding_key.device)
            self.write(chunk, value, rounding_key, skip=None)
        return True

    def _fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether a saved state has the keys and dtypes of this one."""
        values, *scales = self.stored_keys
        if values not in saved or saved[values].dtype != self.dtype:
            return False
        return all(key in saved and saved[key].dtype == torch.float32 for key in scales)


def _store(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    target.copy_(value if skip is None else torch.where(skip, target, value))


def _saved_values(saved: Mapping[str, Any], key: str, chunk: Chunk) -> Tensor:
    """A chunk of a saved state of any dtype, as float32."""
    if key in saved:
        return local_tensor(saved[key])[chunk.index].float()
    codes = local_tensor(saved[key + CODES])[chunk.index]
    scales = saved[key + SCALES]
    if isinstance(scales, DTensor):
        return dequantize(codes, local_tensor(scales)[chunk.scales_index])
    return _dequantize_part_of_rows(codes, scales.to(codes.device), chunk)


def _dequantize_part_of_rows(codes: Tensor, full_scales: Tensor, chunk: Chunk) -> Tensor:
    """The values of codes that may start and end inside of blocks, with the scales of the full parameter.

    A layout that shards inside of rows cannot shard the scales alike, so each rank has all of them.
    """
    *rows, columns = shard_slices(chunk.offset, codes)
    first_block, codes_before = divmod(columns.start, BLOCK)
    blocks = slice(first_block, blocks_of(columns.stop))
    scales = full_scales[(*rows, blocks)]
    # Zeros in front, so that the codes start with a whole block.
    padded = torch.nn.functional.pad(codes, (codes_before, 0))
    return dequantize(padded, scales)[..., codes_before:]


@dataclass(frozen=True)
class DeviceFlags:
    """The engine's decision about one step."""

    grad_scale: Tensor | None
    found_inf: Tensor | None

    @property
    def skip(self) -> Tensor | None:
        """Whether to skip the step, as a bool on the device; None if that cannot happen."""
        if self.found_inf is None:
            return None
        return self.found_inf > 0


def advance_step_(step: Tensor, skip: Tensor | None) -> None:
    """Count a step unless it is skipped."""
    step.add_(1 if skip is None else (~skip).float())


def advance_steps_(steps: list[Tensor], found_inf: Tensor) -> None:
    """Count a step of all parameters unless it is skipped, without a host sync."""
    # Without `alpha` torch takes the tensor for a number, which it reads from the device.
    torch._foreach_add_(steps, (found_inf <= 0).float(), alpha=1.0)


def gradient_chunk(param: Tensor, chunk: Chunk, grad_scale: Tensor | None) -> Tensor:
    """A chunk of a parameter's gradient in float32, unscaled."""
    assert param.grad is not None
    grad = local_tensor(param.grad)[chunk.index].float()
    return grad if grad_scale is None else grad / grad_scale


def apply_update_(weight: Tensor, update: Tensor, decay: float, skip: Tensor | None) -> None:
    """weight * (1 - decay) - update, in place."""
    if skip is None:
        weight.mul_(1 - decay).sub_(update)
        return
    updated = weight * (1 - decay) - update
    weight.copy_(torch.where(skip, weight, updated))
