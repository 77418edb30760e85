"""From what rows cost: which rows go into which pack of which step.

The plan of an epoch follows from (seed, epoch), the costs and two sizes, never from the number of ranks. So each rank
makes the same one and takes its stride, and a cursor into it is right on any number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

WINDOW = 1024  # packs that are filled together: enough for hardly a gap, few enough that neighbours differ by epoch
PATCH = 1024  # numbers that an encoder reads, for about the work of one token
CHOICE = 8  # rows with media, and as many without, that are considered for a place in a pack
MIXED = 0.9  # of a pack, which rows take in their order, whatever their size
HEAVY = 0.5  # of the encoder work that a pack still needs: more in one row is left to the choice by work
GAP = 0.02  # of a pack, below which it matters only that it is filled

Pool = tuple[list[tuple[int, int]], list[float]]


@dataclass(frozen=True)
class Plan:
    """An epoch: pack i is `rows[ends[i - 1] : ends[i]]`, pairs (source, row)."""

    rows: np.ndarray
    ends: np.ndarray
    tokens: np.ndarray  # of each row, as planned
    budget: int
    packs_per_step: int

    def __len__(self) -> int:
        return len(self.ends)

    def pack(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Its rows, and their tokens."""
        part = slice(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))
        return self.rows[part], self.tokens[part]

    @property
    def steps(self) -> int:
        return -(-len(self) // self.packs_per_step)

    @property
    def fill(self) -> float:
        """The share of all packs' budgets that holds tokens."""
        return int(self.tokens.sum()) / max(1, len(self) * self.budget)

    @cached_property
    def digest(self) -> str:
        sizes = np.array([self.budget, self.packs_per_step])
        parts = [
            np.ascontiguousarray(part, np.int64).tobytes()
            for part in (sizes, self.ends, self.rows, self.tokens)
        ]
        return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def make_plan(
    order: np.ndarray,
    tokens: np.ndarray,
    encoder: np.ndarray,
    *,
    budget: int,
    packs_per_step: int,
    shuffle: np.random.Generator | None = None,
) -> Plan:
    """Packs of an epoch's rows (`order`, pairs; their costs beside it), in steps of packs with about equal work.

    Inside a step the packs are sorted by work, so that those which ranks take side by side are the most alike.
    """
    packs = make_packs(tokens, encoder, budget)
    if shuffle is not None:
        packs = [packs[i] for i in shuffle.permutation(len(packs))]
    work = tokens + encoder // PATCH
    works = [int(work[pack].sum()) for pack in packs]
    steps = (
        range(i, min(i + packs_per_step, len(packs))) for i in range(0, len(packs), packs_per_step)
    )
    packs = [packs[i] for step in steps for i in sorted(step, key=lambda i: -works[i])]
    flat = np.array([row for pack in packs for row in pack], np.int64)
    ends = np.cumsum([len(pack) for pack in packs], dtype=np.int64)
    return Plan(order[flat].astype(np.int64), ends, tokens[flat], budget, packs_per_step)


def make_packs(
    tokens: np.ndarray, encoder: np.ndarray, budget: int, window: int = WINDOW
) -> list[list[int]]:
    """Indices in packs of at most `budget` tokens and about equal encoder work, among rows that follow one another."""
    if len(tokens) and not 0 < int(tokens.min()) <= int(tokens.max()) <= budget:
        raise ValueError(
            f"rows of {tokens.min()} to {tokens.max()} tokens do not fit packs of {budget}"
        )
    groups = (np.cumsum(tokens) - 1) // (window * budget)
    borders = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(tokens)]
    parts = [slice(start, end) for start, end in pairwise(borders)]
    return [
        [part.start + i for i in pack]
        for part in parts
        for pack in _fit(tokens[part].tolist(), encoder[part].tolist(), budget)
    ]


def _fit(tokens: list[int], encoder: list[int], budget: int) -> list[list[int]]:
    """One pack after the other. Each begins with rows in their order, and goes on with the largest that fit.

    The first mix: rows of one size are often of one kind, and packed by size alone they would meet in the same steps.
    The others fill the pack: of the few largest that fit it takes the one whose encoder work for its size is nearest to
    what the pack still needs for its share. The last gap is closed by size alone.
    """
    pools = []  # rows with media, and without: sizes and indices; encoder work for each token; from small to large
    for has in (True, False):
        rows = sorted((tokens[i], i) for i, work in enumerate(encoder) if (work > 0) == has)
        pools.append((rows, [encoder[i] / size for size, i in rows]))
    left, work, packs, taken, first = (
        sum(tokens),
        sum(encoder),
        list[list[int]](),
        bytearray(len(tokens)),
        0,
    )
    while left:
        room, need, pack = budget, work * budget / left, list[int]()
        while room:
            first = taken.find(0, first)
            if (
                first >= 0
                and tokens[first] <= room - (1 - MIXED) * budget
                and encoder[first] <= HEAVY * need
            ):
                best = pools[0 if encoder[first] else 1]
                at = bisect_left(best[0], (tokens[first], first))
            else:
                found = _largest(
                    pools, room, need, by_size=not pack or not need or room < GAP * budget
                )
                if found is None:
                    break
                best, at = found
            size, row = best[0].pop(at)
            best[1].pop(at)
            taken[row] = 1
            pack.append(row)
            room, need, left, work = (
                room - size,
                need - encoder[row],
                left - size,
                work - encoder[row],
            )
        packs.append(sorted(pack))
    return packs


def _largest(pools: list[Pool], room: int, need: float, by_size: bool) -> tuple[Pool, int] | None:
    """Of the largest rows that fit the one that brings the pack nearest to its share, or just the largest."""
    best, least, largest = None, math.inf, 0
    for pool in pools:
        rows, density = pool
        end = bisect_left(rows, (room + 1, -1))
        for k in range(max(0, end - (1 if by_size else CHOICE)), end):
            miss = 0.0 if by_size else abs(density[k] - need / room)
            if miss < least or (miss == least and rows[k][0] > largest):
                best, least, largest = (pool, k), miss, rows[k][0]
    return best
