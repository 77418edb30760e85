"""Zigzag: which tokens of a pack each context rank holds, so that all have as many tokens and attend to as many pairs.

A causal query attends to all tokens before it, so the end of a sequence costs more than its begin. A long sequence is
cut into two chunks for each rank, an early and a late one; a short sequence stays whole on one rank. All of it is host
work on the lengths of the sequences: every rank computes the same result.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import NamedTuple

# A sequence is cut if it has more than this part of a rank's tokens or pairs: whole ones then fill ranks evenly.
_WHOLE = 1 / 32


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
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    sequences = [Chunk(first, last, first, last) for first, last in pairwise(ends)]
    most_tokens = _WHOLE * ends[-1] / ranks
    most_pairs = _WHOLE * sum(sequence.pairs for sequence in sequences) / ranks
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
        for rank, share in zip(sorted(range(ranks), key=lambda r: pairs[r]), shares, strict=True):
            give(rank, share)
    # Longest first, each to the rank with the fewest tokens: neighbours in length go to different ranks.
    queue = [(tokens[rank], pairs[rank], rank) for rank in range(ranks)]
    heapq.heapify(queue)
    for sequence in sorted(whole, key=lambda chunk: -chunk.tokens):
        rank = queue[0][2]
        give(rank, [sequence])
        heapq.heapreplace(queue, (tokens[rank], pairs[rank], rank))
    if min(tokens) < smallest:
        return _slices(sequences, ranks)
    return [sorted(chunks) for chunks in of_ranks]


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
