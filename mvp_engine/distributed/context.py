"""Context parallel: ranks shard the queries of a batch, and gather the keys and values that these attend to.

Legend: T tokens of the whole batch, t of this context rank.

Context ranks are the outer group, Ulysses ranks the inner one: `zigzag` gives tokens to the context ranks, and the
Ulysses ranks of each share its tokens, and its heads in attention. Each chunk of queries attends to the tokens of its
sequence up to the end of the chunk (`key_exchange.py`), so any lengths will do, and there may be more ranks than heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from mvp_engine.distributed.key_exchange import (
    KeyExchange,
    causal_keys,
    offsets_of,
    ranges_of,
    to_device,
    whole_sequence,
)
from mvp_engine.distributed.ulysses import UlyssesShard, check_tokens, even_sizes
from mvp_engine.distributed.zigzag import Chunk, zigzag


@dataclass(frozen=True)
class SequenceGroups:
    """The process groups of the ranks that share the tokens of a batch."""

    all_ranks: dist.ProcessGroup  # those of both kinds
    ulysses: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None

    @property
    def keys(self) -> str:
        """The config keys that are above 1."""
        sizes = {"parallel.context": self.context, "parallel.ulysses": self.ulysses}
        return " and ".join(name for name, group in sizes.items() if group is not None)

    def shard(
        self, lengths: list[int], device: torch.device, windows: Iterable[int] = ()
    ) -> UlyssesShard:
        """This rank's shard of a batch with sequences of these lengths, for layers with these sliding windows."""
        if self.context is None:
            return UlyssesShard.of(self.all_ranks, sum(lengths))
        return ContextShard.of_lengths(self, self.context, lengths, device, windows)


@dataclass(frozen=True, eq=False)
class ContextShard(UlyssesShard):
    """This rank's shard of one batch's tokens; `group`, `rank` and `sizes` are of all ranks that share the batch."""

    own: Tensor  # (tokens of this rank,), as indices into the batch
    order: Tensor  # (T,) the tokens of rank 0, then those of rank 1, ...
    places: Tensor  # (T,) the place of each token in `order`
    ulysses: UlyssesShard | None  # of the tokens of this context rank
    context_group: dist.ProcessGroup
    context_rank: int
    chunks: tuple[tuple[Chunk, ...], ...]  # of each context rank
    queries: Tensor  # (t,) tokens of this context rank, as indices into the batch
    cu_queries: Tensor  # (chunks + 1,) int32: the offset of each chunk in `queries`
    max_queries: int
    of_windows: dict[int | None, KeyExchange]  # None: without a window

    @classmethod
    def of_lengths(
        cls,
        groups: SequenceGroups,
        context: dist.ProcessGroup,
        lengths: list[int],
        device: torch.device,
        windows: Iterable[int] = (),
    ) -> ContextShard:
        """`windows`: of the model's layers. They are exact without, and then gather more than they need."""
        ranks = dist.get_world_size(groups.all_ranks)
        check_tokens(sum(lengths), ranks, "parallel.context x parallel.ulysses")
        context_ranks = dist.get_world_size(context)
        inner = ranks // context_ranks
        of_ranks = zigzag(lengths, context_ranks, smallest=inner)
        context_sizes = tuple(sum(chunk.tokens for chunk in chunks) for chunks in of_ranks)
        sizes: tuple[int, ...] = ()
        for size in context_sizes:
            sizes += even_sizes(size, inner)
        order = ranges_of([(chunk.begin, chunk.end) for chunks in of_ranks for chunk in chunks])
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        rank = dist.get_rank(groups.all_ranks)
        context_rank = dist.get_rank(context)
        chunks = of_ranks[context_rank]
        ulysses = None
        if groups.ulysses is not None:
            ulysses = UlyssesShard.of(groups.ulysses, context_sizes[context_rank])
        useful = [window for window in windows if window < max(lengths)]
        exchanges = {
            window: KeyExchange.of(of_ranks, context_rank, causal_keys(window), device)
            for window in (None, *useful)
        }
        query_counts = [chunk.tokens for chunk in chunks]
        return cls(
            group=groups.all_ranks,
            rank=rank,
            sizes=sizes,
            own=to_device(order.split(list(sizes))[rank], device),
            order=to_device(order, device),
            places=to_device(places, device),
            ulysses=ulysses,
            context_group=context,
            context_rank=context_rank,
            chunks=tuple(map(tuple, of_ranks)),
            queries=to_device(order.split(list(context_sizes))[context_rank], device),
            cu_queries=offsets_of(query_counts, device),
            max_queries=max(query_counts),
            of_windows=exchanges,
        )

    @property
    def heads(self) -> UlyssesShard | None:
        return self.ulysses

    @property
    def context(self) -> ContextShard:
        return self

    def keys(self, window: int | None) -> KeyExchange:
        """What causal attention needs, with a sliding window or without; any window may get all that is without."""
        return self.of_windows.get(window, self.of_windows[None])

    @cached_property
    def all_keys(self) -> KeyExchange:
        """The whole sequence of each chunk, for attention that is not causal. Made of host values: not traced."""
        return KeyExchange.of(self.chunks, self.context_rank, whole_sequence, self.own.device)

    def cut(self, value: Tensor, dim: int = 0) -> Tensor:
        return value.index_select(dim, self.own)

    def in_rank_order(self, value: Tensor) -> Tensor:
        return value.index_select(0, self.order)

    def in_batch_order(self, value: Tensor) -> Tensor:
        return value.index_select(0, self.places)
