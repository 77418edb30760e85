"""Clock and power of the GPU while something runs: a card at its power limit lowers its clock, and its peak with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator

QUERY = "clocks.sm,power.draw,clocks_event_reasons.sw_power_cap"
MILLISECONDS = 250
ENDING_SECONDS = 5.0  # a process that waits for a hanging driver does not end: left behind


class ClockSamples:
    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float, bool]] = []  # when, MHz, W, at the power limit

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Medians of what was sampled between two times of `time.perf_counter()`; empty without a GPU."""
        rows = [row for row in self.rows if begin <= row[0] <= end]
        if not rows:
            return {}
        limited = sum(row[3] for row in rows) / len(rows)
        clock, power = (statistics.median(row[place] for row in rows) for place in (1, 2))
        return {"sm_clock_mhz": clock, "power_w": power, "at_power_limit": limited}

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # "[N/A]"
                clock, power, limited = line.split(",")
                is_limited = limited.strip() == "Active"
                self.rows.append((time.perf_counter(), float(clock), float(power), is_limited))


@contextlib.contextmanager
def sampled_clock(gpu: str | None = None) -> Iterator[ClockSamples]:
    """A context in which clock and power of a GPU are sampled, if there is one: its number or UUID, or the first one.

    Nothing that fails here ends what runs inside: then there are no samples.
    """
    samples = ClockSamples()
    process = _start(gpu or os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0")
    if process is None:
        yield samples
        return
    threading.Thread(target=samples._read, args=(process,), daemon=True).start()
    try:
        yield samples
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)


def _start(gpu: str) -> subprocess.Popen[str] | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", f"-lms={MILLISECONDS}"]
    try:
        return subprocess.Popen(
            [tool, "-i", gpu, *query],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
    except OSError:  # of another architecture, say
        return None
