"""Context parallel: ranks shard the queries of a batch, and gather the keys and values of all tokens.

Legend: T tokens of the whole batch, t of this context rank, k rows of keys that its queries need, K key/value heads, d
head size.

Context ranks are the outer group, Ulysses ranks the inner one: `zigzag` gives tokens to the context ranks, and the
Ulysses ranks of each share its tokens, and its heads in attention. Each chunk of queries attends to the tokens of its
sequence up to the end of the chunk, so any lengths will do, and there may be more ranks than heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from mvp_engine.distributed.ulysses import (
    UlyssesShard,
    all_to_all_rows,
    check_tokens,
    even_sizes,
)
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

    def shard(self, lengths: list[int], device: torch.device) -> UlyssesShard:
        """This rank's shard of a batch with sequences of these lengths."""
        if self.context is None:
            return UlyssesShard.of(self.all_ranks, sum(lengths))
        return ContextShard.of_lengths(self, self.context, lengths, device)


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys of a context rank's chunks of queries, one chunk after the other."""

    rows: Tensor  # (k,) rows of the keys that all context ranks send
    tokens: Tensor  # (k,) the same as tokens of the batch
    cu_seqlens: Tensor  # (chunks + 1,) int32: the offset of the keys of each chunk
    max_seqlen: int


@dataclass(frozen=True, eq=False)
class ContextShard(UlyssesShard):
    """This rank's shard of one batch's tokens; `group`, `rank` and `sizes` are of all ranks that share the batch."""

    own: Tensor  # (tokens of this rank,), as indices into the batch
    order: Tensor  # (T,) the tokens of rank 0, then those of rank 1, ...
    places: Tensor  # (T,) the place of each token in `order`
    ulysses: UlyssesShard | None  # of the tokens of this context rank
    context_group: dist.ProcessGroup
    context_rank: int
    context_sizes: tuple[int, ...]  # tokens of each context rank
    chunks: tuple[Chunk, ...]  # of this context rank
    queries: Tensor  # (t,) tokens of this context rank, as indices into the batch
    cu_queries: Tensor  # (chunks + 1,) int32: the offset of each chunk in `queries`
    max_queries: int
    keys: Keys  # of each sequence up to the end of the chunk: what causal attention needs

    @classmethod
    def of_lengths(
        cls,
        groups: SequenceGroups,
        context: dist.ProcessGroup,
        lengths: list[int],
        device: torch.device,
    ) -> ContextShard:
        ranks = dist.get_world_size(groups.all_ranks)
        check_tokens(sum(lengths), ranks, "parallel.context x parallel.ulysses")
        context_ranks = dist.get_world_size(context)
        inner = ranks // context_ranks
        of_ranks = zigzag(lengths, context_ranks, smallest=inner)
        context_sizes = tuple(sum(chunk.tokens for chunk in chunks) for chunks in of_ranks)
        sizes: tuple[int, ...] = ()
        for size in context_sizes:
            sizes += even_sizes(size, inner)
        order = torch.cat(
            [_range(chunk.begin, chunk.end) for chunks in of_ranks for chunk in chunks]
        )
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        rank = dist.get_rank(groups.all_ranks)
        context_rank = dist.get_rank(context)
        chunks = of_ranks[context_rank]
        ulysses = None
        if groups.ulysses is not None:
            inner_rank = dist.get_rank(groups.ulysses)
            inner_sizes = even_sizes(context_sizes[context_rank], inner)
            ulysses = UlyssesShard(groups.ulysses, inner_rank, inner_sizes)
        spans = [(chunk.first, chunk.end) for chunk in chunks]
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
            context_sizes=context_sizes,
            chunks=tuple(chunks),
            queries=to_device(order.split(list(context_sizes))[context_rank], device),
            cu_queries=offsets_of(query_counts, device),
            max_queries=max(query_counts),
            keys=keys_of(spans, places, device),
        )

    @property
    def heads(self) -> UlyssesShard | None:
        return self.ulysses

    @property
    def context(self) -> ContextShard:
        return self

    @cached_property
    def all_keys(self) -> Keys:
        """Keys of the whole sequence of each chunk, for attention that is not causal. Reads the host: not traced."""
        spans = [(chunk.first, chunk.last) for chunk in self.chunks]
        return keys_of(spans, self.places.cpu(), self.places.device)

    def cut(self, value: Tensor, dim: int = 0) -> Tensor:
        return value.index_select(dim, self.own)

    def in_rank_order(self, value: Tensor) -> Tensor:
        return value.index_select(0, self.order)

    def in_batch_order(self, value: Tensor) -> Tensor:
        return value.index_select(0, self.places)

    def gather_keys(self, keys: Keys, k_Ktd: Tensor, v_Ktd: Tensor) -> list[Tensor]:
        """All-gather of keys and values, in the order of `keys`: (K, t, d) -> (K, k, d).

        The gradient is a reduce-scatter. The rows of a sequence with two chunks on this rank come twice.
        """
        own = [k_Ktd.transpose(0, 1), v_Ktd.transpose(0, 1)]
        gathered = all_to_all_rows(own, self.context_sizes, self.context_group)
        return [value_TKd.index_select(0, keys.rows).transpose(0, 1) for value_TKd in gathered]


def keys_of(spans: list[tuple[int, int]], places: Tensor, device: torch.device) -> Keys:
    tokens = torch.cat([_range(begin, end) for begin, end in spans])
    counts = [end - begin for begin, end in spans]
    return Keys(
        to_device(places[tokens], device),
        to_device(tokens, device),
        offsets_of(counts, device),
        max(counts),
    )


def _range(begin: int, end: int) -> Tensor:
    return torch.arange(begin, end)


def offsets_of(counts: Iterable[int], device: torch.device) -> Tensor:
    ends = list(accumulate(counts, initial=0))
    return to_device(torch.tensor(ends, dtype=torch.int32), device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device without a host sync."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
