"""Ulysses: ranks share the tokens of a batch everywhere but in attention, where they share the heads.

Legend: T tokens of the whole batch, t of this rank, H heads, h heads of this rank in attention, d head size.

Tokens are cut wherever the shares come out even: no padding, and no heed of sequence boundaries, since attention sees
all tokens of its heads. Every rank of the group gives the same loss over all tokens, which counts once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from mvp_engine.errors import UserError


@dataclass(frozen=True)
class UlyssesShard:
    """This rank's part of one batch's tokens."""

    group: dist.ProcessGroup
    rank: int
    sizes: tuple[int, ...]  # tokens of each rank

    @classmethod
    def of(cls, group: dist.ProcessGroup, tokens: int) -> UlyssesShard:
        ranks = dist.get_world_size(group)
        if tokens < ranks:
            raise UserError(
                f"a batch of {tokens} token(s) cannot be shared by parallel.ulysses={ranks} ranks"
            )
        cuts = [tokens * r // ranks for r in range(ranks + 1)]
        sizes = tuple(b - a for a, b in pairwise(cuts))
        return cls(group, dist.get_rank(group), sizes)

    def cut(self, value: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of a tensor over all tokens."""
        return value.split(list(self.sizes), dim)[self.rank]

    def gather(self, value_t: Tensor) -> Tensor:
        """All ranks' parts along dimension 0, as one tensor that carries gradients."""
        return _Gather.apply(value_t, self)

    def total(self, value: Tensor) -> Tensor:
        """The sum of all ranks' numbers, which carries gradients."""
        return _Total.apply(value, self)

    def to_heads(self, *whole: Tensor) -> list[Tensor]:
        """All heads of this rank's tokens, (H, t, d) -> this rank's heads of all tokens, (h, T, d), for each of some
        tensors. They travel together: ranks that compile blocks must not send them in an order of their own."""
        parts = [x.chunk(len(self.sizes)) for x in whole]
        shapes: list[Shapes] = [
            [(len(mine), size, mine.shape[-1]) for mine, *_ in parts] for size in self.sizes
        ]
        received = _exchange([list(one) for one in zip(*parts, strict=True)], shapes, self.group)
        return [torch.cat(one, dim=1) for one in zip(*received, strict=True)]

    def to_tokens(self, x_hTd: Tensor) -> Tensor:
        """The way back, (H, t, d)."""
        shape = (len(x_hTd), self.sizes[self.rank], x_hTd.shape[-1])
        parts = [[part] for part in x_hTd.split(list(self.sizes), dim=1)]
        return torch.cat([x for (x,) in _exchange(parts, [[shape]] * len(parts), self.group)])


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise UserError(
            f"parallel.ulysses={ranks} cannot share {heads} query and {kv_heads} key/value heads: it must divide the "
            "first, and divide or be a multiple of the second"
        )


Shapes = list[tuple[int, ...]]


def _exchange(
    parts: list[list[Tensor]], shapes: list[Shapes], group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """Send some tensors to each rank; receive some of the given shapes from each. It carries gradients.

    By torch's own operator: compilers know it, never move one past another, and repeat one only in blocks that are
    recomputed, on all ranks alike. Else ranks would wait for each other, or get what was meant for another.
    """
    sent = [sum(part.numel() for part in ones) for ones in parts]
    sizes = [[math.prod(shape) for shape in ones] for ones in shapes]
    flat = torch.cat([part.reshape(-1) for ones in parts for part in ones])
    operator = torch.ops._c10d_functional.all_to_all_single
    received = functional.wait_tensor(
        operator(flat, [sum(ones) for ones in sizes], sent, group.group_name)
    )
    pieces = iter(received.split([size for ones in sizes for size in ones]))
    return [[next(pieces).view(shape) for shape in ones] for ones in shapes]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: UlyssesShard) -> Tensor:
        ctx.shard = shard
        shapes: list[Shapes] = [[(size, *x.shape[1:])] for size in shard.sizes]
        return torch.cat([part for (part,) in _exchange([[x]] * len(shapes), shapes, shard.group)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Every rank has the gradient of the same whole loss: its own part is all it needs.
        return ctx.shard.cut(grad).contiguous(), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: UlyssesShard) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=shard.group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None  # as above
