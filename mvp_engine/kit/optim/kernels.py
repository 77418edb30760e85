"""AdamW with moments in few bits as one Triton kernel: each number is read and written once.

The numbers are those of the plain way (`optimizer.py`, `rounding.py`) up to the rounding of float32, the noise to the
bit: it is the same hash of the same places. A program works on some blocks of rows, which share a scale where moments
are 8-bit codes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mvp_engine.kit.optim.rounding import BLOCK

PER_PROGRAM, WARPS = 16, 4  # blocks


def adamw_(
    weight: Tensor,
    grad: Tensor,
    moments: list[Tensor],
    scales: list[Tensor] | None,
    salts: list[int],
    begin: int,
    numbers: list[Tensor],
    found_inf: Tensor,
    grad_scale: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step, in place. `moments` are two, as are `scales`, which 8-bit ones have, and `salts`, of their noise.
    `begin`: the place of the first element in the whole parameter. `numbers`: which step it is, and what the bias
    corrections divide by; they and the last two are one number each, on the device."""
    columns = weight.shape[-1]
    blocks = triton.cdiv(columns, BLOCK)
    count = weight.numel() // columns * blocks
    tensors = (weight, grad, *moments, *(scales or moments))
    assert all(x.is_contiguous() for x in tensors)
    how: dict[str, Any] = {
        "CODED": scales is not None,
        "BLOCK": BLOCK,
        "PER_PROGRAM": PER_PROGRAM,
        "num_warps": WARPS,
    }
    with torch.cuda.device(weight.device):
        _adamw[(triton.cdiv(count, PER_PROGRAM),)](
            *tensors, *numbers, found_inf, grad_scale, *salts, begin, count, blocks, columns,
            lr, *betas, *(1 - beta for beta in betas), eps, weight_decay, **how,
        )  # fmt: skip


@triton.jit
def _hashed(x):  # type: ignore[no-untyped-def]
    """`rounding.hashed`, on int32."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846CA68B, signed
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _noise(step, salt, place):  # type: ignore[no-untyped-def]
    """`rounding.noise` under `moments.key_of`."""
    key = _hashed(_hashed(step + salt) + salt)
    return _hashed(key + place)


@triton.jit
def _level(code, top):  # type: ignore[no-untyped-def]
    share = code / top
    return (share * share) * (share * share)


@triton.jit
def _code(value, bits, top):  # type: ignore[no-untyped-def]
    """`rounding.to_codes` of blocks: codes without a sign, and scales."""
    size = tl.abs(value)
    scale = tl.max(size, 1)
    size = size / tl.where(scale > 0, scale, 1.0)[:, None]
    below = tl.minimum(tl.floor(tl.sqrt(tl.sqrt(size)) * top), top - 1)
    low, high = _level(below, top), _level(below + 1, top)
    chance = ((bits >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24
    return below + tl.where(chance < (size - low) / (high - low), 1.0, 0.0), scale, size


@triton.jit
def _to_bfloat16(value, bits):  # type: ignore[no-untyped-def]
    lifted = value.to(tl.int32, bitcast=True) + (bits & 0xFFFF)
    return (lifted & -0x10000).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit(do_not_specialize=["first_salt", "second_salt", "begin", "count"])
def _adamw(  # type: ignore[no-untyped-def]
    weights, grads, firsts, seconds, first_scales, second_scales, step, by_first, by_second, found_inf, grad_scale,
    first_salt, second_salt, begin, count, blocks, columns, lr, beta1, beta2, rest1, rest2, eps, decay,
    CODED: tl.constexpr, BLOCK: tl.constexpr, PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) > 0:
        return
    block = tl.program_id(0).to(tl.int64) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    column = (block % blocks)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (block < count)[:, None] & (column < columns)
    place = (block // blocks)[:, None] * columns + column
    weight = tl.load(weights + place, inside, 0.0)
    grad = tl.load(grads + place, inside, 0.0).to(tl.float32) / tl.load(grad_scale)
    first, second = (
        tl.load(firsts + place, inside, 0).to(tl.float32),
        tl.load(seconds + place, inside, 0).to(tl.float32),
    )
    if CODED:
        first_scale = tl.load(first_scales + block, block < count, 0.0)[:, None]
        second_scale = tl.load(second_scales + block, block < count, 0.0)[:, None]
        level = _level(first, 127.0) * first_scale
        first = tl.where(first < 0, -level, level)
        second = _level(second, 255.0) * second_scale
    first += (grad - first) * rest1  # 1 - beta, of which float32 would lose digits here
    second = second * beta2 + grad * grad * rest2
    change = first / (tl.sqrt(second) / tl.load(by_second) + eps) * (lr / tl.load(by_first))
    tl.store(weights + place, weight * (1 - lr * decay) - change, inside)
    now = tl.load(step).to(tl.int32)
    where = (begin + place).to(tl.int32)
    first_bits, second_bits = _noise(now, first_salt, where), _noise(now, second_salt, where)
    if CODED:
        code, scale, _ = _code(first, first_bits, 127.0)
        tl.store(firsts + place, tl.where(first < 0, -code, code).to(tl.int8), inside)
        tl.store(first_scales + block, scale, block < count)
        code, scale, size = _code(second, second_bits, 255.0)
        code = tl.where(size > 0, tl.maximum(code, 1.0), 0.0)
        tl.store(seconds + place, code.to(tl.uint8), inside)
        tl.store(second_scales + block, scale, block < count)
    else:
        tl.store(firsts + place, _to_bfloat16(first, first_bits), inside)
        tl.store(seconds + place, _to_bfloat16(second, second_bits), inside)
