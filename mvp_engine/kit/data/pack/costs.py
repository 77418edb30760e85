"""The cost of each row in tokens and encoder work: measured once, in worker processes, and cached on disk.

The cache has three kinds of files. `.npz` are the finished costs of a source. `.rows` are the costs
of single rows by content: a start after a kill, or after some rows changed, measures only what is missing. `.sizes` are
the sizes of media files, which no setting changes. Keys hold the data, the processor, the template, the limits and
`ENCODER_VERSION`, never source text.

The files of the cost cache: finished costs of a source, records of rows and media sizes, and their locks.

A record file only grows, so what was measured before a kill is kept. Locks are record locks: `flock` would be inherited
by worker processes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import mmap
import multiprocessing
import os
import signal
import socket
import time
import traceback
import zipfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from mvp_engine.errors import UserError
from mvp_engine.files import atomic_path
from mvp_engine.kit.data.cpus import num_processes
from mvp_engine.kit.data.encode.row_encoder import TARGET, EncodedSequence, RowEncoder
from mvp_engine.kit.data.read.probe import SIZE_RECORD, SizeCache, row_key
from mvp_engine.kit.data.read.row_types import MEDIA, BadRow, ParsedRow, Part, Row, RowFormat
from mvp_engine.kit.data.read.rows import null_bits, null_rows, read_row
from mvp_engine.kit.data.read.sources import Source
from mvp_engine.process.watchdog import end_with_this_process

LOGGER = logging.getLogger("mvp_engine")
POLL_SECONDS = 0.1
FIRST_REPORT_SECONDS = 1.0  # of waiting; ranks of one job usually start within this time
REPORT_SECONDS = 60.0  # between two messages about the same wait

# One row of a record file: never change it, take another file name instead.
ROW_RECORD = np.dtype(
    [
        ("row", "V16"),  # `row_key`
        ("tokens", "<i8"),
        ("encoder", "<i8"),
        ("media", "u1"),
    ]
)


def default_cache() -> Path:
    """The folder of the cache where `data.cache` is null."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "mvp_engine" / "data"


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
    # Of the file that has them, for the names of stored plans; empty: they are in memory alone.
    version: str = ""

    @classmethod
    def zeros(cls, rows: int) -> Costs:
        return cls(np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.zeros(rows, np.uint8))


def write_costs(file: Path, costs: Costs) -> None:
    bad = [[row, reason, detail] for row, (reason, detail) in sorted(costs.bad.items())]
    encoded = json.dumps(bad).encode(errors="surrogatepass")
    bad_bytes = np.frombuffer(encoded, np.uint8)
    more: dict[str, Any] = {"long": costs.long} if len(costs.long) else {}
    with atomic_path(file) as temporary, open(temporary, "wb") as out:
        np.savez(
            out,
            tokens=costs.tokens,
            encoder=costs.encoder,
            media=costs.media,
            bad=bad_bytes,
            **more,
        )
    costs.version = _version(file)


def read_costs(file: Path) -> Costs:
    """The costs in a file: those of many rows are memory-mapped, so that a process reads what it uses."""
    found = map_arrays(file, smallest=MAPPED_BYTES)
    bad = {row: (reason, detail) for row, reason, detail in json.loads(found["bad"].tobytes())}
    costs = Costs(found["tokens"], found["encoder"], found["media"], bad, version=_version(file))
    if "long" in found:  # of prepared rows
        costs.long = found["long"]
    return costs


def _version(file: Path) -> str:
    about = file.stat()
    return f"{file.name} {about.st_size} {about.st_mtime_ns}"


