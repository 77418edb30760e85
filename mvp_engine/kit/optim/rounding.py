"""Stochastic rounding with random bits from a hash instead of a random generator.

A value is rounded up or down with probabilities that keep its expected value. Rounding to nearest would freeze a
second moment: in bfloat16, 0.999 * x is x again. The bits are a hash of seed, step, parameter and position in the full
parameter, so they are the same on every layout and after a resume, and no generator state has to be saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

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
