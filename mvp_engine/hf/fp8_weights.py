"""FP8 values of weights that are made once per step, of layers of `ops/fp8.py` (`model.cast_weights_once`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mvp_engine.ops.fp8 import Fp8Weight, quantize


def empty_copy(weight_NK: Tensor) -> Fp8Weight:
    """Memory for the values of a weight.

    The gradient, in bf16, goes to a tensor of the weight's shape that has the memory of one element. No one reads it;
    its value is NaN, so that one who did would notice.
    """
    rows, columns = weight_NK.shape
    empty = weight_NK.new_empty
    leaf_NK = weight_NK.new_empty_strided((rows, columns), (0, 0), dtype=torch.bfloat16)
    leaf_NK.as_strided((1,), (1,)).fill_(torch.nan)
    return Fp8Weight(
        leaf_NK.detach().requires_grad_(),
        empty((rows, columns), dtype=torch.float8_e4m3fn),
        empty((rows, 1), dtype=torch.float32),
        empty((columns, rows), dtype=torch.float8_e4m3fn),
        empty((columns, 1), dtype=torch.float32),
    )


@torch.no_grad()
def quantize_weights(copies: Sequence[Fp8Weight], weights: Sequence[Tensor]) -> None:
    """Give the copies the values of the weights."""
    if copies and weights[0].is_cuda:
        from mvp_engine.hf.fp8_weights_kernel import quantize_both

        quantize_both(copies, weights)
        return
    for copy, weight_NK in zip(copies, weights, strict=True):
        values_NK, scale_N1 = quantize(weight_NK)
        values_KN, scale_K1 = quantize(weight_NK.t().contiguous())
        for tensor, found in zip(copy[1:], (values_NK, scale_N1, values_KN, scale_K1), strict=True):
            tensor.copy_(found)
