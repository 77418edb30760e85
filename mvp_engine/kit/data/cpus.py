"""How many processes load and measure rows, from the cores of the machine. It imports no torch: configs use it."""

from __future__ import annotations

import os

MAX_PROCESSES = 32
MAX_DEFAULT_WORKERS = 8


def num_processes(num_workers: int) -> int:
    """How many processes measure rows: all cores, because nothing else runs meanwhile.

    `num_workers` (data.num_workers) raises the number; 0 measures in this process.
    """
    if not num_workers:
        return 0
    return max(num_workers, min(MAX_PROCESSES, available_cpus()))


def default_num_workers() -> int:
    """The loader workers of a rank where `data.num_workers` is auto: its share of the cores, less its own."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_DEFAULT_WORKERS, available_cpus() // ranks - 1))


def available_cpus() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
