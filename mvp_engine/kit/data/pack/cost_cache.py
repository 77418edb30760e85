"""The files of the cost cache: finished costs of a source, records of rows and media sizes, and their locks.

A record file only grows, so what was measured before a kill is kept. Locks are record locks: `flock` would be inherited
by worker processes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from mvp_engine.files import atomic_path

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
    """The folder of the cache where `mllm.cache` is null."""
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

    @classmethod
    def zeros(cls, rows: int) -> Costs:
        return cls(np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.zeros(rows, np.uint8))


def write_costs(file: Path, costs: Costs) -> None:
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


def read_costs(file: Path) -> Costs:
    with np.load(file, allow_pickle=False) as found:
        bad = {row: (reason, detail) for row, reason, detail in json.loads(found["bad"].tobytes())}
        return Costs(found["tokens"], found["encoder"], found["media"], bad)


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
def locked(file: Path, name: str) -> Iterator[None]:
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
                    "%s: waiting for %s, which measures the same rows (for %.0f s now; the lock is %s)",
                    name,
                    owner,
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
