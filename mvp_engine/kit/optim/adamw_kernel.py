"""AdamW with low-precision states as one Triton kernel: each element is read and written once.

The results are those of `adamw.chunked_adamw_` up to float32 rounding. The random bits of the stochastic rounding are
equal: the same hash of the same positions. A program updates some blocks of rows; with 8-bit states the elements of a
block share a scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mvp_engine.kit.optim.state_tensor import BLOCK, StateTensor

BLOCKS_PER_PROGRAM = 16
WARPS = 4


class StepScalars(NamedTuple):
    """Scalars on the device: reading them on the host would be a host sync."""

    step: Tensor
    correction1: Tensor  # the divisor of exp_avg
    correction2_sqrt: Tensor  # the divisor of the square root of exp_avg_sq
    found_inf: Tensor
    grad_scale: Tensor


def launch_adamw(
    weight: Tensor,
    grad: Tensor,
    exp_avg: StateTensor,
    exp_avg_sq: StateTensor,
    offset: int,
    scalars: StepScalars,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of one parameter, in place. `offset`: the position of its first element in the full parameter."""
    beta1, beta2 = betas
    is_quantized = exp_avg.is_quantized
    # Without scales the kernel gets two pointers that it does not use.
    scale = exp_avg.scales if is_quantized else exp_avg.stored
    scale_sq = exp_avg_sq.scales if is_quantized else exp_avg_sq.stored
    tensors = (weight, grad, exp_avg.stored, exp_avg_sq.stored, scale, scale_sq)
    assert all(tensor.is_contiguous() for tensor in tensors)
    columns = weight.shape[-1]
    blocks_per_row = triton.cdiv(columns, BLOCK)
    blocks = weight.numel() // columns * blocks_per_row
    programs = triton.cdiv(blocks, BLOCKS_PER_PROGRAM)
    with torch.cuda.device(weight.device):
        _adamw[(programs,)](
            *tensors,
            *scalars,
            exp_avg.salt,
            exp_avg_sq.salt,
            offset,
            blocks,
            blocks_per_row,
            columns,
            lr,
            beta1,
            beta2,
            1 - beta1,  # in float64 here; float32 in the kernel would lose digits
            1 - beta2,
            eps,
            weight_decay,
            IS_QUANTIZED=is_quantized,
            BLOCK=BLOCK,
            BLOCKS_PER_PROGRAM=BLOCKS_PER_PROGRAM,
            num_warps=WARPS,
        )


@triton.jit
def _hash(x):  # type: ignore[no-untyped-def]
    """`rounding.hash_int32_`."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846CA68B as int32
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _random_bits(step, salt, position):  # type: ignore[no-untyped-def]
    """`rounding.random_bits` with `rounding.rounding_key`."""
    key = _hash(_hash(step + salt) + salt)
    return _hash(key + position)


@triton.jit
def _round_to_bfloat16(value, bits):  # type: ignore[no-untyped-def]
    """`rounding.round_to_bfloat16`."""
    carried = value.to(tl.int32, bitcast=True) + (bits & 0xFFFF)
    return (carried & -0x10000).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _dequantized(code, max_code):  # type: ignore[no-untyped-def]
    """`blockwise._dequantized`: the value of codes without scale and sign."""
    share = code / max_code
    return (share * share) * (share * share)


@triton.jit
def _quantize(value, bits, max_code):  # type: ignore[no-untyped-def]
    """`blockwise.quantize` without signs: codes, scales, and the sizes that were rounded."""
    size = tl.abs(value)
    scale = tl.max(size, 1)
    size = size / tl.where(scale > 0, scale, 1.0)[:, None]
    lower_code = tl.minimum(tl.floor(tl.sqrt(tl.sqrt(size)) * max_code), max_code - 1)
    lower = _dequantized(lower_code, max_code)
    upper = _dequantized(lower_code + 1, max_code)
    uniform = ((bits >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24
    rounds_up = uniform < (size - lower) / (upper - lower)
    return lower_code + tl.where(rounds_up, 1.0, 0.0), scale, size


# Not specialised: salts and offsets differ between parameters, and each new specialisation compiles the kernel again.
@triton.jit(do_not_specialize=["salt", "salt_sq", "offset", "blocks"])
def _adamw(  # type: ignore[no-untyped-def]
    weight_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    scale_ptr,
    scale_sq_ptr,
    step_ptr,
    correction1_ptr,
    correction2_sqrt_ptr,
    found_inf_ptr,
    grad_scale_ptr,
    salt,
    salt_sq,
    offset,
    blocks,
    blocks_per_row,
    columns,
    lr,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    eps,
    weight_decay,
    IS_QUANTIZED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr,
):
    if tl.load(found_inf_ptr) > 0:
        return
    # Positions in the local tensor; int64, since a parameter may have more than 2 ** 31 elements.
    block = tl.program_id(0).to(tl.int64) * BLOCKS_PER_PROGRAM + tl.arange(0, BLOCKS_PER_PROGRAM)
    column = (block % blocks_per_row)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    block_mask = block < blocks
    mask = block_mask[:, None] & (column < columns)
    position = (block // blocks_per_row)[:, None] * columns + column

    weight = tl.load(weight_ptr + position, mask, 0.0)
    grad = tl.load(grad_ptr + position, mask, 0.0).to(tl.float32) / tl.load(grad_scale_ptr)
    exp_avg = tl.load(exp_avg_ptr + position, mask, 0).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + position, mask, 0).to(tl.float32)
    if IS_QUANTIZED:
        scale = tl.load(scale_ptr + block, block_mask, 0.0)[:, None]
        scale_sq = tl.load(scale_sq_ptr + block, block_mask, 0.0)[:, None]
        size = _dequantized(exp_avg, 127.0) * scale
        exp_avg = tl.where(exp_avg < 0, -size, size)
        exp_avg_sq = _dequantized(exp_avg_sq, 255.0) * scale_sq

    exp_avg += (grad - exp_avg) * one_minus_beta1
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * one_minus_beta2
    denominator = tl.sqrt(exp_avg_sq) / tl.load(correction2_sqrt_ptr) + eps
    update = exp_avg / denominator * (lr / tl.load(correction1_ptr))
    tl.store(weight_ptr + position, weight * (1 - lr * weight_decay) - update, mask)

    step = tl.load(step_ptr).to(tl.int32)
    full_position = (offset + position).to(tl.int32)
    bits = _random_bits(step, salt, full_position)
    bits_sq = _random_bits(step, salt_sq, full_position)
    if IS_QUANTIZED:
        code, scale, _ = _quantize(exp_avg, bits, 127.0)
        signed_code = tl.where(exp_avg < 0, -code, code)
        tl.store(exp_avg_ptr + position, signed_code.to(tl.int8), mask)
        tl.store(scale_ptr + block, scale, block_mask)

        code, scale, size = _quantize(exp_avg_sq, bits_sq, 255.0)
        code = tl.where(size > 0, tl.maximum(code, 1.0), 0.0)  # code 0 is for exact zeros only
        tl.store(exp_avg_sq_ptr + position, code.to(tl.uint8), mask)
        tl.store(scale_sq_ptr + block, scale, block_mask)
    else:
        tl.store(exp_avg_ptr + position, _round_to_bfloat16(exp_avg, bits), mask)
        tl.store(exp_avg_sq_ptr + position, _round_to_bfloat16(exp_avg_sq, bits_sq), mask)
