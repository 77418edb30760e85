"""Measuring rows with images that are slow to open: which of them are opened again after which change, and the time.

    PYTHONPATH=. python benchmarks/measure_rows.py [--rows 50000] [--delay-ms 50] [--workers 1] [--out FILE]

Each row has one small image; every open sleeps first, as network storage does. Each start is a process of its own,
with the signal handling of a training. Three starts are stopped on the way: by SIGTERM, by Ctrl-C to the process group
and by kill -9. Some packs are loaded as in training. The table shows seconds, opened images, and for the stopped starts
the seconds until they ended and the processes that were left one second later.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loader import make_processor
from PIL import Image

from mvp_engine.errors import EXIT_INTERRUPTED
from mvp_engine.kit import MLLMData, MLLMDataKit
from mvp_engine.kit.data.read import decoders
from mvp_engine.process.signals import StopSignals

SIZES = ((56, 56), (84, 56), (112, 84))
TRAINED_PACKS = 20


class SlowImages:
    """`decode_image.open_image` with a delay. Opens of all processes are counted, as bytes of a file."""

    def __init__(self, file: Path, seconds: float) -> None:
        self.file = file
        self.seconds = seconds
        self._out = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self._open = decoders.open_image
        decoders.open_image = self

    def __call__(self, value: Any, *args: Any) -> Any:
        if not isinstance(value, Image.Image):
            os.write(self._out, b".")
            time.sleep(self.seconds)
        return self._open(value, *args)

    @property
    def count(self) -> int:
        return self.file.stat().st_size


def write_images(folder: Path, count: int) -> list[str]:
    """One row for each image."""
    samples = []
    for size in SIZES:
        Image.new("RGB", size, "gray").save(folder / "sample.png")
        samples.append((folder / "sample.png").read_bytes())
    rows = []
    for i in range(count):
        (folder / f"{i}.png").write_bytes(samples[i % len(samples)])
        question = [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": f"which one? {i}"}]
        answer = [{"type": "text", "text": f"number {i}"}]
        rows.append(
            json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
        )
    return rows


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Starts:
    """Starts of a training that measures its rows, each in a process of its own."""

    def __init__(self, folder: Path, images: SlowImages, workers: int) -> None:
        self.folder = folder
        self.images = images
        self.workers = workers
        self.processor = make_processor([f"{word}" for word in range(1000)])
        self.results: list[dict[str, Any]] = []

    def kit(self, cache: str, max_pixels: int) -> MLLMDataKit:
        settings = {
            "sources": [{"path": str(self.folder / "rows.jsonl")}],
            "pack_tokens": 4096,
            "global_batch_tokens": 4096,
            "limits": {"max_pixels": max_pixels},
            "cache": str(self.folder / cache),
        }
        return MLLMDataKit(MLLMData.model_validate(settings), self.processor, num_workers=self.workers)

    def run(
        self, name: str, cache: str = "cache", max_pixels: int = 112 * 84, stop: int = 0, at: int = 0
    ) -> dict[str, Any]:
        """Measure the rows; `stop` is a signal that is sent once `at` images were opened."""
        before = self.images.count
        started = time.monotonic()
        pid = _fork(lambda: self.kit(cache, max_pixels).measured("train"))
        result: dict[str, Any] = {"start": name}
        workers: list[int] = []
        if stop:
            while is_running(pid) and self.images.count - before < at:
                time.sleep(0.001)
            workers = children(pid)
            result["stopped_after"] = time.monotonic() - started
            started = time.monotonic()
            if stop == signal.SIGINT:
                os.killpg(pid, stop)  # as a terminal does
            else:
                os.kill(pid, stop)
        status = os.waitpid(pid, 0)[1]
        result["seconds"] = time.monotonic() - started
        result["exit_code"] = os.waitstatus_to_exitcode(status)
        if stop:
            time.sleep(1)
            result["orphans"] = sum(map(is_running, workers))
        result["opened"] = self.images.count - before
        self.results.append(result)
        print(json.dumps(result), flush=True)
        return result

    def train(self) -> None:
        """Load packs as in training, in this process and without a delay."""
        self.images.seconds, seconds_before = 0.0, self.images.seconds
        dataset = self.kit("cache", 112 * 84).dataset("train")
        before = self.images.count
        started = time.monotonic()
        images = 0
        for index in range(min(TRAINED_PACKS, len(dataset))):
            batch, bad = dataset[index]
            assert not bad
            images += len(batch.media["pixel_values"].row_counts)
        opened = self.images.count - before
        assert opened == images
        seconds = time.monotonic() - started
        self.images.seconds = seconds_before
        result = {"start": "training", "seconds": seconds, "opened": opened, "images": images, "exit_code": 0}
        self.results.append(result)
        print(json.dumps(result), flush=True)


def _fork(work: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        with StopSignals() as signals:
            signals.early = True
            work()
        code = 0
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    finally:
        os._exit(code)


def compare(
    folder: Path, count: int, delay: float, workers: int, stop_after: int | None = None
) -> list[dict[str, Any]]:
    """`stop_after` is the number of images that are opened before each signal; None: a quarter of them."""
    torch.set_num_threads(1)  # a forked process would wait for threads that it does not have
    rows = write_images(folder, count + 101)
    file = folder / "rows.jsonl"
    file.write_text("\n".join(rows[:count]) + "\n")
    images = SlowImages(folder / "opened", delay)
    starts = Starts(folder, images, workers)
    starts.run("first")
    starts.run("second")
    file.write_text("\n".join(rows[: count + 100]) + "\n")
    starts.run("100 rows appended")
    file.write_text("\n".join([rows[-1], *rows[1 : count + 100]]) + "\n")
    starts.run("one row changed")
    starts.run("max_pixels changed", max_pixels=56 * 56)
    starts.train()
    stop_after = stop_after or count // 4
    starts.run("first, SIGTERM", "stopped", stop=signal.SIGTERM, at=stop_after)
    starts.run("next, Ctrl-C", "stopped", stop=signal.SIGINT, at=stop_after)
    starts.run("next, kill -9", "stopped", stop=signal.SIGKILL, at=stop_after)
    starts.run("next, to its end", "stopped")
    return starts.results


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| start | seconds | images opened |", "| --- | ---: | ---: |"]
    for row in rows:
        seconds = f"{row['seconds']:.1f}"
        if "orphans" in row:
            seconds = f"ends {seconds} s after the signal, {row['orphans']} processes left"
        opened = f"{row['opened']:,}"
        if "images" in row:
            opened += f" of {row['images']:,}, once each"
        lines.append(f"| {row['start']} | {seconds} | {opened} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--delay-ms", type=float, default=50)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(Path(folder), args.rows, args.delay_ms / 1e3, args.workers)
    print(table(rows))
    if args.out:
        about = {
            "command": f"python {' '.join(sys.argv)}",
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
        }
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
