"""The packing plan of an epoch: which rows go into which pack, and which packs into which optimizer step.

The plan depends on (seed, epoch), the row costs, the pack size and the global batch, never on the number of ranks.
Every rank computes the same plan and takes its stride, so a cursor into the plan is valid on any number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np

# Packs that are filled together. 1,024 leave hardly a gap, and are few enough that a row has other neighbours in
# every epoch.
WINDOW_PACKS = 1024
# Values read by an encoder that cost about as much work as one token of the language model.
ENCODER_VALUES_PER_TOKEN = 1024
# Rows with media, and as many without, that are compared for one place in a pack.
NUM_CANDIDATES = 8
# This share of a pack is filled with rows in their shuffled order, whatever their size.
IN_ORDER_SHARE = 0.9
# A row with more than this share of the encoder work that the pack still needs is not taken in order.
MAX_WORK_SHARE = 0.5
# When less than this share of a pack is left, rows are chosen by size alone.
SIZE_ONLY_SHARE = 0.02


@dataclass(frozen=True)
class Plan:
    """The packs of an epoch: pack i is `rows[ends[i - 1] : ends[i]]`, with one (source, row) pair per line."""

    rows: np.ndarray
    ends: np.ndarray
    tokens: np.ndarray  # of each row, as measured
    budget: int
    packs_per_step: int

    def __len__(self) -> int:
        return len(self.ends)

    def pack(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The (source, row) pairs of a pack, and the tokens of each."""
        start = int(self.ends[index - 1]) if index else 0
        part = slice(start, int(self.ends[index]))
        return self.rows[part], self.tokens[part]

    @property
    def steps(self) -> int:
        return -(-len(self) // self.packs_per_step)

    @property
    def fill_ratio(self) -> float:
        """Tokens in all packs divided by the tokens that fit into them."""
        return int(self.tokens.sum()) / max(1, len(self) * self.budget)

    @cached_property
    def digest(self) -> str:
        """A hash of the whole plan. Checkpoints hold it, so it must not change for an equal plan."""
        digest = hashlib.blake2b(digest_size=8)
        sizes = np.array([self.budget, self.packs_per_step])
        for part in (sizes, self.ends, self.rows, self.tokens):
            digest.update(np.ascontiguousarray(part, np.int64).tobytes())
        return digest.hexdigest()


def make_plan(
    order: np.ndarray,
    tokens: np.ndarray,
    encoder: np.ndarray,
    *,
    budget: int,
    packs_per_step: int,
    shuffle: np.random.Generator | None = None,
    max_packs: int | None = None,
) -> Plan:
    """Pack the rows of an epoch into packs of about equal work, and group the packs into steps.

    `order` holds (source, row) pairs, `tokens` and `encoder` their costs. Inside a step the packs are sorted by work:
    the ranks take neighbours of that order in one micro-batch, so they wait least for each other. The first
    `max_packs` packs are the same for any `packs_per_step`.
    """
    packs = make_packs(tokens, encoder, budget)
    if shuffle is not None:
        packs = [packs[i] for i in shuffle.permutation(len(packs))]
    packs = packs[:max_packs]
    row_work = tokens + encoder // ENCODER_VALUES_PER_TOKEN
    pack_work = [int(row_work[pack].sum()) for pack in packs]
    sorted_packs = []
    for start in range(0, len(packs), packs_per_step):
        step = range(start, min(start + packs_per_step, len(packs)))
        for index in sorted(step, key=lambda i: -pack_work[i]):
            sorted_packs.append(packs[index])
    flat = np.array(list(chain.from_iterable(sorted_packs)), np.int64)
    ends = np.cumsum([len(pack) for pack in sorted_packs], dtype=np.int64)
    return Plan(order[flat].astype(np.int64), ends, tokens[flat], budget, packs_per_step)


def make_packs(
    tokens: np.ndarray, encoder: np.ndarray, budget: int, window: int = WINDOW_PACKS
) -> list[list[int]]:
    """Indices of rows in packs of at most `budget` tokens and about equal encoder work.

    Rows are packed window by window: a pack only holds rows that are near each other in the given order.
    """
    if len(tokens) and not 0 < int(tokens.min()) <= int(tokens.max()) <= budget:
        raise ValueError(
            f"rows of {tokens.min()} to {tokens.max()} tokens do not fit packs of {budget}"
        )
    window_of_row = (np.cumsum(tokens) - 1) // (window * budget)
    borders = [0, *(np.flatnonzero(np.diff(window_of_row)) + 1).tolist(), len(tokens)]
    packs = []
    for start, end in pairwise(borders):
        packer = _WindowPacker(tokens[start:end].tolist(), encoder[start:end].tolist(), budget)
        for pack in packer.packs():
            packs.append([start + row for row in pack])
    return packs


class _Pool:
    """Rows of a window that are not packed yet, sorted by (tokens, row), with their encoder work per token."""

    def __init__(self, rows: Iterable[int], tokens: list[int], encoder: list[int]) -> None:
        self.rows = sorted((tokens[row], row) for row in rows)
        self.density = [encoder[row] / size for size, row in self.rows]

    def index(self, size: int, row: int) -> int:
        return bisect_left(self.rows, (size, row))

    def pop(self, index: int) -> int:
        del self.density[index]
        return self.rows.pop(index)[1]


class _WindowPacker:
    """Packs the rows of one window, one pack after the other.

    A pack starts with rows in their order. Rows of one size are often of one kind, and packs filled by size alone
    would put them into the same steps. The rest of the pack is filled with the largest rows that fit: among a few of
    them the packer takes the row that has the encoder work per token that the pack still needs.
    """

    def __init__(self, tokens: list[int], encoder: list[int], budget: int) -> None:
        self.tokens = tokens
        self.encoder = encoder
        self.budget = budget
        rows = range(len(tokens))
        self.media = _Pool([row for row in rows if encoder[row] > 0], tokens, encoder)
        self.text = _Pool([row for row in rows if encoder[row] == 0], tokens, encoder)
        self.tokens_left = sum(tokens)
        self.work_left = sum(encoder)
        self.packed = bytearray(len(tokens))  # 1 for rows that are in a pack
        self.first = 0  # the first row that is not

    def packs(self) -> list[list[int]]:
        packs = []
        while self.tokens_left:
            packs.append(self._next_pack())
        return packs

    def _next_pack(self) -> list[int]:
        pack: list[int] = []
        room = self.budget
        need = self.work_left * self.budget / self.tokens_left  # encoder work, for an equal share
        while room:
            self.first = self.packed.find(0, self.first)
            if self._fits_in_order(room, need):
                row = self.first
                pool = self.media if self.encoder[row] else self.text
                index = pool.index(self.tokens[row], row)
            else:
                by_size = not pack or not need or room < SIZE_ONLY_SHARE * self.budget
                found = self._largest(room, None if by_size else need / room)
                if found is None:
                    break
                pool, index = found
            row = pool.pop(index)
            self.packed[row] = 1
            pack.append(row)
            room -= self.tokens[row]
            need -= self.encoder[row]
            self.tokens_left -= self.tokens[row]
            self.work_left -= self.encoder[row]
        return sorted(pack)

    def _fits_in_order(self, room: int, need: float) -> bool:
        if self.first < 0:
            return False
        size_fits = self.tokens[self.first] <= room - (1 - IN_ORDER_SHARE) * self.budget
        return size_fits and self.encoder[self.first] <= MAX_WORK_SHARE * need

    def _largest(self, room: int, density: float | None) -> tuple[_Pool, int] | None:
        """One of the largest rows that fit: the nearest to this work per token; None: simply the largest."""
        best = None
        least_error = math.inf
        largest = 0
        num_candidates = 1 if density is None else NUM_CANDIDATES
        for pool in (self.media, self.text):
            end = bisect_left(
                pool.rows, (room + 1, -1)
            )  # the rows before it have at most `room` tokens
            for index in range(max(0, end - num_candidates), end):
                error = 0.0 if density is None else abs(pool.density[index] - density)
                size = pool.rows[index][0]
                if error < least_error or (error == least_error and size > largest):
                    best = pool, index
                    least_error = error
                    largest = size
        return best
