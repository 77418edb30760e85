"""What each row costs, found once and kept on disk; and from that, which rows go into which pack of which step.

The plan of an epoch follows from (seed, epoch), the costs and two sizes, never from the number of ranks. So each rank
makes the same one and takes its stride, and a cursor into it is right on any number of ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from mvp_engine.batch import PackedBatch
from mvp_engine.data import derived_seed
from mvp_engine.kit.data.rows import BadRow
from mvp_engine.kit.data.samples import Sampler
from mvp_engine.kit.data.sources import Mixture, Source

LOGGER = logging.getLogger("mvp_engine")
WINDOW = 1024  # packs that are filled together: enough for hardly a gap, few enough that neighbours differ by epoch
PATCH = 1024  # numbers that an encoder reads, for about the work of one token
CHUNK = 64  # rows that a process takes at a time


# Costs


@dataclass
class Costs:
    """Of the rows of a source, by index."""

    tokens: np.ndarray  # int64; 0: not to be trained on
    encoder: np.ndarray  # int64: numbers that encoders read
    bad: dict[int, tuple[str, str]] = field(default_factory=dict)  # why not: reason, detail
    long: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # rows that were over-long


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
            prepared = self.sampler.prepare(self.source[row], self.format, self.source.root, self.fit)
            return len(prepared.ids), self.sampler.encoder_cost(prepared)
        except BadRow as bad:
            return bad.reason, bad.detail
        except Exception as error:
            error.add_note(f"while measuring {self.source.where(row)}")
            raise


def find_costs(
    source: Source, format: str | None, sampler: Sampler, cache: Path, workers: int = 0, name: str = "data"
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


def _cached(measure: Measure, rows: Sequence[int], cache: Path, key: str, workers: int, name: str) -> Costs:
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


def _fill(costs: Costs, measure: Measure, places: Sequence[int], rows: Sequence[int], workers: int, name: str) -> None:
    """Measure the rows that these places in `costs` stand for."""
    told, done = time.monotonic(), 0
    chunks = [places[i : i + CHUNK] for i in range(0, len(places), CHUNK)]
    for chunk, found in zip(chunks, _each(measure, [[rows[i] for i in c] for c in chunks], workers), strict=True):
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
                measure.source.where(chunks[min(done + i, len(chunks) - 1)][j]) for i, j in ((0, 0), (workers, -1))
            )
            error.add_note(f"a process died while measuring rows between about {first} and {last}: out of memory?")
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system gives it back whatever becomes of this process
        yield


def _write(file: Path, costs: Costs) -> None:
    bad = json.dumps([[place, *why] for place, why in sorted(costs.bad.items())]).encode(errors="surrogatepass")
    beside = file.with_suffix(f".{os.getpid()}.tmp")
    with open(beside, "wb") as out:
        np.savez(out, tokens=costs.tokens, encoder=costs.encoder, bad=np.frombuffer(bad, np.uint8))
    os.replace(beside, file)


def _read(file: Path) -> Costs:
    with np.load(file, allow_pickle=False) as found:
        bad = json.loads(found["bad"].tobytes())
        return Costs(found["tokens"], found["encoder"], {place: (reason, detail) for place, reason, detail in bad})


# Packs


@dataclass(frozen=True)
class Plan:
    """An epoch: pack i is `rows[ends[i - 1] : ends[i]]`, pairs (source, row)."""

    rows: np.ndarray
    ends: np.ndarray
    tokens: np.ndarray  # of each row, as planned
    budget: int
    packs_per_step: int

    def __len__(self) -> int:
        return len(self.ends)

    def pack(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Its rows, and their tokens."""
        part = slice(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))
        return self.rows[part], self.tokens[part]

    @property
    def steps(self) -> int:
        return -(-len(self) // self.packs_per_step)

    @property
    def fill(self) -> float:
        """The share of all packs' budgets that holds tokens."""
        return int(self.tokens.sum()) / max(1, len(self) * self.budget)

    @cached_property
    def digest(self) -> str:
        sizes = np.array([self.budget, self.packs_per_step])
        parts = [np.ascontiguousarray(part, np.int64).tobytes() for part in (sizes, self.ends, self.rows, self.tokens)]
        return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def make_plan(
    order: np.ndarray,
    tokens: np.ndarray,
    encoder: np.ndarray,
    *,
    budget: int,
    packs_per_step: int,
    shuffle: np.random.Generator | None = None,
) -> Plan:
    """Packs of an epoch's rows (`order`, pairs; their costs beside it), in steps of packs with about equal work.

    Inside a step the packs are sorted by work, so that those which ranks take side by side are the most alike.
    """
    packs = make_packs(tokens, budget)
    if shuffle is not None:
        packs = [packs[i] for i in shuffle.permutation(len(packs))]
    work = tokens + encoder // PATCH
    works = [int(work[pack].sum()) for pack in packs]
    steps = (range(i, min(i + packs_per_step, len(packs))) for i in range(0, len(packs), packs_per_step))
    packs = [packs[i] for step in steps for i in sorted(step, key=lambda i: -works[i])]
    flat = np.array([row for pack in packs for row in pack], np.int64)
    ends = np.cumsum([len(pack) for pack in packs], dtype=np.int64)
    return Plan(order[flat].astype(np.int64), ends, tokens[flat], budget, packs_per_step)


def make_packs(tokens: np.ndarray, budget: int, window: int = WINDOW) -> list[list[int]]:
    """Indices in packs of at most `budget` tokens: best-fit decreasing, among rows that follow one another."""
    if len(tokens) and not 0 < int(tokens.min()) <= int(tokens.max()) <= budget:
        raise ValueError(f"rows of {tokens.min()} to {tokens.max()} tokens do not fit packs of {budget}")
    groups = (np.cumsum(tokens) - 1) // (window * budget)
    borders = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(tokens)]
    return [pack for start, end in pairwise(borders) for pack in _fit(tokens, start, end, budget)]


