"""Several sources mixed by repeats or by weight, in one order that all ranks know."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from mvp_engine.data import derived_seed
from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.sources import Source


class Mixture:
    """Several named sources in one order, which follows from (seed, epoch) alone.

    `by="repeats"`: a source of n rows gives round(repeats * n) rows an epoch; 2 means each row exactly twice.
    `by="weight"`: an epoch has as many rows as all sources together, shared out by weight to the nearest row; a small
    source with a large weight comes round more than once.
    Either way a source is gone through in shuffled passes that go on from epoch to epoch: no row comes for the
    (k+1)-th time before all rows of its source came k times, so repeats=0.5 gives one half, then the other.
    """

    def __init__(self, sources: Sequence[tuple[str, Source, float]], by: str = "repeats") -> None:
        self.names, self.sources = (
            [name for name, _, _ in sources],
            [source for _, source, _ in sources],
        )
        shares, sizes = [share for _, _, share in sources], [len(source) for source in self.sources]
        if not sources or len(set(self.names)) < len(sources) or by not in ("repeats", "weight"):
            raise UserError(
                f"data: a mixture wants named sources, by repeats or by weight; not {self.names} by {by}"
            )
        if not all(isinstance(share, int | float) and 0 < share < math.inf for share in shares):
            raise UserError(f"data: the {by} of a source is a number above 0, not {shares}")
        total = sum(sizes) / sum(shares)
        exact = [
            share * (size if by == "repeats" else total)
            for share, size in zip(shares, sizes, strict=True)
        ]
        self.counts = [round(rows) for rows in exact]
        if 0 in self.counts:
            raise UserError(
                f"data: {self.names[self.counts.index(0)]!r} would give no row an epoch: raise its {by}"
            )

    def __len__(self) -> int:
        """Rows in an epoch."""
        return sum(self.counts)

    def order(self, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
        """The epoch's rows as pairs (source, row): an array of shape (len(self), 2)."""
        pairs = []
        for index, (name, source, count) in enumerate(
            zip(self.names, self.sources, self.counts, strict=True)
        ):
            skip, size = epoch * count, len(source)
            passes = range(skip // size, (skip + count - 1) // size + 1)
            rows = np.concatenate(
                [_shuffled(size, seed, name, k) if shuffle else np.arange(size) for k in passes]
            )
            pairs.append(np.stack([np.full(count, index), rows[skip % size :][:count]], axis=1))
        order = np.concatenate(pairs)
        return order[_shuffled(len(order), seed, "order", epoch)] if shuffle else order


def _shuffled(size: int, *seed: object) -> np.ndarray:
    return torch.randperm(
        size, generator=torch.Generator().manual_seed(derived_seed(*seed))
    ).numpy()
