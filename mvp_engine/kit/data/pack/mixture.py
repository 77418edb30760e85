"""A mixture of sources: the rows of an epoch in one global order, by repeats or by weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from mvp_engine.data import derived_seed
from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.sources import Source


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
        pairs = []
        for index, count in enumerate(self.counts):
            rows = self._source_rows(index, epoch * count, count, seed if shuffle else None)
            pairs.append(np.stack([np.full(count, index), rows], axis=1))
        order = np.concatenate(pairs)
        return order[_permutation(len(order), seed, "order", epoch)] if shuffle else order

    def _source_rows(self, index: int, start: int, count: int, seed: int | None) -> np.ndarray:
        """Rows `start` to `start + count` of the endless sequence of passes over a source."""
        size = len(self.sources[index])
        passes = []
        for number in range(start // size, (start + count - 1) // size + 1):
            if seed is None:
                passes.append(np.arange(size))
            else:
                passes.append(_permutation(size, seed, self.names[index], number))
        return np.concatenate(passes)[start % size :][:count]


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
