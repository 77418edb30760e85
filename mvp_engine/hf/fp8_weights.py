"""FP8 values of the weights of linear layers and stacked experts: made once per step (`model.cast_weights_once`), or
once for all forwards of a generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mvp_engine.hf import experts
from mvp_engine.ops.fp8 import Fp8Linear, Fp8Weight, quantize, quantized_name


def fp8_places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Modules and names of the weights that are multiplied in FP8: of experts the matrices, not the biases."""
    found: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            found.append((module, "weight"))
        elif experts.is_fp8(module):
            params = module.named_parameters(recurse=False)
            found += [(module, name) for name, param in params if param.ndim == 3]
    return found


def empty_copy(weight: Tensor) -> Fp8Weight:
    """Memory for the values of a weight.

    The gradient of a trainable one, in bf16, goes to a tensor of the weight's shape that has the memory of one element.
    No one reads it; its value is NaN, so that one who did would notice.
    """
    *stack, rows, columns = weight.shape
    empty = weight.new_empty
    leaf = weight.new_empty_strided(weight.shape, (0,) * weight.ndim, dtype=torch.bfloat16)
    leaf.as_strided((1,), (1,)).fill_(torch.nan)
    return Fp8Weight(
        leaf.detach().requires_grad_(weight.requires_grad),
        empty((*stack, rows, columns), dtype=torch.float8_e4m3fn),
        empty((*stack, rows, 1), dtype=torch.float32),
        empty((*stack, columns, rows), dtype=torch.float8_e4m3fn),
        empty((*stack, columns, 1), dtype=torch.float32),
    )


@torch.no_grad()
def quantize_weights(copies: Sequence[Fp8Weight], weights: Sequence[Tensor]) -> None:
    """Give the copies the values of the weights."""
    if copies and weights[0].is_cuda:
        from mvp_engine.hf.fp8_weights_kernel import quantize_both

        quantize_both(copies, weights)
        return
    for copy, weight in zip(copies, weights, strict=True):
        both = (*quantize(weight), *quantize(weight.mT.contiguous()))
        for tensor, found in zip(copy[1:], both, strict=True):
            tensor.copy_(found)


def set_quantized(
    places: Sequence[tuple[nn.Module, str]], values: Sequence[Fp8Weight | None]
) -> None:
    """Give modules the FP8 values to compute with; None: they quantize in every forward."""
    for (module, name), value in zip(places, values, strict=True):
        setattr(module, quantized_name(name), value)


@contextmanager
def quantized_once(model: nn.Module) -> Iterator[None]:
    """A context for forwards without gradients, in which no weight changes: each is quantized at its start."""
    places = fp8_places(model)
    weights = [module.get_parameter(name) for module, name in places]
    before = [getattr(module, quantized_name(name), None) for module, name in places]
    copies = [empty_copy(weight) for weight in weights]
    quantize_weights(copies, weights)
    try:
        set_quantized(places, copies)
        yield
    finally:
        set_quantized(places, before)
