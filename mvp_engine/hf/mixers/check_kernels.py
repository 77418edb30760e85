"""How far the installed kernels of mixers are from torch, on packed sequences; for `mvp doctor`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mvp_engine.hf.mixers.functions import REPLACEMENTS
from mvp_engine.hf.mixers.kernels import reference_only
from mvp_engine.hf.mixers.per_sequence import Packing

LENGTHS = [96, 5, 107, 31, 64, 17]


def mixer_error(operation: str, device: str = "cuda") -> float:
    """The relative error of a kernel in bf16 against torch in float32, forward and backward."""
    name = next(name for name, (kind, _) in REPLACEMENTS.items() if kind == operation)
    function = REPLACEMENTS[name][1]
    original = inspect.unwrap(_original(operation, name))
    packing = Packing(LENGTHS, torch.tensor([0, *LENGTHS], device=device).cumsum(0).int())
    args, kwargs = _inputs(operation, device)
    with reference_only():
        expected = _with_gradients(function, packing, original, args, kwargs)
    halves = args[:1] if operation in ("short convolution", "Mamba 2 scan") else args
    in_half = (*(value.bfloat16() for value in halves), *args[len(halves) :])
    found = _with_gradients(function, packing, original, in_half, kwargs)
    pairs = zip(found, expected, strict=True)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)


def _original(operation: str, name: str) -> Callable[..., Any]:
    """The function of transformers that the kernel replaces, from the first model that has it."""
    from transformers.models.kimi_linear import modeling_kimi_linear
    from transformers.models.mamba2 import modeling_mamba2
    from transformers.models.qwen3_5 import modeling_qwen3_5

    modules = (modeling_qwen3_5, modeling_kimi_linear, modeling_mamba2)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def _with_gradients(
    function: Callable[..., Any], packing: Packing, original: Any, args: Any, kwargs: Any
) -> list[Tensor]:
    first = args[0].clone().requires_grad_()
    out = function(packing, original, first, *args[1:], **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    (gradient,) = torch.autograd.grad(out.float().square().sum(), first)
    return [out.detach(), gradient]


def _inputs(operation: str, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random inputs in the layout of transformers' functions, with 2 heads of size 64."""
    generator = torch.Generator(device).manual_seed(0)
    tokens = sum(LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    if operation == "short convolution":
        return (normal(1, 128, tokens), normal(128, 4)), {"activation": "silu"}
    if operation == "Mamba 2 scan":
        groups = normal(1, tokens, 1, 64), normal(1, tokens, 1, 64)
        sizes = normal(1, tokens, 2), -normal(2).exp()
        return (normal(1, tokens, 2, 64), *sizes, *groups, 64), {"dt_softplus": True}
    decay = (1, tokens, 2) if operation == "gated delta rule" else (1, tokens, 2, 64)
    gates = {"g": -0.05 * normal(*decay).exp(), "beta": normal(1, tokens, 2).sigmoid()}
    heads = tuple(normal(1, tokens, 2, 64) for _ in range(3))
    return heads, {**gates, "use_qk_l2norm_in_kernel": True}
