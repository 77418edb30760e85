"""Grouped GEMM of experts as an opaque operator, for compiled blocks in dtypes that torch's has no shape function for.

Legend: N rows, sorted by expert; E experts; I inputs, O outputs.

torch.compile knows torch's own in bf16 alone. The backward of transformers' fallback reads the ends of the groups on
the host, which fails to compile. torch then runs the code of the whole block uncompiled, also in blocks of another kind
that share it, and full activation checkpointing finds other tensors in the repeated forward than in the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def needs_operator(weight: Tensor) -> bool:
    """Inside torch.compile, in a dtype that torch's own operator does not support there."""
    return torch.compiler.is_compiling() and weight.dtype != torch.bfloat16


@torch.library.custom_op("mvp::opaque_grouped_mm", mutates_args=())
def opaque_grouped_mm(x_NI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Each row times the matrix of its expert; `ends_E` is where the rows of each expert end."""
    out_NO = x_NI.new_zeros(len(x_NI), weight_EIO.shape[2])
    for expert, rows in _groups(ends_E):
        torch.mm(x_NI[rows], weight_EIO[expert], out=out_NO[rows])
    return out_NO


@torch.library.custom_op("mvp::opaque_grouped_mm_backward", mutates_args=())
def _backward(
    grad_NO: Tensor, x_NI: Tensor, weight_EIO: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    x_grad_NI = x_NI.new_zeros(x_NI.shape)
    weight_grad_EIO = weight_EIO.new_zeros(weight_EIO.shape)
    for expert, rows in _groups(ends_E):
        torch.mm(grad_NO[rows], weight_EIO[expert].T, out=x_grad_NI[rows])
        torch.mm(x_NI[rows].T, grad_NO[rows], out=weight_grad_EIO[expert])
    return x_grad_NI, weight_grad_EIO


def _groups(ends_E: Tensor) -> list[tuple[int, slice]]:
    """Each expert with rows, and its rows."""
    ends = ends_E.tolist()
    slices = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return [(expert, rows) for expert, rows in enumerate(slices) if rows.start < rows.stop]


@opaque_grouped_mm.register_fake
def _(x_NI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], weight_EIO.shape[2])  # `len` would fix the number of rows


@_backward.register_fake
def _(grad_NO: Tensor, x_NI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    return x_NI.new_empty(x_NI.shape), weight_EIO.new_empty(weight_EIO.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grads(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*_backward(grad_NO, *ctx.saved_tensors), None)


opaque_grouped_mm.register_autograd(_grads, setup_context=_save)
