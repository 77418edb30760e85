"""Statistics over rows for `mvp data inspect`: formats, media, length histogram, bad rows by reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow, Row
from mvp_engine.kit.data.read.rows import read_row

SAMPLE = 1000  # rows per source that are read for formats and media
BINS = 10  # of the length histogram, at most one more


class Rows(Protocol):
    """A source, or one row of a stream in the place of a source."""

    root: Path

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def where(self, index: int, /) -> str: ...


def sample_rows(
    sources: Sequence[Rows],
    formats: Sequence[RowFormat | str | None],
    reasoning_left_out: Callable[[Row], int] | None = None,
) -> dict[str, Any]:
    """Counts of formats, media and unused columns over at most SAMPLE evenly spread rows of each source.

    `reasoning_left_out` is that of the model's chat template. Of prompts for rollouts, the columns that the prompt does
    not use are those of the reward.
    """
    rows = 0
    kinds = Counter[str]()
    media = Counter[str]()
    unused = Counter[str]()
    for_reward = Counter[str]()
    left_out = 0
    for source, row_format in zip(sources, formats, strict=True):
        for index in _spread(len(source), SAMPLE):
            rows += 1
            try:
                row = read_row(source[index], row_format)
                kinds[row.format] += 1
                media.update(part.kind for part in row.media())
                spoken = sum(message.target is not None for message in row.messages)
                media.update({"spoken answers": spoken} if spoken else {})
                is_prompt = isinstance(row_format, RowFormat) and row_format.drops_answers
                (for_reward if is_prompt else unused).update(row.unused)
                left_out += 0 if reasoning_left_out is None else reasoning_left_out(row)
            except BadRow:
                kinds["bad"] += 1
    return {
        "rows": rows,
        "formats": dict(kinds.most_common()),
        "media": dict(media.most_common()),
        "unused_columns": dict(unused.most_common()),
        "reward_columns": dict(for_reward.most_common()),
        "reasoning_left_out": left_out,
    }


def _spread(length: int, count: int) -> list[int]:
    places = np.linspace(0, length - 1, min(length, count)).astype(int)
    return np.unique(places).tolist()


def length_stats(values: np.ndarray, unit: str) -> dict[str, Any] | None:
    """Minimum, median, mean, 95th percentile, maximum and a histogram with round bin widths."""
    if not len(values):
        return None
    low = int(values.min())
    high = int(values.max())
    width = _round_width(max(1.0, (high - low + 1) / BINS))
    first = low // width * width
    counts = np.bincount((values - first) // width).tolist()
    bins = []
    for i, rows in enumerate(counts):
        start = first + i * width
        bins.append({"from": start, "to": start + width - 1, "rows": rows})
    return {
        "unit": unit,
        "min": low,
        "median": int(np.quantile(values, 0.5, method="higher")),
        "mean": round(float(values.mean()), 1),
        "p95": int(np.quantile(values, 0.95, method="higher")),
        "max": high,
        "histogram": bins,
    }


def _round_width(least: float) -> int:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    power = 10 ** math.floor(math.log10(least))
    return int(next(step * power for step in (1, 2, 5, 10) if step * power >= least))


def count_bad(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Bad rows: their number, their number by reason, and the records themselves."""
    rows = list(records)
    reasons = Counter(record["reason"] for record in rows)
    return {"total": len(rows), "by_reason": dict(reasons.most_common()), "rows": rows}
