"""The cost of each row in tokens and encoder work: measured once, in worker processes, and cached on disk.

The cache (`cost_cache.py`) has three kinds of files. `.npz` are the finished costs of a source. `.rows` are the costs
of single rows by content: a start after a kill, or after some rows changed, measures only what is missing. `.sizes` are
the sizes of media files, which no setting changes. Keys hold the data, the processor, the template, the limits and
`ENCODER_VERSION`, never source text.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mvp_engine.errors import UserError
from mvp_engine.kit.data.cpus import num_processes
from mvp_engine.kit.data.encode.row_encoder import RowEncoder
from mvp_engine.kit.data.encode.sequences import TARGET
from mvp_engine.kit.data.pack.cost_cache import (
    ROW_RECORD,
    Costs,
    RecordFile,
    locked,
    read_costs,
    write_costs,
)
from mvp_engine.kit.data.pack.measure_workers import WorkerDied, map_chunks
from mvp_engine.kit.data.read.probe import SIZE_RECORD, SizeCache, row_key
from mvp_engine.kit.data.read.row_types import MEDIA, BadRow, ParsedRow, Part, Row, RowFormat
from mvp_engine.kit.data.read.rows import null_bits, null_rows, read_row
from mvp_engine.kit.data.read.sources import Source

LOGGER = logging.getLogger("mvp_engine")
CACHE_FORMAT = 2  # of the cache files: raise it when their arrays change
CHUNK_ROWS = 64  # rows that a process measures at a time
PROGRESS_SECONDS = 10

MEDIA_BITS = {"image": 1, "video": 2, "audio": 4, TARGET: 8}  # of cached files: never change them
# The cost of one row: (tokens, encoder work, media bits), or (reason, detail) of a bad row.
RowCost = tuple[int, int, int] | tuple[str, str]


class ChunkCosts(NamedTuple):
    """The costs of a chunk, and what to append to the record files."""

    costs: list[RowCost]
    new_rows: np.ndarray
    new_sizes: np.ndarray


class _ReadRow(NamedTuple):
    row: int
    content: Any  # parsed, so that encoding does not parse it again; a ParsedRow as it is
    key: bytes
    parts: list[Part]


@dataclass
class Measure:
    """Measures rows of a source by index. It is sent to the worker processes."""

    source: Source
    format: RowFormat | str | None
    row_encoder: RowEncoder
    fit: bool = False  # truncate or shrink over-long rows
    known: dict[bytes, RowCost] = field(default_factory=dict)  # by `row_key`
    sizes: SizeCache = field(default_factory=SizeCache)

    @property
    def setup(self) -> str:
        """What the costs of a row depend on, besides its content."""
        return f"{self.source.root} {self.format} {self.row_encoder.fingerprint}"

    def __call__(self, rows: Sequence[int]) -> ChunkCosts:
        costs: dict[int, RowCost] = {}
        unknown: list[_ReadRow] = []
        for row in rows:
            try:
                read = self._read(row)
            except BadRow as bad:
                costs[row] = bad.reason, bad.detail
                continue
            if read.key in self.known:
                costs[row] = self.known[read.key]
            else:
                unknown.append(read)
        media = self.row_encoder.media
        media.sizes = self.sizes
        try:
            media.read_sizes([part for read in unknown for part in read.parts], self.source.root)
            for read in unknown:
                costs[read.row] = self._measure_row(read)
        finally:
            media.sizes = None
        new_rows = []
        for read in unknown:
            cost = costs[read.row]
            if len(cost) == 3:
                new_rows.append((read.key, *cost))
        records = np.array(new_rows, ROW_RECORD)
        return ChunkCosts([costs[row] for row in rows], records, self.sizes.take_new())

    def _read(self, row: int) -> _ReadRow:
        try:
            raw = self.source[row]
            parsed = read_row(raw, self.format)
            parts: list[Part] = []
            for message in chain(parsed.messages, parsed.rejected):
                parts += [part for part in message.parts if part.kind in MEDIA]
            targets = [message.target for message in parsed.messages if message.target]
            limits = self.row_encoder.media.limits
            key = row_key(raw, [*parts, *targets], self.sizes, limits, self.source.root)
            return _ReadRow(row, raw if isinstance(raw, ParsedRow) else parsed, key, parts)
        except BadRow:
            raise
        except Exception as error:
            error.add_note(f"while reading {self.source.where(row)}")
            raise

    def _measure_row(self, read: _ReadRow) -> RowCost:
        try:
            sides = self.row_encoder.encode(read.content, self.format, self.source.root, self.fit)
            tokens = sum(side.num_positions for side in sides)
            kinds = {info.kind for info in chain.from_iterable(side.infos for side in sides)}
            if any(side.targets for side in sides):
                kinds.add(TARGET)
            media = sum(MEDIA_BITS[kind] for kind in kinds)
            if isinstance(read.content, Row):
                media += null_bits(read.content)
            return tokens, self.row_encoder.encoder_cost(sides), media
        except BadRow as bad:
            return bad.reason, bad.detail
        except Exception as error:
            error.add_note(f"while measuring {self.source.where(read.row)}")
            raise


def measure_costs(
    source: Source,
    format: RowFormat | str | None,
    row_encoder: RowEncoder,
    cache: Path,
    num_workers: int = 0,
    name: str = "data",
    since: float | None = None,
) -> Costs:
    """The costs of all rows of a source, from the cache where possible. `num_workers` is data.num_workers.

    Over-long rows are measured again as truncated or shrunk, if the encoder does that; those that stay over-long cost
    0 tokens, which drops them. Costs that were written after the time `since` are this start's own, ahead or of
    another rank.
    """
    measure = Measure(source, format, row_encoder)
    workers = num_processes(num_workers)
    setup = measure.setup
    whole = _cached(measure, range(len(source)), cache, setup, workers, name, since)
    long = np.flatnonzero(whole.tokens > row_encoder.max_tokens)
    arrays = (whole.tokens.copy(), whole.encoder.copy(), whole.media.copy())
    costs = Costs(*arrays, dict(whole.bad), long)
    unlike = null_rows(source, whole.media)
    if len(long) and row_encoder.overlong in ("truncate", "shrink"):
        measure.fit = True
        setup += f" {row_encoder.overlong} {row_encoder.max_tokens}"
        name = f"{name}, over-long rows"
        fitted = _cached(measure, long.tolist(), cache, setup, workers, name)
        costs.tokens[long] = fitted.tokens
        costs.encoder[long] = fitted.encoder
        costs.media[long] = fitted.media
        for index, (reason, detail) in fitted.bad.items():
            if reason != "overlong":
                costs.bad[int(long[index])] = reason, detail
    else:
        costs.tokens[long] = 0
        costs.encoder[long] = 0
        costs.media[long] = 0
    for row, why in unlike.items():
        costs.bad[row] = why
        costs.tokens[row] = costs.encoder[row] = costs.media[row] = 0
    return costs


def _cached(
    measure: Measure,
    rows: Sequence[int],
    cache: Path,
    setup: str,
    workers: int,
    name: str,
    since: float | None = None,
) -> Costs:
    """The costs of these rows from the cache file. Of several processes one measures, the others wait for it.

    Rows that were bad are measured again at each start, because their files may have been fixed since.
    """
    started = time.time() if since is None else since
    file = cost_file(measure, cache, setup)
    with locked(file.with_suffix(".lock"), name):
        if not file.exists():
            costs = Costs.zeros(len(rows))
            places: Sequence[int] = range(len(rows))
        else:
            costs = read_costs(file)
            measured_by_another = file.stat().st_mtime >= started
            if not costs.bad or measured_by_another:
                return costs
            places = sorted(costs.bad)
            costs.bad = {}
            name = f"{name}, bad rows again"
        _measure_into(costs, measure, places, rows, Records(cache, setup, measure), workers, name)
        write_costs(file, costs)
        return costs


def cost_file(measure: Measure, cache: Path, setup: str) -> Path:
    """The cache file of the finished costs; its folder exists."""
    cache.mkdir(parents=True, exist_ok=True)
    key = f"{CACHE_FORMAT} {measure.source.fingerprint} {setup}"
    return cache / f"{_hash(key)}.npz"


class Records:
    """The record files of one measurement."""

    def __init__(self, cache: Path, setup: str, measure: Measure) -> None:
        guard = measure.row_encoder.media.limits.image_pixels  # larger images have no size
        self.rows = RecordFile(cache / f"{_hash(setup)}.rows", ROW_RECORD)
        self.sizes = RecordFile(
            cache / f"{_hash(f'{measure.source.root} {guard}')}.sizes", SIZE_RECORD
        )
        self.cache = cache
        measure.known = {bytes(key): tuple(cost) for key, *cost in self.rows.read().tolist()}
        measure.sizes = SizeCache(self.sizes.read())

    def append(self, found: ChunkCosts) -> None:
        self.rows.append(found.new_rows)
        self.sizes.append(found.new_sizes)


def _measure_into(
    costs: Costs,
    measure: Measure,
    places: Sequence[int],
    rows: Sequence[int],
    records: Records,
    workers: int,
    name: str,
) -> None:
    """Measure `rows[place]` for each of the places, and write the result to that place of `costs`."""
    place_of = {rows[place]: place for place in places}
    wanted = list(place_of)
    chunks = [wanted[i : i + CHUNK_ROWS] for i in range(0, len(wanted), CHUNK_ROWS)]
    progress = Progress(name, len(wanted), workers, records.cache)
    try:
        with closing(map_chunks(measure, chunks, workers)) as results:
            for chunk, found in results:
                records.append(found)
                for row, cost in zip(chunk, found.costs, strict=True):
                    set_cost(costs, place_of[row], cost)
                progress.add(len(chunk))
    except WorkerDied as error:
        first = measure.source.where(error.rows[0])
        last = measure.source.where(error.rows[-1])
        raise UserError(
            f"data: {name}: a process died while it measured the rows from {first} to {last}. Out of memory? Then set "
            "data.num_workers=0, which measures in one process; or look at the rows with mvp data inspect --row"
        ) from None


def set_cost(costs: Costs, place: int, cost: RowCost) -> None:
    if len(cost) == 2:
        costs.bad[place] = cost
    else:
        costs.tokens[place] = cost[0]
        costs.encoder[place] = cost[1]
        costs.media[place] = cost[2]


class Progress:
    """A message every PROGRESS_SECONDS: how far, how long still, in how many processes, and where it is kept."""

    def __init__(self, name: str, total: int, workers: int, cache: Path) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self.started = time.monotonic()
        self.reported = self.started
        how = f"in {workers} processes" if workers else "in one process (data.num_workers=0)"
        self.how = f"{how}; kept in {cache}"

    def add(self, rows: int) -> None:
        self.done += rows
        now = time.monotonic()
        if now - self.reported < PROGRESS_SECONDS:
            return
        self.reported = now
        seconds_left = (now - self.started) / self.done * (self.total - self.done)
        LOGGER.info(
            "%s: measured %d of %d rows, about %.0f s left (%s)",
            self.name,
            self.done,
            self.total,
            seconds_left,
            self.how,
        )


def _hash(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
