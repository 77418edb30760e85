"""Run a training as a process of its own, and read its metrics while it runs. No process of it outlives the call.

A training that gets SIGTERM finishes its step and saves, so it is killed, with its children: they hold the memory of
the GPU too. The same happens if this process gets SIGTERM (from `timeout`, say) or an error; if it is killed, the
kernel kills the training.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
ENDING_SECONDS = 30.0  # in which killed processes are gone: the driver unmaps a whole GPU
ENDS = "BENCHMARK_ENDS"  # in the environment: when `session.py` will kill this job, in seconds of time.time()
WRITING_SECONDS = 8.0  # before that, to write results


def limit_of(seconds: float) -> float:
    """So many seconds, or what the session of benchmarks leaves: then what was measured is still written."""
    ends = os.environ.get(ENDS)
    return seconds if ends is None else min(seconds, max(0.0, float(ends) - time.time() - WRITING_SECONDS))


@dataclass
class Watched:
    """What a process logged, with the seconds since its command."""

    records: list[tuple[float, dict[str, Any]]]
    seconds: float
    code: int | None  # None: it was ended
    output: str
    first: float | None = None  # when a line of its output matched the pattern


def watch(
    command: list[str],
    folder: Path,
    limit: float,
    *,
    env: dict[str, str] | None = None,
    pattern: str | None = None,
    last_step: int | None = None,
) -> Watched:
    """Run a command whose only run is in `folder/runs`. The processes of its session end after `limit` seconds.

    `last_step`: they also end when this step is logged, without a final checkpoint.
    """
    limit = limit_of(limit)
    folder.mkdir(parents=True, exist_ok=True)
    first: float | None = None
    records: list[tuple[float, dict[str, Any]]] = []
    log = folder / "output.txt"
    started = time.perf_counter()
    with log.open("w") as out, ended_by_sigterm():
        process = subprocess.Popen(
            command,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        try:
            while True:
                code = process.poll()
                now = time.perf_counter() - started
                for file in folder.glob("runs/*/metrics.jsonl"):
                    lines = [line for line in file.read_text().split("\n")[:-1] if line]
                    if len(lines) < len(records):  # it ran out of memory and started again, with smaller packs
                        records.clear()
                    records += [(now, json.loads(line)) for line in lines[len(records) :]]
                if pattern and first is None and re.search(pattern, read_log(log), re.MULTILINE):
                    first = now
                is_last = last_step is not None and records and records[-1][1]["step"] >= last_step
                if code is not None or now > limit or is_last:
                    break
                time.sleep(0.05)
        finally:
            kill_session(process.pid)
            process.wait()
    return Watched(records, time.perf_counter() - started, code, read_log(log)[-3000:], first)


def read_log(log: Path) -> str:
    """Its text so far, which may end inside of a character: progress bars have those of three bytes."""
    return log.read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """A context in which SIGTERM is an exit of this process, with the `finally` clauses on the way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def kill_session(leader: int) -> None:
    """Kill the processes of a session, and wait until none is left but zombies."""
    begin = time.perf_counter()
    while members := session_members(leader):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.perf_counter() - begin > ENDING_SECONDS:
            raise RuntimeError(f"processes {members} were killed and do not end")
        time.sleep(0.05)


def session_members(leader: int) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state parent group session ...: a name may have spaces and brackets
            state, _, _, session = file.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended meanwhile
            continue
        if int(session) == leader and state not in "ZX":
            found.append(int(file.parent.name))
    return found
