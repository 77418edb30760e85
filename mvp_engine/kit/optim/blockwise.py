"""Block-wise quantisation to 8 bits: codes, and one float32 scale for each block of a row.

A value is scale * (code / max_code) ** 4. The fourth power puts codes close together near zero: neighbours are 3 % of
the block's maximum apart at its top, and less than 20 % of the value apart at a thousandth of the maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # elements of a row that share a scale
MAX_CODE = {torch.int8: 127, torch.uint8: 255}


def scales_shape(shape: torch.Size) -> tuple[int, ...]:
    """The shape of the scales of a tensor with this shape."""
    blocks = -(-shape[-1] // BLOCK)
    return (*shape[:-1], blocks)


def quantize(value: Tensor, dtype: torch.dtype, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of `value` by stochastic rounding, and the scales of its blocks; uint8 is for values >= 0."""
    max_code = MAX_CODE[dtype]
    size = value.abs()
    scales = _block_maximum(size)
    divisors = torch.where(scales > 0, scales, 1.0)
    size = size / _repeat_for_elements(divisors, size.shape[-1])

    lower_code = size.sqrt().sqrt_().mul_(max_code)
    lower_code = lower_code.floor_().clamp_(max=max_code - 1)
    lower = _dequantized(lower_code, max_code)
    upper = _dequantized(lower_code + 1, max_code)
    uniform = (bits >> 8).bitwise_and_(0xFFFFFF) * 2.0**-24
    code = lower_code + (uniform < (size - lower) / (upper - lower))

    if dtype is torch.int8:
        return torch.copysign(code, value).to(dtype), scales
    # Code 0 is for exact zeros only. A second moment that rounds to 0 while the first one does not leaves eps as the
    # divisor of the next step: a weight jumped by 7,000 learning rates.
    code = torch.where(size > 0, code.clamp_(min=1), 0.0)
    return code.to(dtype), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of codes and the scales of their blocks."""
    as_float = codes.float()
    value = _dequantized(as_float, MAX_CODE[codes.dtype])
    value = value.mul_(_repeat_for_elements(scales, codes.shape[-1]))
    return torch.copysign(value, as_float) if codes.dtype is torch.int8 else value


def _block_maximum(size: Tensor) -> Tensor:
    missing = -size.shape[-1] % BLOCK
    if missing:
        size = torch.nn.functional.pad(size, (0, missing))
    return size.unflatten(-1, (-1, BLOCK)).amax(-1)


def _dequantized(code: Tensor, max_code: int) -> Tensor:
    """The value of codes without scale and sign."""
    return (code / max_code).square_().square_()


def _repeat_for_elements(scales: Tensor, row_length: int) -> Tensor:
    """The scale of each element of a row; the last block of a row may be short."""
    return scales.repeat_interleave(BLOCK, -1)[..., :row_length]
