"""Megatron's sequence parallel: between matrices, tensor-parallel ranks hold their share of the tokens only.

Differentiable collectives along dimension 0, on any device and without Megatron's global buffer. Tokens that do not
divide evenly are padded with rows of zeros at the first layer and cut off after the last one; attention never sees them
and no gradient reaches them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

Group = dist.ProcessGroup


def all_gather(x: Tensor, group: Group) -> Tensor:
    operator = torch.ops._c10d_functional.all_gather_into_tensor
    gathered: Tensor = functional.wait_tensor(
        operator(x.contiguous(), group.size(), group.group_name)
    )
    return gathered


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    operator = torch.ops._c10d_functional.reduce_scatter_tensor
    share: Tensor = functional.wait_tensor(
        operator(x.contiguous(), "sum", group.size(), group.group_name)
    )
    return share


def split_tokens(x: Tensor, group: Group) -> Tensor:
    """This rank's share of tokens that all ranks have; short ones are padded with zeros."""
    missing = -len(x) % group.size()
    return Split.apply(F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)), group)


def join_tokens(x: Tensor, tokens: int, group: Group) -> Tensor:
    """All tokens, on every rank, for a computation that is the same on every rank."""
    return Join.apply(x, group)[:tokens]


class SummedGrads(Function):
    """The identity on some weights; backward sums their gradients over a group, in one all-reduce in float32."""

    @staticmethod
    def forward(ctx: Any, group: Group, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = torch.cat([grad.flatten().float() for grad in grads])
        dist.all_reduce(total, group=ctx.group)
        parts = total.split([grad.numel() for grad in grads])
        pairs = zip(parts, grads, strict=True)
        return None, *(part.view_as(grad).to(grad.dtype) for part, grad in pairs)


class _GatheredGrad(Function):
    """The gradient of a rank's share is that of all shares."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class Split(_GatheredGrad):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.chunk(group.size())[group.rank()].clone()


class Join(Function):
    """The gradient is the same on every rank, so a rank takes its share of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None


class ReduceScatter(_GatheredGrad):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)


class GatheredLinear(Function):
    """A linear layer on the tokens of all ranks. Only this rank's share is saved; backward gathers again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.has_bias = bias is not None
        return F.linear(all_gather(x, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = reduce_scatter(grad.matmul(weight), ctx.group) if needs_x else None
        rows = grad.flatten(0, -2)
        grad_weight = None
        if needs_weight:
            grad_weight = rows.t().matmul(all_gather(x, ctx.group).flatten(0, -2))
        grad_bias = rows.sum(0) if ctx.has_bias and needs_bias else None
        return grad_x, grad_weight, grad_bias, None
