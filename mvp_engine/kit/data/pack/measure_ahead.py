"""Costs of rows measured ahead: worker processes fill the cost cache while this process builds the model.

The processes are forked at once, by the caller's thread. One that is forked later, while another thread imports or
allocates, could inherit a lock that nobody releases. A thread takes their results and writes the cache. It raises
nothing: `measure_costs` comes afterwards, reads what is there, measures the rest, and raises what went wrong.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from mvp_engine.kit.data.pack.cost_cache import Costs, try_locked, write_costs
from mvp_engine.kit.data.pack.costs import (
    CHUNK_ROWS,
    ChunkCosts,
    Measure,
    Progress,
    Records,
    cost_file,
    set_cost,
)
from mvp_engine.kit.data.pack.measure_workers import MeasureWorkers


class _Chunk(NamedTuple):
    source: int  # which of the measured sources
    rows: range


class MeasureAhead:
    """Sources, as (name, `Measure`), that are being measured into the cache, unless they are in it already.

    Of several processes one measures a source. The others start nothing for it, and wait in `measure_costs`.
    """

    def __init__(self, sources: Sequence[tuple[str, Measure]], cache: Path, workers: int) -> None:
        self._sources = []
        if workers:
            for name, measure in sources:
                file = cost_file(measure, cache, measure.setup)
                lock = None if file.exists() else try_locked(file.with_suffix(".lock"))
                if lock is not None:
                    self._sources.append(_Source(name, measure, cache, file, lock, workers))
        chunks = []
        for index, source in enumerate(self._sources):
            for start in range(0, source.left, CHUNK_ROWS):
                chunks.append(_Chunk(index, range(start, min(start + CHUNK_ROWS, source.left))))
        # Fewer chunks are measured faster than processes start.
        is_long = len(chunks) > 1
        self._workers = MeasureWorkers(self._measure, chunks, workers) if is_long else None
        self._thread = threading.Thread(target=self._take_results, name="mvp-measure", daemon=True)
        self._thread.start()

    def __bool__(self) -> bool:
        """Whether there was anything to measure."""
        return self._workers is not None

    @property
    def is_running(self) -> bool:
        return self._workers is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until all is measured, or something failed."""
        self._thread.join()

    def stop(self) -> None:
        """End the processes now. What they have measured is kept."""
        if self._workers is not None and self._thread.is_alive():
            self._workers.kill()
        self._thread.join()

    def _measure(self, chunk: _Chunk) -> ChunkCosts:
        return self._sources[chunk.source].measure(chunk.rows)

    def _take_results(self) -> None:
        try:
            # Whatever fails here, a process that died or a full disk, fails again in `measure_costs`.
            with contextlib.suppress(Exception):
                for chunk, found in self._workers.results() if self._workers else ():
                    self._sources[chunk.source].add(chunk.rows, found)
        finally:
            if self._workers is not None:
                self._workers.kill()
            for source in self._sources:
                source.lock.close()


class _Source:
    """The costs of one source on their way into its cache file."""

    def __init__(
        self, name: str, measure: Measure, cache: Path, file: Path, lock: IO[Any], workers: int
    ) -> None:
        self.measure = measure
        self.file = file
        self.lock = lock
        self.left = len(measure.source)
        self.costs = Costs.zeros(self.left)
        self.records = Records(cache, measure.setup, measure)
        self.progress = Progress(name, self.left, workers, cache)

    def add(self, rows: range, found: ChunkCosts) -> None:
        self.records.append(found)
        for row, cost in zip(rows, found.costs, strict=True):
            set_cost(self.costs, row, cost)
        self.progress.add(len(rows))
        self.left -= len(rows)
        if not self.left:
            write_costs(self.file, self.costs)
            self.lock.close()
