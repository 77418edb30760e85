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
        self.started = time.perf_counter()
        self.rows: list[tuple[float, float, float, bool]] = []  # seconds, MHz, W, at the power limit

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Medians of what was sampled between two times, in seconds since the start; empty without a GPU."""
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
                now = time.perf_counter() - self.started
                self.rows.append((now, float(clock), float(power), limited.strip() == "Active"))


@contextlib.contextmanager
def sampled_clock() -> Iterator[ClockSamples]:
    """A context in which the first GPU's clock and power are sampled, if there is one."""
    samples = ClockSamples()
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield samples
        return
    command = [tool, "-i", "0", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", f"-lms={MILLISECONDS}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    threading.Thread(target=samples._read, args=(process,), daemon=True).start()
    try:
        yield samples
    finally:
        process.kill()
        process.wait()
