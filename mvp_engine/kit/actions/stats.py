"""Statistics of states and actions, from the numbers in parquet files alone: no video is opened.

Relative actions (an action minus the state at the chunk's first frame) have statistics of their own: their values are
an order of magnitude smaller than those of absolute actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
# Values of one dimension that quantiles are computed from; of more, every n-th. Moments and extremes use all.
QUANTILE_VALUES = 4_000_000


@dataclass(frozen=True)
class Stats:
    """Count, moments, extremes and quantiles of each dimension of a feature, float64."""

    count: int
    mean: np.ndarray
    std: np.ndarray
    min: np.ndarray
    max: np.ndarray
    quantiles: dict[str, np.ndarray]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"count": self.count}
        for name in ("mean", "std", "min", "max"):
            found[name] = getattr(self, name).tolist()
        return found | {name: value.tolist() for name, value in self.quantiles.items()}

    def to_lerobot(self, shape: tuple[int, ...] | None = None) -> dict[str, Any]:
        """The entry of a feature in LeRobot's stats.json; images have the shape (3, 1, 1)."""
        entry = self.to_json()
        if shape is not None:
            for name in entry.keys() - {"count"}:
                entry[name] = np.reshape(entry[name], shape).tolist()
        return entry | {"count": [self.count]}


def column_stats(values: np.ndarray) -> Stats:
    """The statistics of (rows, size) values."""
    return merged_stats([values])


def merged_stats(parts: Sequence[np.ndarray]) -> Stats:
    """The statistics of the rows of all parts, each (rows, size)."""
    filled = [part for part in parts if len(part)]
    count = sum(len(part) for part in filled)
    mean = sum(part.sum(axis=0, dtype=np.float64) for part in filled) / count
    # Two passes: the sum of squares alone would cancel for values far from zero.
    variance = sum(np.square(part - mean).sum(axis=0) for part in filled) / count
    stride = -(-count // QUANTILE_VALUES)
    kept = np.concatenate([part[::stride] for part in filled])
    found = np.quantile(kept.astype(np.float64), list(QUANTILES.values()), axis=0)
    return Stats(
        count=count,
        mean=mean,
        std=np.sqrt(variance),
        min=np.min([part.min(axis=0) for part in filled], axis=0).astype(np.float64),
        max=np.max([part.max(axis=0) for part in filled], axis=0).astype(np.float64),
        quantiles=dict(zip(QUANTILES, found, strict=True)),
    )


def relative_parts(
    actions: np.ndarray, states: np.ndarray, last: np.ndarray, dims: Sequence[int], chunk: int
) -> list[np.ndarray]:
    """The actions of all chunks, relative to the state at their first frame: one part for each step of the chunk.

    `last` (rows,) is the last row of each row's episode: no chunk reaches past it. Only the dimensions `dims` are
    relative; the others stay as they are. `actions` and `states` are rows that follow each other in time.
    """
    parts = []
    rows = np.arange(len(actions))
    for step in range(chunk):
        inside = rows + step <= last
        if not inside.any():
            break
        part = actions[rows[inside] + step].astype(np.float32)
        part[:, dims] -= states[inside][:, dims]
        parts.append(part)
    return parts
