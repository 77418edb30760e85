"""Linear layers whose products run on 8-bit floats, which Hopper computes twice as quickly, at a price in exactness.

Legend: T tokens, K inputs, N outputs, R rows.

Each row of a factor has a scale of its own, its largest value being the largest 8-bit one: an outlier spoils one token
or one output, not all. Outputs and the gradients of inputs are 8-bit products. The gradients of weights, sums over all
tokens, are bf16 products as without this, and weights and optimizer stay float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.errors import UserError
from mvp_engine.ops.autocast import autocast_dtype

LARGEST = 448.0  # of float8_e4m3fn
MULTIPLE = 16  # of which inputs and outputs must be


def use(block: nn.Module) -> int:
    """From now on the linear layers of a block compute like this under bf16 autocast; how many are there?"""
    fitting = [layer for layer in block.modules() if fits(layer)]
    for layer in fitting:
        layer.__class__ = Fp8Linear  # the same layer with the same parameters
    return len(fitting)


def check(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"model.fp8: {name} has no 8-bit products; they begin with Ada and Hopper. Leave it out"
        )


def fits(layer: nn.Module) -> bool:
    """A plain linear layer, not an adapter's, of sizes that there are such products for."""
    return (
        type(layer) is nn.Linear
        and layer.in_features % MULTIPLE == 0 == layer.out_features % MULTIPLE
    )


class Fp8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if autocast_dtype(x) != torch.bfloat16:
            return super().forward(x)
        out_TN = _Product.apply(x.bfloat16().reshape(-1, self.in_features), self.weight)
        out = out_TN.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.bfloat16()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(
            x_TK if ctx.needs_input_grad[1] else None, weight_NK
        )  # only what a gradient needs
        return _product(x_TK, weight_NK)

    @staticmethod
    def backward(ctx: Any, d_TN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TK, weight_NK = ctx.saved_tensors
        d_TN = d_TN.bfloat16()
        d_x = _product(d_TN, weight_NK.t()) if ctx.needs_input_grad[0] else None
        d_weight = (d_TN.t() @ x_TK).to(weight_NK.dtype) if ctx.needs_input_grad[1] else None
        return d_x, d_weight


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.T`."""
    (a_codes, a_scale), (b_codes, b_scale) = _coded(a), _coded(b.contiguous())
    if not a.is_cuda:  # the same numbers in a slower way
        return (a_codes.float() @ b_codes.float().t() * a_scale * b_scale.t()).bfloat16()
    return torch._scaled_mm(
        a_codes, b_codes.t(), a_scale, b_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _coded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit codes, and the scale of each row, (R, 1)."""
    values = rows.float()
    scale_R1 = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (values / scale_R1).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale_R1
