"""Ulysses sequence parallel: ranks shard the tokens of a batch, except in attention, where they shard the heads.

Legend: T tokens of the whole batch, t of this rank, H heads, h heads of this rank in attention, d head size.

Tokens are sharded evenly, without padding and without regard to sequence boundaries, since attention sees all tokens
of its heads. Every rank of the group computes the same loss over all tokens, which counts once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from mvp_engine.errors import UserError, count

if TYPE_CHECKING:
    from mvp_engine.distributed.context import ContextShard

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class UlyssesShard:
    """This rank's shard of one batch's tokens."""

    group: dist.ProcessGroup
    rank: int
    sizes: tuple[int, ...]  # tokens of each rank

    @classmethod
    def of(cls, group: dist.ProcessGroup, tokens: int) -> UlyssesShard:
        ranks = dist.get_world_size(group)
        check_tokens(tokens, ranks, "parallel.ulysses")
        return cls(group, dist.get_rank(group), even_sizes(tokens, ranks))

    @property
    def heads(self) -> UlyssesShard | None:
        """The shard whose ranks share the heads in attention."""
        return self

    @property
    def context(self) -> ContextShard | None:
        """The shard whose ranks gather keys and values in attention."""
        return None

    def cut(self, value: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of a tensor over all tokens."""
        return value.split(list(self.sizes), dim)[self.rank]

    def in_rank_order(self, value: Tensor) -> Tensor:
        """A tensor over all tokens, in batch order -> the tokens of rank 0, those of rank 1, ..."""
        return value

    def in_batch_order(self, value: Tensor) -> Tensor:
        """The inverse of `in_rank_order`."""
        return value

    def gather(self, value_t: Tensor) -> Tensor:
        """All-gather along dimension 0, with gradients."""
        return _Gather.apply(value_t, self)

    def gather_shared(self, value_t: Tensor) -> Tensor:
        """All-gather along dimension 0. The gradient is a reduce-scatter: ranks use the result differently."""
        return _GatherShared.apply(value_t, self)

    def total(self, value: Tensor) -> Tensor:
        """All-reduce (sum), with gradients."""
        return _Total.apply(value, self)

    def to_heads(self, *tensors_Htd: Tensor) -> list[Tensor]:
        """All-to-all: all heads of this rank's tokens, (H, t, d) -> this rank's heads of all tokens, (h, T, d).

        Several tensors go in one all-to-all: compiled blocks on different ranks could order several differently.
        """
        ranks = len(self.sizes)
        chunks = [tensor.chunk(ranks) for tensor in tensors_Htd]  # by tensor, then rank
        to_ranks = [[chunk[rank] for chunk in chunks] for rank in range(ranks)]
        own = [(len(chunk[0]), chunk[0].shape[-1]) for chunk in chunks]  # heads, head size
        shapes: list[Shapes] = []
        for size in self.sizes:
            shapes.append([(heads, size, head_dim) for heads, head_dim in own])
        from_ranks = _all_to_all(to_ranks, shapes, self.group)
        return [torch.cat(parts, dim=1) for parts in zip(*from_ranks, strict=True)]

    def to_tokens(self, x_hTd: Tensor) -> Tensor:
        """All-to-all back: this rank's heads of all tokens, (h, T, d) -> all heads of its tokens, (H, t, d)."""
        shape = (len(x_hTd), self.sizes[self.rank], x_hTd.shape[-1])
        to_ranks = [[part] for part in x_hTd.split(list(self.sizes), dim=1)]
        from_ranks = _all_to_all(to_ranks, [[shape]] * len(to_ranks), self.group)
        return torch.cat([parts[0] for parts in from_ranks])


def even_sizes(tokens: int, ranks: int) -> tuple[int, ...]:
    cuts = [tokens * rank // ranks for rank in range(ranks + 1)]
    return tuple(end - begin for begin, end in pairwise(cuts))


def check_tokens(tokens: int, ranks: int, keys: str) -> None:
    if tokens < ranks:
        raise UserError(
            f"a batch of {count(tokens, 'token')} cannot be sharded over {keys} = {ranks} ranks"
        )


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise UserError(
            f"parallel.ulysses={ranks} cannot share {heads} query and {kv_heads} key/value heads: it must divide the "
            "first, and divide or be a multiple of the second"
        )


def _all_to_all(
    to_ranks: list[list[Tensor]], shapes: list[Shapes], group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """Send some tensors to each rank, receive tensors of the given shapes from each; with gradients.

    It is torch's functional operator: compilers never reorder two of them, and repeat one only under activation
    checkpointing, on all ranks alike. Otherwise ranks would wait for each other, or receive data meant for another.
    """
    sent_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in to_ranks]
    flat = torch.cat([tensor.reshape(-1) for tensors in to_ranks for tensor in tensors])
    return _receive(flat, sent_sizes, shapes, group)


def _receive(
    flat: Tensor, sent_sizes: list[int], shapes: list[Shapes], group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """Send slices of `flat` of these sizes to the ranks, receive tensors of the given shapes from each."""
    sizes = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
    received = all_to_all_single(flat, [sum(of_rank) for of_rank in sizes], sent_sizes, group)
    slices = iter(received.split([size for of_rank in sizes for size in of_rank]))
    return [[next(slices).view(shape) for shape in of_rank] for of_rank in shapes]


def all_to_all_single(
    sent: Tensor, received_sizes: list[int], sent_sizes: list[int], group: dist.ProcessGroup
) -> Tensor:
    operator = torch.ops._c10d_functional.all_to_all_single
    return functional.wait_tensor(operator(sent, received_sizes, sent_sizes, group.group_name))


def all_to_all_rows(
    tensors: list[Tensor], sizes: tuple[int, ...], group: dist.ProcessGroup
) -> list[Tensor]:
    """All-gather of several tensors along dimension 0, in one all-to-all; their gradients are reduce-scattered.

    `sizes` are the rows of each rank.
    """
    ranks = len(sizes)
    own = torch.cat([tensor.reshape(-1) for tensor in tensors])
    # expand, not repeat: its gradient is one sum over all ranks, which is rounded once.
    flat = own.expand(ranks, -1).reshape(-1)
    shapes: list[Shapes] = []
    for size in sizes:
        shapes.append([(size, *tensor.shape[1:]) for tensor in tensors])
    from_ranks = _receive(flat, [len(own)] * ranks, shapes, group)
    return [torch.cat(parts) for parts in zip(*from_ranks, strict=True)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: UlyssesShard) -> Tensor:
        ctx.shard = shard
        shapes: list[Shapes] = [[(size, *x.shape[1:])] for size in shard.sizes]
        from_ranks = _all_to_all([[x]] * len(shapes), shapes, shard.group)
        return shard.in_batch_order(torch.cat([parts[0] for parts in from_ranks]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Every rank has the gradient of the same loss over all tokens: its own slice is all it needs.
        return ctx.shard.cut(grad).contiguous(), None


class _GatherShared(_Gather):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shard = ctx.shard
        to_ranks = [[part] for part in shard.in_rank_order(grad).split(list(shard.sizes))]
        shape = (shard.sizes[shard.rank], *grad.shape[1:])
        from_ranks = _all_to_all(to_ranks, [[shape]] * len(shard.sizes), shard.group)
        return torch.stack([parts[0] for parts in from_ranks]).sum(0), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: UlyssesShard) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=shard.group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None  # as above
