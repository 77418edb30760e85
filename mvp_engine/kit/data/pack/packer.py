"""Packs of about equal work from rows in their order, window by window.

`_WindowPacker` packs one window in plain Python, 7 microseconds a row. `_ManyWindows` packs windows next to each other,
one row of each at a time: the same packs, and with hundreds of windows twenty times faster.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator

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
MIN_WINDOWS = 24  # of which packing them together is faster
BATCH_ROWS = 1 << 24  # of windows that are packed together
BATCH_TABLE = 1 << 24  # entries of the table by window and size
EXACT = 2**53  # integers up to it are floats


def make_packs(
    tokens: np.ndarray, encoder: np.ndarray, budget: int, window: int = WINDOW_PACKS
) -> list[list[int]]:
    """Indices of rows in packs of at most `budget` tokens and about equal encoder work.

    Rows are packed window by window: a pack only holds rows that are near each other in the given order.
    """
    rows, ends = packed_rows(tokens, encoder, budget, window)
    return [pack.tolist() for pack in np.split(rows, ends[:-1])] if len(ends) else []


def packed_rows(
    tokens: np.ndarray, encoder: np.ndarray, budget: int, window: int = WINDOW_PACKS
) -> tuple[np.ndarray, np.ndarray]:
    """`make_packs` as arrays: pack i is `rows[ends[i - 1] : ends[i]]`."""
    if len(tokens) and not 0 < int(tokens.min()) <= int(tokens.max()) <= budget:
        raise ValueError(
            f"rows of {tokens.min()} to {tokens.max()} tokens do not fit packs of {budget}"
        )
    window_of_row = row_windows(tokens, budget, window)
    borders = np.concatenate([[0], np.flatnonzero(np.diff(window_of_row)) + 1, [len(tokens)]])
    del window_of_row
    parts = []
    sizes = []
    for first, last in _batches(borders, encoder, budget):
        begin, end = borders[first], borders[last]
        given = tokens[begin:end], encoder[begin:end]
        if last - first == 1:
            packs = _WindowPacker(given[0].tolist(), given[1].tolist(), budget).packs()
            parts.append(np.array([row for pack in packs for row in pack], np.int64) + begin)
            sizes.append(np.array([len(pack) for pack in packs], np.int64))
        else:
            number = _ManyWindows(*given, borders[first : last + 1] - begin, budget).packs()
            parts.append(np.argsort(number, kind="stable") + begin)
            sizes.append(np.bincount(number))
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate(parts), np.cumsum(np.concatenate(sizes))


def _batches(borders: np.ndarray, encoder: np.ndarray, budget: int) -> Iterator[tuple[int, int]]:
    """Windows that are packed together, as (first, last + 1)."""
    windows = len(borders) - 1
    if borders[-1] == 0:
        return
    work = np.add.reduceat(encoder, borders[:-1])
    together = windows >= MIN_WINDOWS and int(work.max()) * budget < EXACT
    first = 0
    while first < windows:
        last = first + 1
        if together:
            most = max(MIN_WINDOWS, BATCH_TABLE // (2 * (budget + 1)))
            reach = int(np.searchsorted(borders, borders[first] + BATCH_ROWS, side="right")) - 1
            last = min(windows, first + most, max(reach, last))
        yield first, last
        first = last


def row_windows(tokens: np.ndarray, budget: int, window: int) -> np.ndarray:
    """The number of the window that each row is packed in."""
    found: np.ndarray = (np.cumsum(tokens) - 1) // (window * budget)
    return found


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


class _ManyWindows:
    """Packs all windows at the same time, as `_WindowPacker` packs each: an array has one entry for each window.

    Rows that are left are found by pointers to the next row in order and to the next smaller row. Pointers of packed
    rows lead on to others, and are shortened when they are followed.
    """

    def __init__(
        self, tokens: np.ndarray, encoder: np.ndarray, borders: np.ndarray, budget: int
    ) -> None:
        self.budget = budget
        self.tokens = np.append(tokens, 0)
        self.encoder = np.append(encoder, 0)
        self.ends = borders[1:]
        windows = len(borders) - 1
        # Rows in order: `following` has a place more after each window. Row r of window w is at place r + w.
        self.following = np.arange(len(tokens) + windows)
        self.first = borders[:-1] + np.arange(windows)
        # Rows by size: each window has a pool of rows with media and one of text, and a pool begins with a place that
        # is never taken.
        pool = 2 * np.repeat(np.arange(windows), np.diff(borders)) + (encoder == 0)
        key = pool * (budget + 1) + tokens
        self.by_size = np.argsort(key, kind="stable")
        pool = pool[self.by_size]
        place = np.arange(len(tokens)) + pool + 1
        self.smaller = np.arange(len(tokens) + 2 * windows + 1)
        self.row_at = np.full(len(self.smaller), len(tokens))
        self.row_at[place] = self.by_size
        self.place_of = np.empty(len(tokens), np.int64)
        self.place_of[self.by_size] = place
        # The number of rows before the end of each size.
        self.table = np.cumsum(np.bincount(key, minlength=2 * windows * (budget + 1)))
        self.bottom = np.concatenate([[0], self.table[budget :: budget + 1]])[:-1]
        self.bottom += np.arange(2 * windows)
        self.tokens_left = np.add.reduceat(tokens, borders[:-1])
        self.work_left = np.add.reduceat(encoder, borders[:-1])

    def packs(self) -> np.ndarray:
        """The number of the pack of each row; those of a window follow on those of the window before."""
        number = np.empty(len(self.tokens) - 1, np.int64)
        window = np.arange(len(self.ends))  # those that are not packed yet
        count = np.zeros(len(window), np.int64)  # of packs before the current one
        is_empty = np.ones(len(window), bool)
        room = np.full(len(window), self.budget)
        need = self.work_left * self.budget / self.tokens_left
        while len(window):
            row = self._next_rows(window, room, need, is_empty)
            placed = row >= 0
            which = window[placed]
            row = row[placed]
            number[row] = count[which]
            size, work = self.tokens[row], self.encoder[row]
            self.tokens_left[which] -= size
            self.work_left[which] -= work
            room[placed] -= size
            need[placed] -= work
            is_empty[placed] = False
            self.following[row + which] += 1
            place = self.place_of[row]
            self.smaller[place] = place - 1
            full = ~placed | (room == 0)
            if full.any():
                count[window[full]] += 1
                is_done = self.tokens_left[window] == 0
                full &= ~is_done
                room[full] = self.budget
                is_empty[full] = True
                which = window[full]
                need[full] = self.work_left[which] * self.budget / self.tokens_left[which]
            is_done = self.tokens_left[window] == 0
            if is_done.any():
                left = ~is_done
                # A pack that was not closed when the last row came.
                last = window[is_done & (room > 0) & placed]
                count[last] += 1
                window, room, need, is_empty = (one[left] for one in (window, room, need, is_empty))
        before = np.cumsum(count) - count
        return number + np.repeat(before, np.diff(np.concatenate([[0], self.ends])))

    def _next_rows(
        self, window: np.ndarray, room: np.ndarray, need: np.ndarray, is_empty: np.ndarray
    ) -> np.ndarray:
        """The next row of the pack of each window; -1: no row fits."""
        place = _follow(self.following, self.first[window])
        self.first[window] = place
        row = place - window
        inside = row < self.ends[window]
        row = np.where(inside, row, len(self.tokens) - 1)
        fits = inside & (self.tokens[row] <= room - (1 - IN_ORDER_SHARE) * self.budget)
        fits &= self.encoder[row] <= MAX_WORK_SHARE * need
        row = np.where(fits, row, -1)
        others = np.flatnonzero(~fits)
        if len(others):
            window, room, need = window[others], room[others], need[others]
            by_size = is_empty[others] | (need == 0) | (room < SIZE_ONLY_SHARE * self.budget)
            for some, count in ((by_size, 1), (~by_size, NUM_CANDIDATES)):
                if some.any():
                    found = self._largest(window[some], room[some], need[some], count)
                    row[others[some]] = found
        return row

    def _largest(
        self, window: np.ndarray, room: np.ndarray, need: np.ndarray, count: int
    ) -> np.ndarray:
        """One of the `count` largest rows of each pool that fit, as `_WindowPacker._largest`."""
        columns = []
        for pool in (2 * window, 2 * window + 1):
            bottom = self.bottom[pool]
            place = self.table[pool * (self.budget + 1) + room] + pool
            of_pool = []
            for _ in range(count):
                place = np.maximum(_follow(self.smaller, place), bottom)
                of_pool.append(np.where(place > bottom, self.row_at[place], -1))
                place = np.maximum(place - 1, bottom)
            columns += of_pool[::-1]  # smaller rows first
        rows = np.stack(columns)
        size = np.where(rows >= 0, self.tokens[rows], 0)
        if count == 1:
            error = np.zeros(rows.shape)
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                error = np.abs(self.encoder[rows] / size - need / room)
        error = np.where(rows >= 0, error, np.inf)
        # Of the least error the largest row, and of several the first.
        size = np.where(error == error.min(0), size, -1)
        return rows[size.argmax(0), np.arange(len(window))]


def _follow(pointers: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Where pointers lead to from here."""
    place = pointers[start]
    further = pointers[place]
    while not np.array_equal(place, further):
        place = further
        further = pointers[place]
    pointers[start] = place
    return place
