"""FP8 values of the weights of linear layers and stacked experts, made once for all forwards of a generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from mvp_engine.hf import experts
from mvp_engine.hf.fp8_grouped_mm import quantize_experts
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


@contextmanager
def quantized_once(model: nn.Module) -> Iterator[None]:
    """A context for forwards without gradients, in which no weight changes: each is quantized at its start."""
    places = fp8_places(model)
    try:
        for module, name in places:
            setattr(module, quantized_name(name), _quantized(module, name))
        yield
    finally:
        for module, name in places:
            setattr(module, quantized_name(name), None)


def _quantized(module: nn.Module, name: str) -> Fp8Weight:
    weight = module.get_parameter(name).detach()
    if isinstance(module, Fp8Linear):
        return Fp8Weight(*quantize(weight))
    return Fp8Weight(*quantize_experts(weight, bool(module.is_transposed)))
