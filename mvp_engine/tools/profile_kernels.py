"""Summarizes the events of torch's profiler: idle time, kinds of work, longest kernels, exposed communication.

It also samples clock and power of the GPU while a block of code runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

COMMUNICATION = "communication"
COPIES = "copies"
OTHER = "other"
# The first pattern that matches a kernel's name decides its kind.
KINDS = {
    # FlexAttention is a Triton template too, and counts as attention.
    "fused kernels (norms, activations, rotary embeddings)": r"^triton_(?!tem_.*attention)",
    COMMUNICATION: r"nccl|gloo|c10d",
    "attention": r"sdpa|flash|fmha|attention|cudnn_generated|ragged",
    "GEMM": r"gemm|nvjet|xmma|cublas|splitk|addmm|\bmm\b|bmm|matmul|linear",
    COPIES: r"memcpy|memset|copy_|catarray",  # after GEMM: CUTLASS names its copies in its kernels
    "loss (logits)": r"row_stats|to_gradient|log_softmax|nll_loss",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm|clip",
    "convolutions": r"conv|winograd|im2col",
    "embeddings and indexing": r"index|gather|scatter|embedding|radix|sort|masked",
}
# Labels of time ranges in the profile.
DATA_WAIT = "mvp_engine: wait for data"
MARK = "mvp_engine: window"  # the window is the time between the first and the last of these
MARKING_KERNEL = "spin_kernel"  # of torch.cuda._sleep, by which `mark` marks the GPU's timeline
MAX_KERNELS = 100  # in the list of the longest ones; the report shows fewer
MAX_GAPS = 10


@dataclass(frozen=True)
class Kernel:
    """A time range of the profile: one run of a kernel, of an operator on a CPU, or of a labelled block."""

    name: str
    start: float  # microseconds
    length: float

    @property
    def end(self) -> float:
        return self.start + self.length

    @property
    def kind(self) -> str:
        name = self.name.lower()
        return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHER)


def kernels_of(profiler: Any, device: str) -> list[Kernel]:
    """Returns the kernels that ran on the GPU. On a CPU: the operators, each without the time of those that it calls.

    On a CPU, operators that run while the step waits for data are left out: they load it, and count as waiting.
    """
    on_gpu = device == "cuda"
    data_waits = [] if on_gpu else data_waits_of(profiler)
    kernels = []
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA") != on_gpu:
            continue
        if on_gpu and event.is_user_annotation:
            continue  # a labelled time range, such as Optimizer.step, is no kernel
        if getattr(event, "is_python_function", False):  # the profile may contain Python frames
            continue
        start = event.time_range.start
        if not any(wait.start <= start < wait.end for wait in data_waits):
            length = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            kernels.append(Kernel(event.name, start, length))
    return kernels


def data_waits_of(profiler: Any) -> list[Kernel]:
    """Returns the time ranges in which the step waited for its micro-batches."""
    return _on_host(profiler, DATA_WAIT)


def _on_host(profiler: Any, label: str) -> list[Kernel]:
    """Returns the time ranges on the host whose name begins with a label."""
    kernels = []
    for event in profiler.events():  # there are up to a million: the cheapest test comes first
        if event.name.startswith(label) and str(event.device_type).endswith("CPU"):
            times = event.time_range
            kernels.append(Kernel(event.name, times.start, times.elapsed_us()))
    return kernels


@dataclass(frozen=True)
class Events:
    """The events between the first mark and the last one."""

    seconds: float
    kernels: list[Kernel]
    collectives: list[Kernel]
    data_waits: list[Kernel]


def mark(device: torch.device) -> None:
    """Mark the begin or the end of the window: now on the host, and on the GPU after all kernels launched so far."""
    with record_function(MARK):
        if device.type == "cuda":
            torch.cuda._sleep(1)


def read_events(profiler: Any, device: str) -> Events:
    """Returns the events of a profiler between the marks.

    The host runs ahead of the GPU, so each has its own marks.
    """
    host_marks = _on_host(profiler, MARK)
    kernels = kernels_of(profiler, device)
    marks = [kernel for kernel in kernels if MARKING_KERNEL in kernel.name]
    if len(marks) < 2:  # on a CPU, or if the profiler lost one
        marks = host_marks
    collectives = _between(host_marks, _on_host(profiler, "gloo:"))  # NCCL's are kernels
    if device == "cuda":  # on a CPU these are among its kernels
        collectives += _between(marks, [k for k in kernels if k.kind == COMMUNICATION])
    return Events(
        seconds=(marks[-1].start - marks[0].end) / 1e6,
        kernels=_between(marks, kernels),
        collectives=collectives,
        data_waits=_between(host_marks, data_waits_of(profiler)),
    )


def _between(marks: Sequence[Kernel], events: Iterable[Kernel]) -> list[Kernel]:
    return [event for event in events if marks[0].end <= event.start < marks[-1].start]


def busy_time(kernels: Iterable[Kernel]) -> float:
    """Returns the microseconds in which at least one kernel was running."""
    total = 0.0
    end = float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, kernel.end - max(end, kernel.start))
        end = max(end, kernel.end)
    return total


def gaps(kernels: Iterable[Kernel]) -> dict[str, list[float]]:
    """Returns the gaps between kernels in microseconds, by the name of the kernel that the device waited for."""
    lengths: dict[str, list[float]] = {}
    end: float | None = None
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if end is not None and kernel.start > end:
            lengths.setdefault(kernel.name, []).append(kernel.start - end)
        end = kernel.end if end is None else max(end, kernel.end)
    return lengths


def summary(events: Events, steps: int, memory: dict[str, float]) -> dict[str, Any]:
    """Returns the contents of `profile.json`: the events of `steps` steps, per step. `memory` is in GiB, by kind.

    Exposed communication is the time in which a collective runs and no kernel computes. Copies do not count as
    computation, since gloo makes copies itself.
    """
    kernels, collectives, seconds = events.kernels, events.collectives, events.seconds
    compute = [kernel for kernel in kernels if kernel.kind not in (COMMUNICATION, COPIES)]
    exposed = busy_time([*compute, *collectives]) - busy_time(compute)
    lengths_by_kind: dict[str, list[float]] = {}
    lengths_by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        lengths_by_kind.setdefault(kernel.kind, []).append(kernel.length)
        lengths_by_name.setdefault(kernel.name, []).append(kernel.length)
    return {
        "steps": steps,
        "step_ms": 1e3 * seconds / steps,
        # Without the permission to read the GPU's counters, the profiler records no kernels.
        "idle": max(0.0, 1 - busy_time(kernels) / 1e6 / seconds) if kernels else None,
        "launches": len(kernels) / steps,
        "data_wait_ms": sum(wait.length for wait in events.data_waits) / steps / 1e3,
        "comm_ms": busy_time(collectives) / steps / 1e3,
        "exposed_comm_ms": exposed / steps / 1e3,
        "kinds": _longest_first(lengths_by_kind, steps),
        "kernels": _longest_first(lengths_by_name, steps)[:MAX_KERNELS],
        "gaps": _longest_first(gaps(kernels), steps)[:MAX_GAPS],
        "memory_gib": memory,
    }


def _longest_first(groups: dict[str, list[float]], steps: int) -> list[dict[str, Any]]:
    rows = []
    for name, times in groups.items():
        rows.append({"name": name, "ms": sum(times) / steps / 1e3, "calls": len(times) / steps})
    return sorted(rows, key=lambda row: -row["ms"])


# Clock and power of the GPU while a block of code runs. At its power limit a GPU lowers its clock, and with it the
# FLOP/s that it can reach.

QUERY = "clocks.sm,power.draw,clocks_event_reasons.sw_power_cap"
MILLISECONDS = 250  # between samples
ENDING_SECONDS = 5.0  # then nvidia-smi is left running: a hanging driver blocks it


class ClockSamples:
    """Samples of the clock and power of a GPU. A thread appends to `rows` what nvidia-smi prints."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float, bool]] = []  # when, MHz, W, at the power limit

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Returns medians of the samples between two times of `time.perf_counter()`; empty without a GPU.

        `at_power_limit` is the fraction of the samples at the power limit.
        """
        rows = [row for row in self.rows if begin <= row[0] <= end]
        if not rows:
            return {}
        limited = sum(row[3] for row in rows) / len(rows)
        clock, power = (statistics.median(row[column] for row in rows) for column in (1, 2))
        return {"sm_clock_mhz": clock, "power_w": power, "at_power_limit": limited}

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # a value is "[N/A]"
                clock, power, limited = line.split(",")
                is_limited = limited.strip() == "Active"
                self.rows.append((time.perf_counter(), float(clock), float(power), is_limited))


@contextlib.contextmanager
def sampled_clock(gpu: str | None = None) -> Iterator[ClockSamples]:
    """A context in which clock and power of a GPU are sampled, if there is one.

    `gpu`: its number or UUID; None: the first visible one. If sampling fails, the block still runs, without samples.
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
    """Start nvidia-smi, which prints a line every `MILLISECONDS`. Returns None if it cannot be started."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", f"-lms={MILLISECONDS}"]
    try:
        silent: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = [tool, "-i", gpu, *query]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, errors="replace", **silent
        )
    except OSError:  # such as a program for another architecture
        return None
