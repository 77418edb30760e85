"""Triton kernel that samples tokens: it reads the logits once, and no noise is in memory.

The tokens are those of `gumbel_noise.sample_tokens`, whose plain PyTorch reads and writes about 400 bytes per logit.
Legend: S sequences, V vocabulary, B blocks of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # 4 logits per thread: more would unroll into code beyond the instruction cache
WARPS = 8


def sample_tokens(logits_SV: Tensor, keys_S: Tensor) -> Tensor:
    """The index of the largest sum of logit and noise in each row; `keys_S` are those of one position."""
    sequences, vocab_size = logits_SV.shape
    logits_SV = logits_SV.contiguous()
    blocks = triton.cdiv(vocab_size, BLOCK)
    values_SB = logits_SV.new_empty(sequences, blocks)
    indices_SB = keys_S.new_empty(sequences, blocks)
    grid = (sequences, blocks)
    _largest[grid](
        logits_SV, keys_S, values_SB, indices_SB, vocab_size, blocks, BLOCK=BLOCK, num_warps=WARPS
    )
    return indices_SB.gather(1, values_SB.argmax(1, keepdim=True))[:, 0]


@triton.jit
def _hash(x):  # type: ignore[no-untyped-def]
    """`gumbel_noise._hash_`; the factors are 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as int64."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _largest(  # type: ignore[no-untyped-def]
    logits, keys, values, indices, vocab_size, blocks, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    x = tl.load(logits + row * vocab_size + column, inside, -float("inf"))
    # 0x9E3779B97F4A7C15 as int64, `gumbel_noise.GOLDEN`.
    bits = _hash(tl.load(keys + row) + (column + 1).to(tl.int64) * -0x61C8864680B583EB)
    uniform = (((bits >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16
    noise = -tl.log(-tl.log(uniform))
    total = x + noise.to(tl.float32)
    at = row * blocks + block
    tl.store(values + at, tl.max(total, 0))
    tl.store(indices + at, (block * BLOCK + tl.argmax(total, 0)).to(tl.int64))
