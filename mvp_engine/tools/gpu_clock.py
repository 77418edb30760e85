"""Clock and power of the GPU while something runs: a card at its power limit lowers its clock, and its peak with it."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator

QUERY = "clocks.sm,power.draw,clocks_event_reasons.sw_power_cap"
MILLISECONDS = 250


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
def sampled_clock(gpu: str = "0") -> Iterator[ClockSamples]:
    """A context in which clock and power of a GPU (its number, or its UUID) are sampled, if there is one."""
    samples = ClockSamples()
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield samples
        return
    query = [f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", f"-lms={MILLISECONDS}"]
    process = subprocess.Popen(
        [tool, "-i", gpu, *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    threading.Thread(target=samples._read, args=(process,), daemon=True).start()
    try:
        yield samples
    finally:
        process.kill()
        process.wait()
