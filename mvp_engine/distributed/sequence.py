"""Ulysses: ranks share the tokens of a batch everywhere but in attention, where they share the heads.

Legend: T tokens of the whole batch, t of this rank, H heads, h heads of this rank in attention, d head size.

Tokens are cut wherever the shares come out even: no padding, and no heed of sequence boundaries, since attention sees
all tokens of its heads. Every rank of the group gives the same loss over all tokens, which counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from mvp_engine.errors import UserError


@dataclass(frozen=True)
class SequenceShard:
    """This rank's part of one batch's tokens."""

    group: dist.ProcessGroup
    rank: int
    sizes: tuple[int, ...]  # tokens of each rank

    @classmethod
    def of(cls, group: dist.ProcessGroup, tokens: int) -> SequenceShard:
        ranks = dist.get_world_size(group)
        if tokens < ranks:
            raise UserError(f"a batch of {tokens} token(s) cannot be shared by parallel.sequence={ranks} ranks")
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

    def to_heads(self, x_Htd: Tensor) -> Tensor:
        """All heads of this rank's tokens -> this rank's heads of all tokens, (h, T, d)."""
        return _swap(x_Htd, self.sizes, self.rank, True, self.group.group_name)

    def to_tokens(self, x_hTd: Tensor) -> Tensor:
        """The way back, (H, t, d)."""
        return _swap(x_hTd, self.sizes, self.rank, False, self.group.group_name)


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise UserError(
            f"parallel.sequence={ranks} cannot share {heads} query and {kv_heads} key/value heads: it must divide the "
            "first, and divide or be a multiple of the second"
        )


def _exchange(parts: list[Tensor], shapes: Sequence[tuple[int, ...]], group: dist.ProcessGroup) -> list[Tensor]:
    """Send part r to rank r; receive one of the given shape from each."""
    received = parts[0].new_empty(sum(_count(shape) for shape in shapes))
    sent = torch.cat([part.reshape(-1) for part in parts])
    counts = [_count(shape) for shape in shapes]
    dist.all_to_all_single(received, sent, counts, [part.numel() for part in parts], group=group)
    return [flat.view(shape) for flat, shape in zip(received.split(counts), shapes, strict=True)]


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


# Tokens for heads, or heads for tokens: each is the other's backward. An operator, so that torch.compile takes it as it
# is, whatever the sizes: under recomputation it cannot trace an autograd function that is handed sizes that change.
@torch.library.custom_op(
    "mvp::swap", mutates_args=(), schema="(Tensor x, SymInt[] sizes, int rank, bool to_heads, str group) -> Tensor"
)
def _swap(x, sizes, rank, to_heads, group):  # type: ignore[no-untyped-def]
    ranks = _resolve_process_group(group)
    if to_heads:
        mine = x.shape[0] // len(sizes)
        shapes = [(mine, size, x.shape[2]) for size in sizes]
        return torch.cat(_exchange(list(x.split(mine)), shapes, ranks), dim=1)
    shape = (x.shape[0], sizes[rank], x.shape[2])
    return torch.cat(_exchange(list(x.split(list(sizes), dim=1)), [shape] * len(sizes), ranks), dim=0)


@_swap.register_fake
def _(x, sizes, rank, to_heads, group):  # type: ignore[no-untyped-def]
    heads, _, size = x.shape
    if to_heads:
        return x.new_empty(heads // len(sizes), sum(sizes), size)
    return x.new_empty(heads * len(sizes), sizes[rank], size)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.how = inputs


def _swap_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    sizes, rank, to_heads, group = ctx.how
    return _swap(grad, sizes, rank, not to_heads, group), None, None, None, None


_swap.register_autograd(_swap_back, setup_context=_remember)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: SequenceShard) -> Tensor:
        ctx.shard = shard
        shapes = [(size, *x.shape[1:]) for size in shard.sizes]
        return torch.cat(_exchange([x.contiguous()] * len(shapes), shapes, shard.group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Every rank has the gradient of the same whole loss: its own part is all it needs.
        return ctx.shard.cut(grad).contiguous(), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: SequenceShard) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=shard.group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None  # as above
