"""KeyExchange: the rows of keys and values that context ranks send each other, those that the receiver's queries need.

Legend: t tokens of this context rank, k rows of keys that its queries need, K key/value heads, d head size.

A chunk of queries needs the tokens of its sequence up to its own end, with a sliding window those of the window, and
without causality the whole sequence. So nothing travels for a sequence that is whole on one rank, and little for layers
with windows. Every rank computes the plan of all from the chunks, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mvp_engine.distributed.ulysses import all_to_all_single
from mvp_engine.distributed.zigzag import Chunk

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
