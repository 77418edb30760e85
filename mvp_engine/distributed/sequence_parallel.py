"""Ulysses sequence parallel: ranks shard the tokens of a batch, except in attention, where they shard the heads.

Legend: T tokens of the whole batch, t of this rank, H heads, h heads of this rank in attention, d head size.

Tokens are sharded evenly, without padding and without regard to sequence boundaries, since attention sees all tokens
of its heads. Every rank of the group computes the same loss over all tokens, which counts once.

Zigzag: which tokens of a pack each context rank holds, so that all have as many tokens and attend to as many pairs.

A causal query attends to all tokens before it, so the end of a sequence costs more than its begin. A long sequence is
cut into two chunks for each rank, an early and a late one; other sequences stay whole on one rank, which is faster and
needs no keys of other ranks. As few are cut as balance allows. All of it is host work on the lengths of the sequences:
every rank computes the same result.

KeyExchange: the rows of keys and values that context ranks send each other, those that the receiver's queries need.

Legend: t tokens of this context rank, k rows of keys that its queries need, K key/value heads, d head size.

A chunk of queries needs the tokens of its sequence up to its own end, with a sliding window those of the window, and
without causality the whole sequence. So nothing travels for a sequence that is whole on one rank, and little for layers
with windows. Every rank computes the plan of all from the chunks, on the host.

Context parallel: ranks shard the queries of a batch, and gather the keys and values that these attend to.

Legend: T tokens of the whole batch, t of this context rank.

Context ranks are the outer group, Ulysses ranks the inner one: `zigzag` gives tokens to the context ranks, and the
Ulysses ranks of each share its tokens, and its heads in attention. Each chunk of queries attends to the tokens of its
sequence up to the end of the chunk (`KeyExchange`), so any lengths will do, and there may be more ranks than heads.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from mvp_engine.errors import UserError, count

# A sequence is cut if it has more than this part of a rank's tokens or pairs: the first that balances is taken.
_WHOLE = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
_BALANCED = 1.02  # the largest over the mean, of tokens and of pairs


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence; all four are indices into the tokens of the pack."""

    begin: int
    end: int
    first: int  # of the sequence
    last: int  # one past the end of the sequence

    @property
    def tokens(self) -> int:
        return self.end - self.begin

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that causal attention computes."""
        return _pairs(self.end - self.first) - _pairs(self.begin - self.first)


def zigzag(lengths: list[int], ranks: int, smallest: int = 1) -> list[list[Chunk]]:
    """The chunks of each rank, in the order of the pack. Every rank gets at least `smallest` tokens.

    A rank has at most two chunks of a sequence. The pack must have `ranks * smallest` tokens.
    """
    ends = accumulate(lengths, initial=0)
    sequences = [Chunk(first, last, first, last) for first, last in pairwise(ends)]
    best: list[list[Chunk]] = []
    lowest = float("inf")
    for part in _WHOLE:
        of_ranks = _cut(sequences, ranks, part)
        if min(sum(chunk.tokens for chunk in chunks) for chunks in of_ranks) < smallest:
            continue
        found = imbalance(of_ranks)
        if found < lowest:
            lowest = found
            best = of_ranks
        if found <= _BALANCED:
            break
    return [sorted(chunks) for chunks in best] or _slices(sequences, ranks)


def imbalance(of_ranks: list[list[Chunk]]) -> float:
    """The largest share over the mean, of tokens or of pairs, whichever is worse."""
    worst = 1.0
    for sizes in (
        [sum(chunk.tokens for chunk in chunks) for chunks in of_ranks],
        [sum(chunk.pairs for chunk in chunks) for chunks in of_ranks],
    ):
        worst = max(worst, max(sizes) * len(sizes) / sum(sizes))
    return worst


def _cut(sequences: list[Chunk], ranks: int, part: float) -> list[list[Chunk]]:
    """The chunks of each rank if sequences with more than this part of a rank's work are cut."""
    most_tokens = part * sum(sequence.tokens for sequence in sequences) / ranks
    most_pairs = part * sum(sequence.pairs for sequence in sequences) / ranks
    of_ranks: list[list[Chunk]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    pairs = [0] * ranks

    def give(rank: int, chunks: list[Chunk]) -> None:
        of_ranks[rank] += chunks
        tokens[rank] += sum(chunk.tokens for chunk in chunks)
        pairs[rank] += sum(chunk.pairs for chunk in chunks)

    whole = []
    for sequence in sequences:
        if sequence.tokens <= most_tokens and sequence.pairs <= most_pairs:
            whole.append(sequence)
            continue
        # Shares differ by the rounding of their sizes: the largest goes to the rank with the fewest pairs.
        shares = sorted(_shares(sequence, ranks), key=lambda share: -sum(c.pairs for c in share))
        emptiest = sorted(range(ranks), key=lambda rank: pairs[rank])
        for rank, share in zip(emptiest, shares, strict=True):
            give(rank, share)
    # Longest first, each to the rank with the fewest tokens: neighbours in length go to different ranks.
    queue = [(tokens[rank], pairs[rank], rank) for rank in range(ranks)]
    heapq.heapify(queue)
    for sequence in sorted(whole, key=lambda chunk: -chunk.tokens):
        rank = queue[0][2]
        give(rank, [sequence])
        heapq.heapreplace(queue, (tokens[rank], pairs[rank], rank))
    return of_ranks


def _pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def _shares(sequence: Chunk, ranks: int) -> list[list[Chunk]]:
    """An early and a late chunk of the sequence for each rank; one chunk where both are neighbours."""
    length = sequence.tokens
    pieces = 2 * ranks
    cuts = [sequence.first + (length * piece + ranks) // pieces for piece in range(pieces + 1)]
    shares = []
    for early in range(ranks):
        late = pieces - 1 - early
        spans = [(cuts[early], cuts[early + 1]), (cuts[late], cuts[late + 1])]
        if spans[0][1] == spans[1][0]:
            spans = [(spans[0][0], spans[1][1])]
        shares.append([sequence._replace(begin=b, end=e) for b, e in spans if e > b])
    return shares


def _slices(sequences: list[Chunk], ranks: int) -> list[list[Chunk]]:
    """Equal slices of the pack, for packs of so few tokens that a rank would get none."""
    total = sequences[-1].last
    slices = []
    for rank in range(ranks):
        begin = total * rank // ranks
        end = total * (rank + 1) // ranks
        parts = [s._replace(begin=max(begin, s.first), end=min(end, s.last)) for s in sequences]
        slices.append([part for part in parts if part.tokens > 0])
    return slices


Span = tuple[int, int]  # begin and end, as tokens of the batch


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys of a context rank's chunks of queries, one chunk after the other."""

    rows: Tensor  # (k,) rows among those that this rank receives
    tokens: Tensor  # (k,) the same as tokens of the batch
    cu_seqlens: Tensor  # (chunks + 1,) int32: the offset of the keys of each chunk
    max_seqlen: int
    copies: int  # how often a row is there at most: chunks of one sequence share keys
    places: Tensor  # (k,) the rows in a (copies, rows received) tensor

    @classmethod
    def of(
        cls, spans: list[Span], row_of_token: Tensor, received: int, device: torch.device
    ) -> Keys:
        """`spans`: the keys of each chunk; `row_of_token`: the row of each token among those that arrive."""
        tokens = ranges_of(spans)
        counts = [end - begin for begin, end in spans]
        rows = row_of_token[tokens]
        seen = torch.zeros_like(row_of_token)
        earlier = []
        for begin, end in spans:
            earlier.append(seen[begin:end].clone())
            seen[begin:end] += 1
        places = torch.cat(earlier) * received + rows
        return cls(
            rows=to_device(rows, device),
            tokens=to_device(tokens, device),
            cu_seqlens=offsets_of(counts, device),
            max_seqlen=max(counts),
            copies=int(seen.max()),
            places=to_device(places, device),
        )

    def select(self, received: Tensor) -> Tensor:
        """The rows of the chunks' keys, from those received."""
        return _SelectRows.apply(received, self.rows, self.places, self.copies)


@dataclass(frozen=True, eq=False)
class KeyExchange:
    """One way to exchange keys: by full attention, or by a window."""

    keys: Keys
    sent: tuple[int, ...]  # rows to each context rank
    received: tuple[int, ...]  # rows from each
    sent_rows: Tensor  # own rows, those for rank 0 first
    # The same in a (context ranks, t) tensor. A row goes to several ranks, so its gradient is a sum over them.
    sent_places: Tensor
    is_own: bool  # the keys of this rank's chunks are its own tokens: whole sequences
    is_local: bool  # that is so on all ranks: nothing travels

    @classmethod
    def of(
        cls,
        of_ranks: Sequence[Sequence[Chunk]],
        rank: int,
        keys_of_chunk: Callable[[Chunk], Span],
        device: torch.device,
    ) -> KeyExchange:
        """`of_ranks`: the chunks of each context rank; `keys_of_chunk`: what the queries of a chunk attend to."""
        needed = [_by_sequence(map(keys_of_chunk, chunks), chunks) for chunks in of_ranks]
        own = of_ranks[rank]
        own_tokens = sum(chunk.tokens for chunk in own)
        sent_rows = []
        for of_rank in needed:
            sent_rows.append(ranges_of([rows for _, rows in _overlaps(own, of_rank)]))
        received = []
        for chunks in of_ranks:
            received.append(ranges_of([span for span, _ in _overlaps(chunks, needed[rank])]))
        arrived = torch.cat(received)
        total = sum(chunk.tokens for chunks in of_ranks for chunk in chunks)
        row_of_token = torch.zeros(total, dtype=torch.long)
        row_of_token[arrived] = torch.arange(len(arrived))
        own_keys = [
            all(keys_of_chunk(c) == (c.begin, c.end) for c in chunks) for chunks in of_ranks
        ]
        sent_places = [rows + to * own_tokens for to, rows in enumerate(sent_rows)]
        return cls(
            keys=Keys.of(
                [keys_of_chunk(chunk) for chunk in own], row_of_token, len(arrived), device
            ),
            sent=tuple(map(len, sent_rows)),
            received=tuple(map(len, received)),
            sent_rows=to_device(torch.cat(sent_rows), device),
            sent_places=to_device(torch.cat(sent_places), device),
            is_own=own_keys[rank],
            is_local=all(own_keys),
        )

    def run(self, k_Ktd: Tensor, v_Ktd: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        """Keys and values of this rank's queries: (K, t, d) -> (K, k, d), with gradients, in one all-to-all.

        The rows of a sequence with two chunks on this rank come twice.
        """
        if self.is_local:
            return [k_Ktd, v_Ktd]
        tensors = [x.transpose(0, 1).flatten(1) for x in (k_Ktd, v_Ktd)]
        own = torch.cat(tensors, dim=1)
        to_ranks = _SelectRows.apply(own, self.sent_rows, self.sent_places, len(self.sent))
        row_size = own.shape[1]
        received, sent = [[n * row_size for n in rows] for rows in (self.received, self.sent)]
        arrived = all_to_all_single(to_ranks.reshape(-1), received, sent, group).view(-1, row_size)
        found = []
        widths = [tensor.shape[1] for tensor in tensors]
        for part, like in zip(arrived.split(widths, dim=1), (k_Ktd, v_Ktd), strict=True):
            found.append(
                self.keys.select(part).view(-1, like.shape[0], like.shape[2]).transpose(0, 1)
            )
        return found


def causal_keys(window: int | None) -> Callable[[Chunk], Span]:
    """The keys of a chunk in causal attention, with a sliding window or without."""

    def keys_of_chunk(chunk: Chunk) -> Span:
        first = chunk.first if window is None else max(chunk.first, chunk.begin - window + 1)
        return first, chunk.end

    return keys_of_chunk


def whole_sequence(chunk: Chunk) -> Span:
    """The keys of a chunk in attention that is not causal."""
    return chunk.first, chunk.last


class _SelectRows(torch.autograd.Function):
    """`x.index_select(0, rows)`. Rows that are selected several times get a sum that is rounded once.

    The gradient of index_select would add them with atomics: slowly (twice the time of a rank's whole attention in
    bf16), and in half precision it is rounded at each, in any order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = (copies, *x.shape)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        copies, rows, *size = ctx.shape
        by_copy = grad.new_zeros(copies * rows, *size).index_copy(0, places, grad)
        return by_copy.view(ctx.shape).sum(0), None, None, None


def _by_sequence(spans: Iterable[Span], chunks: Sequence[Chunk]) -> dict[int, list[Span]]:
    """The tokens that chunks need, as spans that do not overlap, by the first token of their sequence."""
    found: dict[int, list[Span]] = {}
    for chunk, span in sorted(zip(chunks, spans, strict=True), key=lambda pair: pair[1]):
        merged = found.setdefault(chunk.first, [])
        if merged and span[0] <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span[1]))
        else:
            merged.append(span)
    return found


def _overlaps(chunks: Sequence[Chunk], needed: dict[int, list[Span]]) -> list[tuple[Span, Span]]:
    """The parts of chunks that are needed, in the order of the chunks: as tokens, and as rows of these chunks."""
    found = []
    offset = 0
    for chunk in chunks:
        shift = offset - chunk.begin
        for begin, end in needed.get(chunk.first, ()):
            first = max(begin, chunk.begin)
            last = min(end, chunk.end)
            if first < last:
                found.append(((first, last), (first + shift, last + shift)))
        offset += chunk.tokens
    return found


def ranges_of(spans: list[Span]) -> Tensor:
    """All integers of the spans, one span after the other."""
    begins = torch.tensor([begin for begin, _ in spans], dtype=torch.long)
    counts = torch.tensor([end - begin for begin, end in spans], dtype=torch.long)
    offsets = counts.cumsum(0) - counts
    return torch.arange(int(counts.sum())) + (begins - offsets).repeat_interleave(counts)


def offsets_of(counts: Iterable[int], device: torch.device) -> Tensor:
    ends = list(accumulate(counts, initial=0))
    return to_device(torch.tensor(ends, dtype=torch.int32), device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device without a host sync."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


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


Shapes = list[tuple[int, ...]]
