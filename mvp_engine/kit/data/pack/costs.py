"""What each row costs in tokens and encoder work: found once, in processes, and kept on disk."""

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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mvp_engine.files import atomic_path
from mvp_engine.kit.data.encode.row_encoder import Sampler
from mvp_engine.kit.data.read.rows import BadRow
from mvp_engine.kit.data.read.sources import Source

LOGGER = logging.getLogger("mvp_engine")
CHUNK = 64  # rows that a process takes at a time


@dataclass
class Costs:
    """Of the rows of a source, by index."""

    tokens: np.ndarray  # int64; 0: not to be trained on
    encoder: np.ndarray  # int64: numbers that encoders read
    bad: dict[int, tuple[str, str]] = field(default_factory=dict)  # why not: reason, detail
    long: np.ndarray = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # rows that were over-long


@dataclass
class Measure:
    """How to find the costs of a source's rows; goes to the processes that do it."""

    source: Source
    format: str | None
    sampler: Sampler
    fit: bool = False  # cut or shrink over-long rows

    def __call__(self, rows: Sequence[int]) -> list[tuple[int, int] | tuple[str, str]]:
        return [self._one(row) for row in rows]

    def _one(self, row: int) -> tuple[int, int] | tuple[str, str]:
        try:
            sides = self.sampler.prepare(self.source[row], self.format, self.source.root, self.fit)
            return sum(len(side.ids) for side in sides), self.sampler.encoder_cost(sides)
        except BadRow as bad:
            return bad.reason, bad.detail
        except Exception as error:
            error.add_note(f"while measuring {self.source.where(row)}")
            raise


def find_costs(
    source: Source,
    format: str | None,
    sampler: Sampler,
    cache: Path,
    workers: int = 0,
    name: str = "data",
) -> Costs:
    """The costs of all rows, over-long ones dealt with as the sampler is told, save for "error"."""
    measure = Measure(source, format, sampler)
    key = f"{source.fingerprint} {source.root} {format} {sampler.fingerprint}"
    costs = _cached(measure, range(len(source)), cache, key, workers, name)
    long = np.flatnonzero(costs.tokens > sampler.most_tokens)
    tokens, encoder, bad = costs.tokens.copy(), costs.encoder.copy(), dict(costs.bad)
    if len(long) and sampler.overlong in ("truncate", "shrink"):
        measure.fit = True
        key += f" {sampler.overlong} {sampler.most_tokens}"
        again = _cached(measure, long.tolist(), cache, key, workers, f"{name}, over-long rows")
        tokens[long], encoder[long] = again.tokens, again.encoder
        bad |= {int(long[i]): why for i, why in again.bad.items()}
    else:
        tokens[long] = encoder[long] = 0
    return Costs(tokens, encoder, bad, long)


def _cached(
    measure: Measure, rows: Sequence[int], cache: Path, key: str, workers: int, name: str
) -> Costs:
    """Of several processes that want the same, one does it and the others wait for it.

    Rows that were bad are looked at once more at each start, since their files may have been mended.
    """
    asked = time.time()
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.npz"
    with _locked(file.with_suffix(".lock")):
        if not file.exists():
            costs = Costs(np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64))
            _fill(costs, measure, range(len(rows)), rows, workers, name)
            _write(file, costs)
            return costs
        costs = _read(file)
        if costs.bad and file.stat().st_mtime < asked:
            again = sorted(costs.bad)
            costs.bad = {}
            _fill(costs, measure, again, rows, workers, f"{name}, bad rows again")
            _write(file, costs)
        return costs


def _fill(
    costs: Costs,
    measure: Measure,
    places: Sequence[int],
    rows: Sequence[int],
    workers: int,
    name: str,
) -> None:
    """Measure the rows that these places in `costs` stand for."""
    told, done = time.monotonic(), 0
    chunks = [places[i : i + CHUNK] for i in range(0, len(places), CHUNK)]
    for chunk, found in zip(
        chunks, _each(measure, [[rows[i] for i in c] for c in chunks], workers), strict=True
    ):
        for place, (one, two) in zip(chunk, found, strict=True):
            if isinstance(one, str):
                costs.bad[place] = one, str(two)
            else:
                costs.tokens[place], costs.encoder[place] = one, two
        done += len(chunk)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            LOGGER.info("%s: measured %d of %d rows", name, done, len(places))


_measure: Measure | None = None  # of a process that measures


def _begin(measure: Measure) -> None:
    global _measure
    _measure = measure
    torch.set_num_threads(
        1
    )  # the parent's threads are not here: one that computes would wait for them


def _run(rows: list[int]) -> list[Any]:
    assert _measure is not None
    return _measure(rows)


def _each(measure: Measure, chunks: list[list[int]], workers: int) -> Iterator[list[Any]]:
    """In processes where it is worth their start. One that dies is an error here, where a Pool would wait for ever."""
    if not workers or len(chunks) < 2:
        yield from map(measure, chunks)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(workers, len(chunks)), context, _begin, (measure,)) as pool:
        done = 0
        try:
            for found in pool.map(_run, chunks):
                yield found
                done += 1
        except BrokenProcessPool as error:
            first, last = (
                measure.source.where(chunks[min(done + i, len(chunks) - 1)][j])
                for i, j in ((0, 0), (workers, -1))
            )
            error.add_note(
                f"a process died while measuring rows between about {first} and {last}: out of memory?"
            )
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with open(file, "w") as lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # the system gives it back whatever becomes of this process
        yield


def _write(file: Path, costs: Costs) -> None:
    bad = json.dumps([[place, *why] for place, why in sorted(costs.bad.items())]).encode(
        errors="surrogatepass"
    )
    with atomic_path(file) as temporary, open(temporary, "wb") as out:
        np.savez(out, tokens=costs.tokens, encoder=costs.encoder, bad=np.frombuffer(bad, np.uint8))


def _read(file: Path) -> Costs:
    with np.load(file, allow_pickle=False) as found:
        bad = json.loads(found["bad"].tobytes())
        return Costs(
            found["tokens"],
            found["encoder"],
            {place: (reason, detail) for place, reason, detail in bad},
        )
