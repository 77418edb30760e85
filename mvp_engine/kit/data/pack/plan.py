"""The order of the rows of an epoch, and its packing plan: which rows go into which pack, and which packs into which
optimizer step.

`Mixture` counts rows. `PacedMixture` (`data.mixture`) keeps to shares of the tokens, at each point of a training: each
row has its time, at which its source has to give it, and the rows of all sources are sorted by time.

The plan depends on (seed, epoch), the row costs, the pack size and the global batch, never on the number of ranks.
Every rank computes the same plan and takes its stride, so a cursor into the plan is valid on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mvp_engine.data import derived_seed
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_path
from mvp_engine.kit.data.pack.costs import map_arrays
from mvp_engine.kit.data.pack.packer import (
    ENCODER_VALUES_PER_TOKEN,
    WINDOW_PACKS,
    packed_rows,
    row_windows,
)
from mvp_engine.kit.data.read.sources import Source
from mvp_engine.kit.data.settings import Mixing, Weight

PACED_WINDOW = 128  # packs that are filled together: rows stay near their time
MARK = 1024  # packs between two entries of `Plan.marks`
DIGEST_ROWS = 1 << 20
LARGE_ROWS = (
    1 << 21
)  # rows of an epoch from which on one process writes its plan, and the others read their part
CELLS = 4096  # parts of a training in which shares are constant, where they change
CAP_ROUNDS = 64  # of scaling sources down to their cap


@dataclass(frozen=True)
class Plan:
    """The packs of an epoch: pack i is `samples[ends[i - 1] : ends[i]]`. Arrays of a stored plan are memory-mapped."""

    samples: np.ndarray  # ids, which count through all sources
    ends: np.ndarray
    tokens: np.ndarray  # of each row, as measured
    first: np.ndarray  # the sample id of the first row of each source, and of the end
    budget: int
    packs_per_step: int
    media: np.ndarray | None = None  # the kinds of media of each pack, as bits
    places: np.ndarray | None = None  # of rows in the passes over their source, in a `PacedMixture`
    marks: np.ndarray | None = None  # rows and tokens of each source before every MARK-th pack
    stored_digest: str | None = None

    def __len__(self) -> int:
        return len(self.ends)

    def pack(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The (source, row) pairs of a pack, and the tokens of each."""
        part = slice(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))
        samples = self.samples[part]
        source = np.searchsorted(self.first, samples, side="right") - 1
        return np.stack([source, samples - self.first[source]], axis=1), self.tokens[part]

    def rows_of(self, first: int, last: int) -> slice:
        """Where the rows of the packs `first` to `last` (exclusive) are."""
        begin, end = (int(self.ends[packs - 1]) if packs else 0 for packs in (first, last))
        return slice(begin, end)

    def pairs(self, samples: np.ndarray) -> np.ndarray:
        return pairs_of(samples, self.first)

    @property
    def num_rows(self) -> int:
        return self.rows_of(0, len(self)).stop

    @property
    def steps(self) -> int:
        return -(-len(self) // self.packs_per_step)

    @cached_property
    def num_tokens(self) -> int:
        return int(self.seen(len(self))[:, 1].sum())

    @property
    def fill_ratio(self) -> float:
        """Tokens in all packs divided by the tokens that fit into them."""
        return self.num_tokens / max(1, len(self) * self.budget)

    def seen(self, packs: int) -> np.ndarray:
        """Rows and tokens of each source in the first packs: (sources, 2)."""
        if self.marks is None:
            return self._count(0, packs)
        return self.marks[packs // MARK] + self._count(packs // MARK * MARK, packs)

    def _count(self, first: int, last: int) -> np.ndarray:
        part = self.rows_of(first, last)
        source = np.searchsorted(self.first, self.samples[part], side="right") - 1
        sources = len(self.first) - 1
        tokens = np.bincount(source, self.tokens[part], minlength=sources)
        counts = [np.bincount(source, minlength=sources), tokens]
        return np.stack(counts, axis=1).astype(np.int64)

    def marked(self) -> np.ndarray:
        counts = [
            self._count(first, min(first + MARK, len(self))) for first in range(0, len(self), MARK)
        ]
        return np.cumsum([np.zeros((len(self.first) - 1, 2), np.int64), *counts], axis=0)

    @cached_property
    def digest(self) -> str:
        """A hash of the whole plan. Checkpoints hold it, so it must not change for an equal plan."""
        if self.stored_digest is not None:
            return self.stored_digest
        digest = hashlib.blake2b(digest_size=8)
        digest.update(np.array([self.budget, self.packs_per_step], np.int64).tobytes())
        for part, values in ((self.ends, int), (self.samples, self.pairs), (self.tokens, int)):
            for begin in range(0, len(part), DIGEST_ROWS):
                chunk = part[begin : begin + DIGEST_ROWS]
                chunk = self.pairs(chunk) if values == self.pairs else chunk
                digest.update(np.ascontiguousarray(chunk, np.int64).tobytes())
        return digest.hexdigest()

    # ---- On disk --------------------------------------------------------------------------------

    def write(self, file: Path) -> None:
        """Write the plan, with what a rank would otherwise read all rows for."""
        arrays = {
            "samples": self.samples.astype(np.uint32 if self.first[-1] < 1 << 32 else np.int64),
            "ends": self.ends,
            "tokens": self.tokens.astype(np.uint32),
            "first": self.first,
            "sizes": np.array([self.budget, self.packs_per_step], np.int64),
            "marks": self.marked(),
            "digest": np.frombuffer(self.digest.encode(), np.uint8),
        }
        for name in ("media", "places"):
            if (more := getattr(self, name)) is not None:
                arrays[name] = more
        with atomic_path(file) as temporary, open(temporary, "wb") as out:
            np.savez(out, **arrays)  # type: ignore[arg-type]

    @classmethod
    def read(cls, file: Path) -> Plan:
        found = map_arrays(file)
        budget, packs_per_step = found.pop("sizes").tolist()
        digest = found.pop("digest").tobytes().decode()
        return cls(**found, budget=budget, packs_per_step=packs_per_step, stored_digest=digest)


def pairs_of(samples: np.ndarray, first: np.ndarray) -> np.ndarray:
    """(source, row) of sample ids, which count through all sources: `first` are those of their first rows."""
    source = np.searchsorted(first, samples, side="right") - 1
    return np.stack([source, samples - first[source]], axis=1)


def make_plan(
    samples: np.ndarray,
    tokens: np.ndarray,
    encoder: np.ndarray,
    *,
    first: np.ndarray,
    media: np.ndarray | None = None,
    places: np.ndarray | None = None,
    budget: int,
    packs_per_step: int,
    shuffle: np.random.Generator | None = None,
    max_packs: int | None = None,
    window: int = WINDOW_PACKS,
    arrange: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> Plan:
    """Pack the rows of an epoch into packs of about equal work, and group the packs into steps.

    `samples` are the ids of the rows; `tokens`, `encoder` and `media` their costs. Inside a step packs are sorted by
    work: the ranks take neighbours of that order in one micro-batch, so they wait least for each other. The first
    `max_packs` packs are the same for any `packs_per_step`. `arrange` puts the packs in order, instead of `shuffle`: it
    gets what `packed_rows` returns.
    """
    rows, ends = packed_rows(tokens, encoder, budget, window)
    number = np.arange(len(ends))
    if arrange is not None:
        number = arrange(rows, ends)
    elif shuffle is not None:
        number = shuffle.permutation(len(ends))
    number = number[:max_packs]
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    if len(number):
        work = np.add.reduceat((tokens + encoder // ENCODER_VALUES_PER_TOKEN)[rows], begins)[number]
        number = number[np.lexsort((-work, np.arange(len(number)) // packs_per_step))]
    sizes = (ends - begins)[number]
    ends = np.cumsum(sizes)
    # Row k of the plan is at this place of the packs in their first order.
    place = np.repeat(begins[number] - (ends - sizes), sizes)
    place += np.arange(len(place))
    rows = rows[place]
    del place
    kinds = None
    if media is not None and len(ends):
        begins = np.concatenate([[0], ends[:-1]])
        kinds = np.bitwise_or.reduceat(media[rows], begins)
    return Plan(
        samples[rows],
        ends,
        tokens[rows],
        first,
        budget,
        packs_per_step,
        kinds,
        None if places is None else places[rows],
    )


# ---- Mixtures: which rows an epoch has, and in which order ----------------------------------------


class Mixture:
    """Several named sources in one order, which depends on (seed, epoch) alone.

    `by="repeats"`: a source of n rows gives round(repeats * n) rows per epoch; 2 means each row exactly twice.
    `by="weight"`: an epoch has as many rows as all sources together, divided by weight to the nearest row. A small
    source with a large weight is repeated.
    In both modes a source is read in shuffled passes that continue over epochs. No row comes for the (k+1)-th time
    before all rows of its source came k times, so repeats=0.5 gives one half, then the other.
    """

    def __init__(self, sources: Sequence[tuple[str, Source, float]], by: str = "repeats") -> None:
        self.names = [name for name, _, _ in sources]
        self.sources = [source for _, source, _ in sources]
        shares = [share for _, _, share in sources]
        _check(self.names, shares, by)
        sizes = [len(source) for source in self.sources]
        # The sample id of the first row of each source: ids count through all sources.
        self.first = np.cumsum([0, *sizes])
        rows_per_weight = sum(sizes) / sum(shares)
        self.counts = []  # rows of each source in one epoch
        for name, share, size in zip(self.names, shares, sizes, strict=True):
            count = round(share * (size if by == "repeats" else rows_per_weight))
            if count == 0:
                raise UserError(f"data: {name!r} would give no row per epoch: raise its {by}")
            self.counts.append(count)

    def __len__(self) -> int:
        """Rows in an epoch."""
        return sum(self.counts)

    def shares(self) -> dict[str, float]:
        """The share of each source in the rows of an epoch, by name."""
        return {
            name: count / len(self) for name, count in zip(self.names, self.counts, strict=True)
        }

    def order(self, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
        """The rows of the epoch as (source, row) pairs: an array of shape (len(self), 2)."""
        return pairs_of(self.samples(seed, epoch, shuffle), self.first)

    def samples(self, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
        """The sample ids of the rows of the epoch."""
        parts = []
        for index, size in enumerate(self.counts):
            rows = self._source_rows(index, epoch * size, size, seed if shuffle else None)
            parts.append(self.first[index] + rows)
        samples = np.concatenate(parts) if len(parts) > 1 else parts[0]
        del parts
        return samples[_permutation(len(samples), seed, "order", epoch)] if shuffle else samples

    def some(self, count: int) -> np.ndarray:
        """Some rows, as (source, row): always the same ones."""
        if len(self) < LARGE_ROWS:
            return self.order(0, 0)[:count]
        drawn = np.random.default_rng(0).choice(self.first[-1], count, replace=False)
        return pairs_of(np.sort(drawn), self.first)

    @property
    def key(self) -> str:
        """What the order depends on, apart from the seed and the epoch."""
        fingerprints = [source.fingerprint for source in self.sources]
        return repr([self.names, self.counts, fingerprints])

    def _source_rows(self, index: int, start: int, count: int, seed: int | None) -> np.ndarray:
        """Rows `start` to `start + count` of the endless sequence of passes over a source."""
        size = len(self.sources[index])
        passes = range(start // size, (start + count - 1) // size + 1)
        rows = np.concatenate([self._pass(index, number, seed) for number in passes])
        return rows[start % size :][:count]

    def _pass(self, index: int, number: int, seed: int | None) -> np.ndarray:
        """All rows of a source in the order of one pass."""
        size = len(self.sources[index])
        return (
            np.arange(size) if seed is None else _permutation(size, seed, self.names[index], number)
        )


def _check(names: list[str], shares: list[float], by: str) -> None:
    if not names or len(set(names)) < len(names) or by not in ("repeats", "weight"):
        raise UserError(
            f"data: a mixture needs sources with different names, by repeats or by weight; not {names} by {by}"
        )
    if not all(isinstance(share, int | float) and 0 < share < math.inf for share in shares):
        raise UserError(f"data: the {by} of a source must be a number above 0, not {shares}")


def _permutation(size: int, *seed: object) -> np.ndarray:
    generator = torch.Generator().manual_seed(derived_seed(*seed))
    return torch.randperm(size, generator=generator).numpy()


@dataclass(frozen=True)
class Origin:
    """Where a mixture begins: at the start of a training, or where it was changed in mid-run.

    A source continues behind the rows that it gave: at the place `next` of its endless sequence of passes, after the
    places `left`, which other rows overtook.
    """

    epoch: int = 0
    units: float = 0.0  # tokens (or rows) of all sources before
    next: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, Sequence[int]] = field(default_factory=dict)


class PacedMixture(Mixture):
    """Sources in shares of the tokens (or rows) that may change with the progress of the training.

    Units are tokens, or rows. An epoch has as many of them as all sources together. `total` is those of the training.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, Source, Weight | None, float]],
        tokens: Sequence[np.ndarray],
        mixing: Mixing,
    ) -> None:
        """`sources` are (name, rows, weight, repeats); `tokens` those of their rows, 0 for rows that are left out."""
        self.mixing = mixing
        self.weights = [weight for _, _, weight, _ in sources]
        self.repeats = [repeats for _, _, _, repeats in sources]
        by_tokens = mixing.by == "tokens"
        self.units = [
            of_rows if by_tokens else (of_rows > 0).astype(np.int64) for of_rows in tokens
        ]
        self.sizes = np.array([of_rows.sum() for of_rows in self.units], float)
        super().__init__([(name, source, 1.0) for name, source, _, _ in sources])
        empty = [name for name, size in zip(self.names, self.sizes, strict=True) if not size]
        if empty:
            raise UserError(
                f"data: no row of {empty[0]} can be trained on, so it has no share: remove it"
            )
        if wrong := sorted(set(mixing.caps) - set(self.names)):
            raise UserError(
                f"data.mixture.max_epochs names {wrong[0]}; the sources are {', '.join(self.names)}"
            )
        self.origin = Origin()
        self.total: float | None = None
        self._grid: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def key(self) -> str:
        return repr([self.settings(), self.total, self.origin])

    @property
    def epoch_units(self) -> float:
        return float(self.sizes.sum())

    def set_total(self, units: float | None) -> None:
        """Units of the whole training, by which its progress is known."""
        self.total = units
        self._grid = None

    @property
    def changes(self) -> bool:
        """Whether shares change with the progress."""
        return any(isinstance(weight, list) for weight in self.weights)

    @property
    def needs_total(self) -> bool:
        return self.changes or self.mixing.max_epochs is not None

    def settings(self) -> dict[str, Any]:
        """What the shares follow from; the state of a loader has it."""
        known = zip(self.names, self.sources, self.weights, self.repeats, strict=True)
        sources = {
            name: [source.fingerprint, weight, repeats] for name, source, weight, repeats in known
        }
        total = self.total if self.needs_total else None
        found = {"sources": sources, "mixing": self.mixing.plain(), "total": total}
        return dict(json.loads(json.dumps(found)))

    def shares(self) -> dict[str, float]:
        """The share of each source in the tokens (or rows) of the first epoch, by name."""
        end = self._given(np.array([self.origin.units, self.origin.units + self.epoch_units]))
        shares = (end[:, 1] - end[:, 0]) / self.epoch_units
        return dict(zip(self.names, shares.tolist(), strict=True))

    def order(self, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
        """The rows of the epoch as (source, row, place): a row has another place each time that it comes."""
        first = self.origin.units + (epoch - self.origin.epoch) * self.epoch_units
        bounds = self._given(np.array([self.origin.units, first, first + self.epoch_units]))
        times, grid = [], self._cumulative()
        rows = []
        for index in range(len(self.names)):
            start, end = bounds[index, 1:] - bounds[index, 0]
            found, begins, places = self._rows_between(index, start, end, seed if shuffle else None)
            middle = bounds[index, 0] + begins + self.units[index][found] / 2
            times.append(_inverse(grid, index, middle))
            rows.append(np.stack([np.full(len(found), index), found, places], axis=1))
        order = np.argsort(np.concatenate(times), kind="stable")
        return np.concatenate(rows)[order]

    def _rows_between(
        self, index: int, start: float, end: float, seed: int | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of a source since the origin that begin in a range of its units: rows, their begins, their places."""
        size = len(self.sources[index])
        units = self.units[index]
        next_place = int(self.origin.next.get(self.names[index], 0))
        left = np.array(self.origin.left.get(self.names[index], ()), np.int64)
        passes = {
            number: self._pass(index, number, seed) for number in set((left // size).tolist())
        }
        left_rows = np.array(
            [passes[place // size][place % size] for place in left.tolist()], np.int64
        )
        left_ends = np.cumsum(units[left_rows], dtype=float)
        units_left = float(left_ends[-1]) if len(left) else 0.0
        parts = [(left_rows, left_ends - units[left_rows], left)]
        # Units since the origin -> units of the endless sequence of passes.
        number, offset = divmod(next_place, size)
        one_pass = self.sizes[index]
        shift = (
            number * one_pass + units[self._pass(index, number, seed)[:offset]].sum() - units_left
        )
        first = max(number, int((start + shift) // one_pass))
        for each in range(first, int((end + shift) // one_pass) + 1):
            rows = self._pass(index, each, seed)
            ends = each * one_pass + np.cumsum(units[rows], dtype=float)
            place = each * size + np.arange(size)
            late = place >= next_place
            parts.append((rows[late], (ends - units[rows] - shift)[late], place[late]))
        rows, begins, places = (np.concatenate(column) for column in zip(*parts, strict=True))
        chosen = (begins >= start) & (begins < end)
        return rows[chosen], begins[chosen], places[chosen]

    def place_at(self, index: int, seed: int | None, epoch: int) -> int:
        """The first place of a source that no epoch before this one has reached."""
        first = self.origin.units + (epoch - self.origin.epoch) * self.epoch_units
        begin, end = self._given(np.array([self.origin.units, first]))[index]
        _, _, places = self._rows_between(index, 0.0, end - begin, seed)
        return max([int(self.origin.next.get(self.names[index], 0)), *(places[-1:] + 1).tolist()])

    # ---- Shares over the training ---------------------------------------------------------------

    def _cumulative(self) -> tuple[np.ndarray, np.ndarray]:
        """Units of the training at some points, and those of each source until then."""
        if self._grid is None:
            if self.total is None and self.needs_total:
                raise UserError(
                    "data: weights by progress and data.mixture.max_epochs need the length of the training: set "
                    "train.max_steps or train.epochs"
                )
            total = self.total or self.epoch_units
            cells = CELLS if self.changes else 1
            middles = (np.arange(cells) + 0.5) / cells
            weights = np.stack([self._weight(index, middles) for index in range(len(self.names))])
            if not weights.sum(0).all():
                progress = middles[np.flatnonzero(weights.sum(0) == 0)[0]]
                raise UserError(
                    f"data: at progress {progress:.3f} all sources have weight 0: raise one"
                )
            shares = self._capped(weights / weights.sum(0), total)
            ends = np.cumsum(shares * (total / cells), axis=1)
            given = np.concatenate([np.zeros((len(self.names), 1)), ends], axis=1)
            points = np.linspace(0, total, cells + 1)
            # Behind the end of the training its last shares count.
            beyond = 1e6 * max(total, self.epoch_units)
            given = np.concatenate([given, given[:, -1:] + shares[:, -1:] * beyond], axis=1)
            self._grid = np.append(points, total + beyond), given
        return self._grid

    def _weight(self, index: int, progress: np.ndarray) -> np.ndarray:
        weight = self.weights[index]
        if weight is None:
            size = self.repeats[index] * self.sizes[index]
            return np.full(len(progress), size ** (1 / self.mixing.temperature))
        if isinstance(weight, list):
            points, values = np.array(weight, float).T
            return np.interp(progress, points, values)
        return np.full(len(progress), float(weight))

    def _capped(self, shares: np.ndarray, total: float) -> np.ndarray:
        """The shares; a source that would be read more than `max_epochs` times is scaled down, others take its part."""
        caps = np.array([self.mixing.caps.get(name, self.mixing.cap) for name in self.names])
        most = caps * self.sizes / total * shares.shape[1]  # of a source, summed over all cells
        if most.sum() < shares.shape[1] * (1 - 1e-9):
            raise UserError(
                f"data.mixture.max_epochs: the sources have {(caps * self.sizes).sum():,.0f} tokens in so many epochs, "
                f"and the training takes {total:,.0f}: raise it, or lower train.max_steps"
            )
        for _ in range(CAP_ROUNDS):
            given = shares.sum(1)
            over = given > most * (1 + 1e-12)
            if not over.any():
                break
            # Those that have their cap keep it; the rest is divided among the others as before.
            full = given >= most * (1 - 1e-9)
            shares = shares * np.where(full, most / given, 1.0)[:, None]
            fixed = shares[full].sum(0)
            others = shares[~full].sum(0)
            if not (others > 0).all():
                raise UserError(
                    "data.mixture.max_epochs: at some progress only capped sources have a weight: give others one"
                )
            shares[~full] *= (1 - fixed) / others
        return shares

    def _given(self, units: np.ndarray) -> np.ndarray:
        """Units of each source when the training has seen so many of all: (sources, points)."""
        points, given = self._cumulative()
        return np.stack([np.interp(units, points, of_source) for of_source in given])


def _inverse(grid: tuple[np.ndarray, np.ndarray], index: int, given: np.ndarray) -> np.ndarray:
    """Units of the training when a source has given so many."""
    points, of_sources = grid
    return np.interp(given, of_sources[index], points)


def paced(
    rows: np.ndarray,
    ends: np.ndarray,
    source: np.ndarray,
    tokens: np.ndarray,
    sizes: tuple[int, int],
    random: np.random.Generator,
) -> np.ndarray:
    """The packs of each window, in an order in which sources give their tokens as the rows in their order do.

    `rows` and `ends` are those of `packed_rows`. `sizes`: the number of sources, and the tokens of a pack.
    """
    num_sources, budget = sizes
    window_of_row = row_windows(tokens, budget, PACED_WINDOW)
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    window_of_pack = window_of_row[rows[begins]]
    of_sources = np.zeros((len(tokens), num_sources), np.int64)
    of_sources[np.arange(len(tokens)), source] = tokens
    of_packs = np.add.reduceat(of_sources[rows], begins)
    ordered = []
    borders = np.concatenate([[0], np.flatnonzero(np.diff(window_of_pack)) + 1, [len(ends)]])
    for begin, end in pairwise(borders.tolist()):
        drawn = random.permutation(np.arange(begin, end))
        held = of_packs[drawn]
        # What each source should have given after so many tokens: as the rows of the window come in their order.
        window = window_of_pack[begin]
        first, last = np.searchsorted(window_of_row, [window, window + 1])
        due = np.cumsum(of_sources[first:last], axis=0)
        due_in_all = due.sum(1)
        given = np.zeros(num_sources)
        left = np.arange(len(drawn))
        while len(left):
            after = given + held[left]
            wanted = due[np.minimum(np.searchsorted(due_in_all, after.sum(1)), len(due) - 1)]
            chosen = int(np.abs(after - wanted).max(1).argmin())
            given = after[chosen]
            ordered.append(int(drawn[left[chosen]]))
            left = np.delete(left, chosen)
    return np.array(ordered, np.int64)
