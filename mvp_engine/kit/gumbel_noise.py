"""Gumbel noise from a hash instead of a random generator, to sample tokens: argmax(logits + noise).

The noise of a vocabulary entry depends on the seed, the key of the prompt, the index of the sample, the position in the
completion and the entry's index, on nothing else. So the same tokens are drawn on every layout, number of ranks and
batching, on a CPU and on a GPU, and no generator state has to be saved.

Legend: S sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # steps of a counter: 2**64 over the golden ratio, odd
# (shift, factor) of each round of the hash, and the last shift: splitmix64.
HASH_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
MASK = 2**64 - 1
BLOCK = 2**22  # logits that get their noise at a time: 32 MiB for each temporary


def sequence_keys(seed: int, prompt_keys: Sequence[int], samples: int) -> list[int]:
    """An int64 per sequence, the samples of a prompt next to each other; they differ in seed, prompt or sample."""
    keys = []
    for prompt_key in prompt_keys:
        of_prompt = _hash_int(_hash_int(seed) + prompt_key)
        keys += [_signed(_hash_int(of_prompt + sample)) for sample in range(samples)]
    return keys


def sample_tokens(logits_SV: Tensor, keys_S: Tensor, position: int | Tensor) -> Tensor:
    """The next token of each sequence, drawn from its float32 logits, where each has written `position` tokens.

    In a CUDA graph `position` is an int64 scalar on the device.
    """
    of_position_S = _keys_of_position(keys_S, position)
    if logits_SV.is_cuda:
        from mvp_engine.kit import gumbel_kernel

        return gumbel_kernel.sample_tokens(logits_SV, of_position_S)
    rows = max(1, BLOCK // logits_SV.shape[1])
    chosen = []
    for logits_RV, keys_R in zip(logits_SV.split(rows), of_position_S.split(rows), strict=True):
        chosen.append(_noise(keys_R, logits_SV.shape[1]).add_(logits_RV).argmax(-1))
    return torch.cat(chosen)


def gumbel_noise(keys_S: Tensor, position: int, vocab_size: int) -> Tensor:
    """The noise that `sample_tokens` adds to logits, (S, V) float32."""
    return _noise(_keys_of_position(keys_S, position), vocab_size)


def _keys_of_position(keys_S: Tensor, position: int | Tensor) -> Tensor:
    if isinstance(position, Tensor):
        return _hash_(keys_S + (position + 1) * _signed(GOLDEN))
    return _hash_(keys_S + _signed(GOLDEN * (position + 1) & MASK))


def _noise(keys_S: Tensor, vocab_size: int) -> Tensor:
    """Noise from the keys of one position.

    Logarithms are those of float64: float32 ones differ in their last bit between devices, and between the vectorized
    part of a tensor and its remainder.
    """
    counter_V = torch.arange(1, vocab_size + 1, device=keys_S.device) * _signed(GOLDEN)
    bits_SV = _hash_(keys_S[:, None] + counter_V)
    # 52 bits, in the middle of their interval: neither 0 nor 1, which have no finite noise.
    uniform_SV = _logical_shift_right(bits_SV, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform_SV.log_().neg_().log_().neg_().float()


def _hash_(x: Tensor) -> Tensor:
    """Hash int64 numbers in place, as `_hash_int` does; products wrap around."""
    for shift, factor in HASH_ROUNDS:
        x.bitwise_xor_(_logical_shift_right(x, shift))
        x.mul_(_signed(factor))
    return x.bitwise_xor_(_logical_shift_right(x, LAST_SHIFT))


def _hash_int(x: int) -> int:
    x = (x + GOLDEN) & MASK
    for shift, factor in HASH_ROUNDS:
        x = (x ^ (x >> shift)) * factor & MASK
    return x ^ (x >> LAST_SHIFT)


def _logical_shift_right(x: Tensor, shift: int) -> Tensor:
    """Shift zeros in from the left; torch's own shift of int64 repeats the sign bit."""
    return (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
