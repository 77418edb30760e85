"""`mvp data inspect` on streams: the first rows of each. The rest is known only once it is read."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.errors import UserError
from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.tools import inspect_stats
from mvp_engine.tools.inspect_rows import bad_reason, encoded_row
from mvp_engine.tools.inspect_stats import count_bad, length_stats, sample_rows


class _StreamRow:
    """One row of a stream, in the place of a source that holds only this row."""

    def __init__(self, place: str, root: Path) -> None:
        self.place = place
        self.root = root
        self.raw: Any = None  # the row, or the BadRow that reading it raised

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> Any:
        if isinstance(self.raw, BadRow):
            raise self.raw
        return self.raw

    def where(self, _: int) -> str:
        return self.place


class _Counts:
    """What was counted over all streams so far."""

    def __init__(self) -> None:
        self.rows = 0
        self.formats = Counter[str]()
        self.media = Counter[str]()
        self.unused = Counter[str]()
        self.reasoning_left_out = 0
        self.lengths = list[int]()
        self.bad = list[dict[str, Any]]()
        self.overlong = list[str]()  # their places
        self.sources = list[dict[str, Any]]()
        self.shown = list[dict[str, Any]]()

    def add_sample(
        self, row: _StreamRow, row_format: RowFormat | str | None, kit: MLLMDataKit
    ) -> None:
        found = sample_rows([row], [row_format], kit.row_encoder.template.reasoning_left_out)
        self.rows += found["rows"]
        self.formats += Counter(found["formats"])
        self.media += Counter(found["media"])
        self.unused += Counter(found["unused_columns"])
        self.reasoning_left_out += found["reasoning_left_out"]


def inspect_streams(kit: MLLMDataKit, split: str, *, limit: int, row: str | None) -> dict[str, Any]:
    """The facts of `inspect_kit` for streams, over the first SAMPLE rows of each."""
    counts = _Counts()
    shares = kit.stream_shares(split)
    for stream in kit.streams(split):
        _inspect_stream(kit, stream, counts, limit, row)
        counts.sources[-1]["share"] = round(shares[stream.name], 4)
    most = inspect_stats.SAMPLE
    if row is not None and not counts.shown:
        raise UserError(f"--row {row}: not among the first {most:,} rows of a stream")
    return {
        "split": split,
        "missing": f"a packing plan: streams have none, and only the first {most:,} rows of each were read",
        "decoded": False,
        "sources": counts.sources,
        "sample": {
            "rows": counts.rows,
            "formats": counts.formats,
            "media": counts.media,
            "unused_columns": counts.unused,
            "reasoning_left_out": counts.reasoning_left_out,
        },
        "lengths": length_stats(np.array(counts.lengths, np.int64), "tokens"),
        "plan": None,
        "overlong": {
            "fate": kit.settings.overlong,
            "rows": len(counts.overlong),
            "where": counts.overlong,
        },
        "bad": count_bad(counts.bad),
        "rows": counts.shown,
    }


def _inspect_stream(
    kit: MLLMDataKit, stream: Any, counts: _Counts, limit: int, wanted: str | None
) -> None:
    lengths = list[int]()
    bad = list[dict[str, Any]]()
    overlong = list[str]()
    rows = 0
    for place, read in islice(stream, inspect_stats.SAMPLE):
        row = _StreamRow(place, stream.root)
        try:
            row.raw = read()
            sequences = kit.row_encoder.encode(row.raw, stream.format, stream.root)
            lengths.append(sum(len(sequence.ids) for sequence in sequences))
        except BadRow as error:
            row.raw = row.raw or error
            if error.reason == "overlong":
                overlong.append(place)
            else:
                bad.append({"source": stream.name, "where": place, **bad_reason(error)})
        index = counts.rows
        counts.add_sample(row, stream.format, kit)
        is_shown = rows < limit if wanted is None else wanted in (str(index), place)
        if is_shown:
            facts = encoded_row(kit.row_encoder, row, 0, stream.format)
            counts.shown.append({"row": index, "source": stream.name, **facts})
        rows += 1
    counts.lengths += lengths
    counts.bad += bad
    counts.overlong += overlong
    counts.sources.append(
        {
            "name": stream.name,
            "rows": rows,
            "good": len(lengths),
            "bad": len(bad),
            "overlong": len(overlong),
            "tokens": sum(lengths),
            "share": None,
        }
    )
