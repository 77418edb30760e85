"""Numbers in few bits that keep their mean: rounded up or down by chance, so that small changes are not lost.

The chance is a hash of (seed, step, parameter, place in the whole parameter). It is the same on every layout and after
a resume, and there is no generator whose state would have to be saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 128  # elements of a row that share a scale
# How many codes lie above zero. A value is the fourth power of its code's share of them, times the scale: steps are 3 %
# of the largest value of a block, and still less than 20 % of one that is a thousandth of it.
TOP = {torch.int8: 127, torch.uint8: 255}


def hashed(x: Tensor) -> Tensor:
    """Spread the bits of int32 numbers, in place: two rounds of multiplying and folding."""
    for factor, shift in ((0x7FEB352D, 16), (0x846CA68B - 2**32, 15)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def noise(key: Tensor, shape: Sequence[int], offset: Sequence[int], whole: Sequence[int]) -> Tensor:
    """32 bits for each element of a box that begins at `offset` of the whole; `key` is an int32 scalar."""
    found = key.expand(tuple(shape)).clone()
    for dim, (size, begin) in enumerate(zip(shape, offset, strict=True)):
        place = (torch.arange(size, device=key.device) + begin) * math.prod(whole[dim + 1 :])
        place = (place + 2**31) % 2**32 - 2**31  # what overflows wraps around
        found += place.to(torch.int32).view(-1, *(1,) * (len(shape) - dim - 1))
    return hashed(found)


def to_bfloat16(value: Tensor, bits: Tensor) -> Tensor:
    """The neighbour above or below, each as often as `value` is near to it."""
    lifted = value.view(torch.int32) + (bits & 0xFFFF)
    return (lifted & -0x10000).view(torch.float32).bfloat16()


def to_codes(value: Tensor, dtype: torch.dtype, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Codes in the shape of `value`, and the scale of each block along the last dimension."""
    size, top = value.abs(), TOP[dtype]
    short = -size.shape[-1] % BLOCK
    blocks = torch.nn.functional.pad(size, (0, short)) if short else size
    scales = blocks.unflatten(-1, (-1, BLOCK)).amax(-1)
    size = size / _spread(torch.where(scales > 0, scales, 1.0), size.shape[-1])
    below = size.sqrt().sqrt_().mul_(top).floor_().clamp_(max=top - 1)
    low, high = _level(below, top), _level(below + 1, top)
    chance = (bits >> 8).bitwise_and_(0xFFFFFF) * 2.0**-24
    code = below + (chance < (size - low) / (high - low))
    if dtype is torch.uint8:
        # A second moment of 0 under a first one that is not would make an endless step.
        return torch.where(size > 0, code.clamp_(min=1), 0.0).to(dtype), scales
    return torch.copysign(code, value).to(dtype), scales


def from_codes(codes: Tensor, scales: Tensor) -> Tensor:
    value = _level(codes.float(), TOP[codes.dtype]).mul_(_spread(scales, codes.shape[-1]))
    return torch.copysign(value, codes.float()) if codes.dtype is torch.int8 else value


def _level(code: Tensor, top: int) -> Tensor:
    return (code / top).square_().square_()


def _spread(scales: Tensor, size: int) -> Tensor:
    return scales.repeat_interleave(BLOCK, -1)[..., :size]