def map_arrays(file: Path, smallest: int = 1 << 16) -> dict[str, np.ndarray]:
    """The arrays that `np.savez` wrote: memory-mapped, and read where they have less than `smallest` bytes.

    Only the pages that are used are read, without the pages around them.
    """
    found: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(file) as archive, open(file, "rb") as data:
        for info in archive.infolist():
            data.seek(info.header_offset + 26)
            name_and_extra = np.frombuffer(data.read(4), "<u2").sum(dtype=int)
            data.seek(name_and_extra, os.SEEK_CUR)
            np.lib.format.read_magic(data)
            shape, _, dtype = np.lib.format.read_array_header_1_0(data)
            name = info.filename.removesuffix(".npy")
            size = math.prod(shape)
            if size * dtype.itemsize < smallest:
                array = np.frombuffer(data.read(size * dtype.itemsize), dtype)
                found[name] = array.reshape(shape).copy()
                continue
            array = np.memmap(file, dtype, "r", data.tell(), shape)
            array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
            found[name] = array
    return found


class RecordFile:
    """Records of one dtype in a file that any process may append to."""

    def __init__(self, file: Path, dtype: np.dtype) -> None:
        self.file = file
        self.dtype = dtype

    def read(self) -> np.ndarray:
        data = self.file.read_bytes() if self.file.exists() else b""
        whole = len(data) - len(data) % self.dtype.itemsize
        return np.frombuffer(data[:whole], self.dtype)

    def append(self, records: np.ndarray) -> None:
        if not len(records):
            return
        with open(self.file, "ab") as out:
            fcntl.lockf(out, fcntl.LOCK_EX)  # released when the file is closed
            end = out.seek(0, os.SEEK_END)
            out.truncate(end - end % self.dtype.itemsize)  # a record that a kill cut off
            out.write(records.tobytes())


@contextmanager
def locked(file: Path, name: str, doing: str = "measures the same rows") -> Iterator[None]:
    """Hold a lock that ends with this process, however it ends. A wait is reported with its reason."""
    with open(file, "a+") as lock:
        started = time.monotonic()
        report_at = started + FIRST_REPORT_SECONDS
        while not _try_lock(lock):
            if time.monotonic() >= report_at:
                report_at = time.monotonic() + REPORT_SECONDS
                lock.seek(0)
                owner = lock.read().strip() or "another process"
                LOGGER.info(
                    "%s: waiting for %s, which %s (for %.0f s now; the lock is %s)",
                    name,
                    owner,
                    doing,
                    time.monotonic() - started,
                    file,
                )
            time.sleep(POLL_SECONDS)
        _sign(lock)
        yield


def try_locked(file: Path) -> IO[str] | None:
    """The lock of `locked`, held until the returned file is closed; None if another process has it."""
    lock = open(file, "a+")  # noqa: SIM115 - the caller closes it
    if not _try_lock(lock):
        lock.close()
        return None
    _sign(lock)
    return lock


def _sign(lock: IO[str]) -> None:
    """Name the owner in the file, for those who wait."""
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()


def _try_lock(file: object) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
    except (BlockingIOError, PermissionError):
        return False
    return True


Chunk = list[int]


def map_chunks(
    measure: Callable[[Chunk], Any], chunks: list[Chunk], workers: int
) -> Generator[tuple[Chunk, Any], None, None]:
    """Each chunk with its result, as they are finished; in this process where workers are not worth their start."""
    if not workers or len(chunks) < 2:
        for chunk in chunks:
            yield chunk, measure(chunk)
        return
    pool = MeasureWorkers(measure, chunks, workers)
    try:
        yield from pool.results()
    finally:
        pool.kill()


class MeasureWorkers:
    """Processes that are forked here and now; their results may be taken by another thread."""

    def __init__(self, measure: Callable[[Any], Any], chunks: Sequence[Any], workers: int) -> None:
        self._left = iter(chunks)
        self._busy: dict[Any, Any] = {}
        self._processes: list[Any] = []
        context = multiprocessing.get_context("fork")
        try:
            for _ in range(min(workers, len(chunks))):
                ours, theirs = context.Pipe()
                arguments = (measure, theirs, end_with_this_process())
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                self._processes.append(process)
                theirs.close()
                _give(ours, next(self._left, None), self._busy)
        except BaseException:
            self.kill()
            raise

    def results(self) -> Iterator[tuple[Any, Any]]:
        """Each chunk with its result, as they are finished."""
        while self._busy:
            for connection in wait(list(self._busy)):
                chunk = self._busy.pop(connection)
                found = _receive(connection, chunk)
                _give(connection, next(self._left, None), self._busy)
                yield chunk, found

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


