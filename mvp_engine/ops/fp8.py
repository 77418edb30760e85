"""FP8 linear layers: GEMMs in float8, which Hopper computes at twice the bf16 rate, for some loss of precision.

Legend: T tokens, K inputs, N outputs, R rows.

Scaling is row-wise: each row of a matrix has a scale that maps its largest value to the largest float8 one, so an
outlier costs precision in one token or one output, not in all. Outputs and gradients of inputs are FP8 GEMMs. The
gradients of weights, sums over all tokens, stay bf16 GEMMs, and weights and optimizer states stay float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.errors import UserError
from mvp_engine.ops.autocast import autocast_dtype

LARGEST = 448.0  # of float8_e4m3fn
MULTIPLE = 16  # FP8 GEMMs need sizes that are multiples of this


def use(block: nn.Module) -> int:
    """Convert the linear layers of a block to FP8 under bf16 autocast; returns their number."""
    layers = [layer for layer in block.modules() if fits(layer)]
    for layer in layers:
        layer.__class__ = Fp8Linear  # the same layer with the same parameters
    return len(layers)


def check(device: torch.device) -> None:
    """Raise an error for GPUs without FP8 GEMMs."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"model.fp8: {name} does not support FP8 GEMMs, which need Ada, Hopper or newer. Remove model.fp8"
        )


def fits(layer: nn.Module) -> bool:
    """A plain linear layer (not an adapter's) of sizes that FP8 GEMMs support."""
    if type(layer) is not nn.Linear:
        return False
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0


class Fp8Linear(nn.Linear):
    """A linear layer that runs in FP8 under bf16 autocast, and as nn.Linear otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        if autocast_dtype(x) != torch.bfloat16:
            return super().forward(x)
        x_TK = x.bfloat16().reshape(-1, self.in_features)
        out_TN = _Fp8Matmul.apply(x_TK, self.weight)
        out = out_TN.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.bfloat16()


class _Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        # Only the gradient of the weight needs the input: frozen layers do not keep it.
        saved_TK = x_TK if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(saved_TK, weight_NK)
        return _matmul_transposed(x_TK, weight_NK)

    @staticmethod
    def backward(ctx: Any, d_TN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TK, weight_NK = ctx.saved_tensors
        d_TN = d_TN.bfloat16()
        d_x_TK = None
        if ctx.needs_input_grad[0]:
            d_x_TK = _matmul_transposed(d_TN, weight_NK.t())
        d_weight_NK = None
        if ctx.needs_input_grad[1]:
            d_weight_NK = (d_TN.t() @ x_TK).to(weight_NK.dtype)
        return d_x_TK, d_weight_NK


def _matmul_transposed(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.T` in FP8, with bf16 output."""
    a_fp8, a_scale = quantize(a)
    b_fp8, b_scale = quantize(b.contiguous())
    if not a.is_cuda:
        # The same values on a CPU, which has no FP8 GEMM.
        return (a_fp8.float() @ b_fp8.float().t() * a_scale * b_scale.t()).bfloat16()
    return torch._scaled_mm(
        a_fp8,
        b_fp8.t(),
        a_scale,
        b_scale.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The float8 values, and the scale of each row, (..., R, 1)."""
    values = rows.float()
    scale_R1 = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    scaled = (values / scale_R1).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn), scale_R1
