"""Zigzag: which tokens of a pack each context rank holds, so that all have as many tokens and attend to as many pairs.

A causal query attends to all tokens before it, so the end of a sequence costs more than its begin. A long sequence is
cut into two chunks for each rank, an early and a late one; other sequences stay whole on one rank, which is faster and
needs no keys of other ranks. As few are cut as balance allows. All of it is host work on the lengths of the sequences:
every rank computes the same result.
"""

from __future__ import annotations

import heapq
from itertools import accumulate, pairwise
from typing import NamedTuple

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