class WorkerDied(Exception):
    """A worker process ended without a result; `rows` are those that it was measuring."""

    def __init__(self, rows: Chunk) -> None:
        super().__init__(rows)
        self.rows = rows


def _give(connection: Any, chunk: Chunk | None, busy: dict[Any, Chunk]) -> None:
    if chunk is not None:
        busy[connection] = chunk
        try:
            connection.send(chunk)
        except BrokenPipeError:
            raise WorkerDied(chunk) from None


def _receive(connection: Any, chunk: Chunk) -> Any:
    try:
        found = connection.recv()
    except (EOFError, ConnectionResetError):
        raise WorkerDied(chunk) from None
    if isinstance(found, BaseException):
        raise found
    return found


def _work(
    measure: Callable[[Chunk], Any], connection: Connection, end_with_parent: Callable[[], None]
) -> None:
    end_with_parent()
    # The parent stops its workers itself. A handler inherited from it would report a Ctrl-C to it once more.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A forked process has none of torch's threads, and would wait for them in the first parallel operation.
    torch.set_num_threads(1)
    while True:
        chunk = connection.recv()
        try:
            found = measure(chunk)
        except Exception as error:  # noqa: BLE001 - raised again by the parent
            error.add_note(traceback.format_exc())
            found = error
        connection.send(found)


MAPPED_BYTES = 1 << 20  # arrays that are larger are memory-mapped
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

    def keep(self, row: int, sides: Sequence[EncodedSequence]) -> None:
        """Called with each row that is encoded; `mvp data prepare` writes it."""

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
            self.keep(read.row, sides)
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
    unlike = null_rows(source, whole.media)
    arrays = whole.tokens, whole.encoder, whole.media
    if len(long) or unlike:
        arrays = whole.tokens.copy(), whole.encoder.copy(), whole.media.copy()
    costs = Costs(*arrays, dict(whole.bad), long, whole.version)
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
    elif len(long):
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
            costs.tokens, costs.encoder, costs.media = (
                np.array(one) for one in (costs.tokens, costs.encoder, costs.media)
            )
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
        self.rows = RecordFile(cache / f"{_hash(setup)}.rows", ROW_RECORD)
        self.sizes = RecordFile(cache / f"{_hash(str(measure.source.root))}.sizes", SIZE_RECORD)
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
    """A message every PROGRESS_SECONDS: how far, how long still, in how many processes, and where it is kept.

    The first chunk of each process takes longer, since it also opens files and imports. It is in no estimate.
    """

    def __init__(self, name: str, total: int, workers: int, cache: Path) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self.reported = time.monotonic()
        self.warmup = CHUNK_ROWS * max(1, workers)  # rows
        self.warm: tuple[int, float] | None = None  # rows and time after the warm-up
        how = f"in {workers} processes" if workers else "in one process (data.num_workers=0)"
        self.how = f"{how}; kept in {cache}"

    def add(self, rows: int) -> None:
        self.done += rows
        now = time.monotonic()
        left = ""
        if self.warm is None:
            self.warm = (self.done, now) if self.done >= self.warmup else None
        else:
            done, since = self.warm
            left = f", about {(now - since) / (self.done - done) * (self.total - self.done):.0f} s left"
        if now - self.reported >= PROGRESS_SECONDS:
            self.reported = now
            LOGGER.info(
                "%s: measured %d of %d rows%s (%s)",
                self.name,
                self.done,
                self.total,
                left,
                self.how,
            )


def _hash(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
