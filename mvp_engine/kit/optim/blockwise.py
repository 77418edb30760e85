"""Block-wise quantisation to 8 bits: codes, and one float32 scale for each block of a row.

A value is scale * (code / max_code) ** 4. The fourth power puts codes close together near zero: neighbours are 3 % of
the block's maximum apart at its top, and less than 20 % of the value apart at a thousandth of the maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
