"""The cost of each row in tokens and encoder work: measured once, in worker processes, and cached on disk.

The cache key holds the data, the processor, the template, the limits and `ENCODER_VERSION`, never source text.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mvp_engine.files import atomic_path
from mvp_engine.kit.data.encode.row_encoder import RowEncoder
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.sources import Source

LOGGER = logging.getLogger("mvp_engine")
CACHE_FORMAT = 2  # of the cache files: raise it when their arrays change
CHUNK_ROWS = 64  # rows that a process measures at a time
PROGRESS_SECONDS = 10


@dataclass
class Costs:
    """The costs of the rows of a source, by row index."""

    # int64; 0: the row is not trained on.
    tokens: np.ndarray
    # int64: the number of values that encoders read.
    encoder: np.ndarray
    # uint8: the kinds of media, as a sum of MEDIA_BITS.
    media: np.ndarray
    # Why a row is bad: (reason, detail).
    bad: dict[int, tuple[str, str]] = field(default_factory=dict)
    # Indices of the over-long rows.
    long: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def zeros(cls, rows: int) -> Costs:
        return cls(np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.zeros(rows, np.uint8))


MEDIA_BITS = {"image": 1, "video": 2, "audio": 4}  # of cached files: never change them
# The cost of one row: (tokens, encoder work, media bits), or (reason, detail) of a bad row.
RowCost = tuple[int, int, int] | tuple[str, str]


@dataclass
class Measure:
    """Measures rows of a source by index. It is sent to the worker processes."""

    source: Source
    format: RowFormat | str | None
    row_encoder: RowEncoder
    fit: bool = False  # truncate or shrink over-long rows

    def __call__(self, rows: Sequence[int]) -> list[RowCost]:
        return [self._measure_row(row) for row in rows]

    def _measure_row(self, row: int) -> RowCost:
        try:
            sides = self.row_encoder.encode(
                self.source[row], self.format, self.source.root, self.fit
            )
            tokens = sum(len(side.ids) for side in sides)
            kinds = {info.kind for info in chain.from_iterable(side.infos for side in sides)}
            media = sum(MEDIA_BITS[kind] for kind in kinds)
            return tokens, self.row_encoder.encoder_cost(sides), media
        except BadRow as bad:
            return bad.reason, bad.detail
        except Exception as error:
            error.add_note(f"while measuring {self.source.where(row)}")
            raise


def measure_costs(
    source: Source,
    format: RowFormat | str | None,
    row_encoder: RowEncoder,
    cache: Path,
    workers: int = 0,
    name: str = "data",
) -> Costs:
    """The costs of all rows of a source, from the cache where possible.

    Over-long rows are measured again as truncated or shrunk, if the encoder does that; otherwise they cost 0 tokens,
    which drops them.
    """
    measure = Measure(source, format, row_encoder)
    key = f"{CACHE_FORMAT} {source.fingerprint} {source.root} {format} {row_encoder.fingerprint}"
    whole = _cached(measure, range(len(source)), cache, key, workers, name)
    long = np.flatnonzero(whole.tokens > row_encoder.max_tokens)
    arrays = (whole.tokens.copy(), whole.encoder.copy(), whole.media.copy())
    costs = Costs(*arrays, dict(whole.bad), long)
    if len(long) and row_encoder.overlong in ("truncate", "shrink"):
        measure.fit = True
        key += f" {row_encoder.overlong} {row_encoder.max_tokens}"
        name = f"{name}, over-long rows"
        fitted = _cached(measure, long.tolist(), cache, key, workers, name)
        costs.tokens[long] = fitted.tokens
        costs.encoder[long] = fitted.encoder
        costs.media[long] = fitted.media
        for index, why in fitted.bad.items():
            costs.bad[int(long[index])] = why
    else:
        costs.tokens[long] = 0
        costs.encoder[long] = 0
        costs.media[long] = 0
    return costs


def _cached(
    measure: Measure, rows: Sequence[int], cache: Path, key: str, workers: int, name: str
) -> Costs:
    """The costs of these rows from the cache file. Of several processes one measures, the others wait for it.

    Rows that were bad are measured again at each start, because their files may have been fixed since.
    """
    started = time.time()
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.npz"
    with _locked(file.with_suffix(".lock")):
        if not file.exists():
            costs = Costs.zeros(len(rows))
            _measure_into(costs, measure, range(len(rows)), rows, workers, name)
            _write(file, costs)
            return costs
        costs = _read(file)
        measured_by_another = file.stat().st_mtime >= started
        if costs.bad and not measured_by_another:
            bad = sorted(costs.bad)
            costs.bad = {}
            _measure_into(costs, measure, bad, rows, workers, f"{name}, bad rows again")
            _write(file, costs)
        return costs


def _measure_into(
    costs: Costs,
    measure: Measure,
    places: Sequence[int],
    rows: Sequence[int],
    workers: int,
    name: str,
) -> None:
    """Measure `rows[place]` for each of the places, and write the result to that place of `costs`."""
    chunks = [places[i : i + CHUNK_ROWS] for i in range(0, len(places), CHUNK_ROWS)]
    row_chunks = []
    for chunk in chunks:
        row_chunks.append([rows[place] for place in chunk])
    reported = time.monotonic()
    done = 0
    for chunk, found in zip(chunks, _map_chunks(measure, row_chunks, workers), strict=True):
        for place, cost in zip(chunk, found, strict=True):
            if isinstance(cost[0], str):
                costs.bad[place] = cost[0], cost[1]
            else:
                costs.tokens[place] = cost[0]
                costs.encoder[place] = cost[1]
                costs.media[place] = cost[2]
        done += len(chunk)
        if time.monotonic() - reported > PROGRESS_SECONDS:
            reported = time.monotonic()
            LOGGER.info("%s: measured %d of %d rows", name, done, len(places))


# ---- Worker processes ---------------------------------------------------------------------------

_measure: Measure | None = None  # set in each worker process


def _start_worker(measure: Measure) -> None:
    global _measure
    _measure = measure
    # A forked process has none of torch's threads, and would wait for them in the first parallel operation.
    torch.set_num_threads(1)


def _run_chunk(rows: list[int]) -> list[Any]:
    assert _measure is not None
    return _measure(rows)


def _map_chunks(measure: Measure, chunks: list[list[int]], workers: int) -> Iterator[list[Any]]:
    """The costs of each chunk, in order; in this process where a pool is not worth its start.

    `ProcessPoolExecutor` raises when a worker dies; `multiprocessing.Pool` would wait forever.
    """
    if not workers or len(chunks) < 2:
        yield from map(measure, chunks)
        return
    context = multiprocessing.get_context("fork")
    num_workers = min(workers, len(chunks))
    with ProcessPoolExecutor(num_workers, context, _start_worker, (measure,)) as pool:
        done = 0
        try:
            for found in pool.map(_run_chunk, chunks):
                yield found
                done += 1
        except BrokenProcessPool as error:
            last_chunk = chunks[min(done + workers, len(chunks) - 1)]
            first = measure.source.where(chunks[min(done, len(chunks) - 1)][0])
            last = measure.source.where(last_chunk[-1])
            error.add_note(
                f"a process died while measuring rows between about {first} and {last}: out of memory?"
            )
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# ---- The cache file -----------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock that the operating system releases even if this process is killed."""
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(file: Path, costs: Costs) -> None:
    bad = [[row, reason, detail] for row, (reason, detail) in sorted(costs.bad.items())]
    encoded = json.dumps(bad).encode(errors="surrogatepass")
    bad_bytes = np.frombuffer(encoded, np.uint8)
    with atomic_path(file) as temporary, open(temporary, "wb") as out:
        np.savez(
            out,
            tokens=costs.tokens,
            encoder=costs.encoder,
            media=costs.media,
            bad=bad_bytes,
        )


def _read(file: Path) -> Costs:
    with np.load(file, allow_pickle=False) as found:
        bad = {row: (reason, detail) for row, reason, detail in json.loads(found["bad"].tobytes())}
        return Costs(found["tokens"], found["encoder"], found["media"], bad)
