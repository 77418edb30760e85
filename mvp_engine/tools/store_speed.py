"""The speed of the stores that a config names, for `mvp doctor`, and whether it feeds the GPUs, for `mvp check`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

from mvp_engine import stores
from mvp_engine.kit import MLLMDataKit
from mvp_engine.kit.data.read.media_source import file_of, open_media
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.log.format import rate
from mvp_engine.tools.doctor import GIB, Finding, ok, warning

SECONDS = 2.0  # of each measurement
FILES = 32  # that are read
ROWS = 32  # whose media are measured
PROBE_BYTES = 8 << 20  # that are uploaded


@dataclass
class Speed:
    """What a store gives this machine, one request at a time (a worker) and `stores.NUM_REQUESTS` (all)."""

    latency_s: float
    worker_bytes_per_s: float
    bytes_per_s: float

    def __str__(self) -> str:
        each = rate(self.worker_bytes_per_s)
        return f"{self.latency_s * 1000:.0f} ms, {each}B/s per worker, {rate(self.bytes_per_s)}B/s in all"


def read_speed(urls: list[str]) -> Speed:
    """Read files, again and again, of each at most one range."""
    latencies = [_timed(partial(stores.read_url, url, 0, 1)) for url in urls[:5]]
    alone = _bytes_per_s(urls, 1)
    return Speed(median(latencies), alone, max(alone, _bytes_per_s(urls, stores.NUM_REQUESTS)))


def _bytes_per_s(urls: list[str], workers: int) -> float:
    sizes = {url: stores.size_and_etag(url).size or stores.CHUNK_BYTES for url in urls}
    started = time.monotonic()

    def read(urls: Iterator[str]) -> int:
        total = 0
        while time.monotonic() < started + SECONDS:
            url = next(urls)
            with suppress(stores.MissingUrl):
                total += len(stores.read_url(url, 0, min(sizes[url], stores.CHUNK_BYTES)))
        return total

    with ThreadPoolExecutor(workers) as pool:
        # Each worker begins at another file.
        orders = [cycle(urls[start:] + urls[:start]) for start in range(workers)]
        total = sum(pool.map(read, orders))
    return total / (time.monotonic() - started)


def _timed(work: Any) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def source_urls(config: Any) -> dict[str, str]:
    """The first URL of each source, by the source's name; those of the Hub are downloaded as a whole."""
    found: dict[str, str] = {}
    for source in getattr(config.data, "sources", []):
        paths = [source.path] if isinstance(source.path, str) else source.path
        for url in [path for path in paths if stores.is_url(path) and not path.startswith("hf://")]:
            found.setdefault(source.label, url)
    return found


# ---- mvp doctor ---------------------------------------------------------------------------------


def check_stores(config: Any) -> list[Finding]:
    """One finding for each store of sources, and one for `checkpoint.remote`."""
    if config is None:
        return []
    findings: list[Finding] = []
    for name, url in source_urls(config).items():
        files = stores.list_url(url)[:FILES]
        if not files:
            raise stores.MissingUrl(f"data.sources.{name}.path={url}: nothing is there")
        speed = read_speed(files)
        findings.append(
            ok("store", f"{name}: {stores.redacted(url)}: {speed}", url=url, **asdict(speed))
        )
    if config.checkpoint.remote is not None:
        findings.append(_check_remote(config.checkpoint.remote))
    return findings


def _check_remote(remote: str) -> Finding:
    url = stores.join_url(remote, f".doctor-{os.getpid()}")
    seconds = _timed(partial(stores.write_url, url, os.urandom(PROBE_BYTES)))
    stores.remove_url(url)
    speed = PROBE_BYTES / seconds
    text = f"{remote}: can be written, {rate(speed)}B/s"
    if speed < 1e6:
        return warning(
            "store",
            text,
            "checkpoints take hours: is it in the region of this machine?",
            url=remote,
        )
    return ok("store", text, url=remote, upload_bytes_per_s=speed)


# ---- mvp check ----------------------------------------------------------------------------------


def feeding(
    config: Any, kit: MLLMDataKit, samples_per_s: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Of each source at a URL: its speed and the bytes per second that the steps need; and warnings.

    Row files are read once, at the start, unless they are streams; media in the first epoch.
    """
    facts: list[dict[str, Any]] = []
    warnings: list[str] = []
    for name, url in source_urls(config).items():
        urls, bytes_per_row = _sampled(kit, name, url)
        speed = read_speed(urls)
        needed = bytes_per_row * samples_per_s
        facts.append({"source": name, "url": stores.redacted(url), **asdict(speed)})
        facts[-1] |= {"bytes_per_row": bytes_per_row, "needed_bytes_per_s": needed}
        if needed > speed.bytes_per_s:
            warnings.append(
                f"{name}: a step needs {rate(needed)}B/s, and the store gives {speed}: the GPU waits for it in the "
                "first epoch. Raise data.num_workers, use larger files (shards), or a store in the region of this "
                "machine"
            )
        size = sum(entry.size or 0 for entry in stores.list_files(url).values())
        if size > stores.cache_limit():
            warnings.append(
                f"{name}: {size / GIB:.1f} GiB of rows are more than the cache of "
                f"{stores.cache_limit() / GIB:.1f} GiB: set MVP_STORE_CACHE_GIB, or stream: true"
            )
    return facts, warnings


def _sampled(kit: MLLMDataKit, name: str, url: str) -> tuple[list[str], float]:
    """URLs to read, and the mean bytes of a row with its media."""
    files = stores.list_files(url)
    urls = list(files)[:FILES]
    size = sum(entry.size or 0 for entry in files.values())
    split = next(split for split in kit.splits if name in kit.source_names(split))
    if kit.is_stream(split):
        return urls, 0.0
    source = kit.mixture(split).sources[kit.source_names(split).index(name)]
    row_format = kit.row_formats(split)[kit.source_names(split).index(name)]
    media: dict[str, int] = {}
    rows = range(0, len(source), max(1, len(source) // ROWS))
    for row in rows:
        with suppress(BadRow):
            for part in read_row(source[row], row_format).media():
                values = part.value if isinstance(part.value, list | tuple) else [part.value]
                for value in values if stores.is_url(source.root) else []:
                    opened = open_media(value, kit.settings.limits, source.root, part.kind)
                    path = file_of(value)
                    if path is not None and not hasattr(opened, "read"):
                        media[str(stores.url_of(opened))] = opened.stat().st_size
    return list(media)[:FILES] or urls, size / len(source) + sum(media.values()) / len(rows)
