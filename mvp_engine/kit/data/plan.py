"""From what rows cost: which rows go into which pack of which step.

The plan of an epoch follows from (seed, epoch), the costs and two sizes, never from the number of ranks. So each rank
makes the same one and takes its stride, and a cursor into it is right on any number of ranks.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

WINDOW = 1024  # packs that are filled together: enough for hardly a gap, few enough that neighbours differ by epoch
PATCH = 1024  # numbers that an encoder reads, for about the work of one token


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
        parts = [np.ascontiguousarray(part, np.int64).tobytes() for part in (sizes, self.ends, self.rows, self.tokens)]
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
    packs = make_packs(tokens, budget)
    if shuffle is not None:
        packs = [packs[i] for i in shuffle.permutation(len(packs))]
    work = tokens + encoder // PATCH
    works = [int(work[pack].sum()) for pack in packs]
    steps = (range(i, min(i + packs_per_step, len(packs))) for i in range(0, len(packs), packs_per_step))
    packs = [packs[i] for step in steps for i in sorted(step, key=lambda i: -works[i])]
    flat = np.array([row for pack in packs for row in pack], np.int64)
    ends = np.cumsum([len(pack) for pack in packs], dtype=np.int64)
    return Plan(order[flat].astype(np.int64), ends, tokens[flat], budget, packs_per_step)


def make_packs(tokens: np.ndarray, budget: int, window: int = WINDOW) -> list[list[int]]:
    """Indices in packs of at most `budget` tokens: best-fit decreasing, among rows that follow one another."""
    if len(tokens) and not 0 < int(tokens.min()) <= int(tokens.max()) <= budget:
        raise ValueError(f"rows of {tokens.min()} to {tokens.max()} tokens do not fit packs of {budget}")
    groups = (np.cumsum(tokens) - 1) // (window * budget)
    borders = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(tokens)]
    return [pack for start, end in pairwise(borders) for pack in _fit(tokens, start, end, budget)]


def _fit(tokens: np.ndarray, start: int, end: int, budget: int) -> Iterable[list[int]]:
    sizes = tokens[start:end]
    packs: list[list[int]] = []
    least, base = int(sizes.min(initial=budget)), len(sizes)
    rooms: list[int] = []  # room * base + pack of those that are open, in order
    for i in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[i])
        at = bisect_left(rooms, size * base)
        if at < len(rooms):
            room, pack = divmod(rooms.pop(at), base)
        else:
            room, pack = budget, len(packs)
            packs.append([])
        packs[pack].append(start + i)
        if room - size >= least:
            insort(rooms, (room - size) * base + pack)
    return [sorted(pack) for pack in packs]