def _fit(tokens: np.ndarray, start: int, end: int, budget: int) -> Iterable[list[int]]:
    sizes = tokens[start:end]
    packs: list[list[int]] = []
    least, base = int(sizes.min(initial=budget)), len(sizes)
    rooms: list[int] = []  # room * base + pack of those that are open, in order
    for i in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[i])
        at = bisect_left(rooms, size * base)
        if at < len(rooms):
            room, pack = divmod(rooms.pop(at), base)
        else:
            room, pack = budget, len(packs)
            packs.append([])
        packs[pack].append(start + i)
        if room - size >= least:
            insort(rooms, (room - size) * base + pack)
    return [sorted(pack) for pack in packs]


# Loading


@dataclass(frozen=True)
class BadRecord:
    source: str
    where: str  # file and line, or what the file has in the place of lines
    reason: str
    detail: str


class PackDataset(Dataset[Any]):
    """The packs of an epoch: item i is (PackedBatch, the rows that turned out bad and were left out)."""

    def __init__(
        self,
        mixture: Mixture,
        formats: list[str | None],
        costs: list[Costs],
        sampler: Sampler,
        *,
        budget: int,
        packs_per_step: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.mixture, self.formats, self.costs, self.sampler = mixture, formats, costs, sampler
        self.budget, self.packs_per_step, self.seed, self.shuffle = budget, packs_per_step, seed, shuffle
        self.first = np.cumsum([0, *(len(source) for source in mixture.sources)])  # sample ids count through all
        self.epoch = -1
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.plan = epoch, self.make_plan(epoch)

    def make_plan(self, epoch: int) -> Plan:
        order = self.mixture.order(self.seed, epoch, self.shuffle)
        flat = self.first[order[:, 0]] + order[:, 1]
        tokens = np.concatenate([costs.tokens for costs in self.costs])[flat]
        encoder = np.concatenate([costs.encoder for costs in self.costs])[flat]
        good = tokens > 0
        shuffle = np.random.default_rng(derived_seed(self.seed, "packs", epoch)) if self.shuffle else None
        sizes = {"budget": self.budget, "packs_per_step": self.packs_per_step}
        return make_plan(order[good], tokens[good], encoder[good], **sizes, shuffle=shuffle)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> tuple[PackedBatch, list[BadRecord]]:
        pairs, planned = self.plan.pack(index)
        room = self.budget - int(planned.sum())
        batches, bad = [], []
        for (which, row), tokens in zip(pairs.tolist(), planned.tolist(), strict=True):
            source: Source = self.mixture.sources[which]
            fields = {"source": which, "sample": int(self.first[which]) + row}
            try:
                prepared = self.sampler.prepare(source[row], self.formats[which], source.root)
                room -= max(0, more := len(prepared.ids) - tokens)
                if room < 0:  # a template may write today's date; but a pack never grows past its budget
                    room += more
                    raise BadRow("changed", f"{len(prepared.ids)} tokens, but {tokens} when it was planned")
                batches.append(self.sampler.load(prepared, source.root, fields))
            except BadRow as error:
                bad.append(BadRecord(self.mixture.names[which], source.where(row), error.reason, error.detail))
            except Exception as error:
                error.add_note(f"while reading {source.where(row)}")
                raise
        batches = batches or [self.sampler.nothing({"source": 0, "sample": -1})]
        return (PackedBatch.concat(batches) if len(batches) > 1 else batches[0]), bad
