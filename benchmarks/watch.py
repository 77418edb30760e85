"""Run a training as a process of its own, and read its metrics while it runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    """Run a command whose only run is in `folder/runs`. The process and its children end after `limit` seconds.

    `last_step`: they also end when this step is logged, without a final checkpoint.
    """
    folder.mkdir(exist_ok=True)
    first: float | None = None
    records: list[tuple[float, dict[str, Any]]] = []
    log = folder / "output.txt"
    started = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        while True:
            code = process.poll()
            now = time.perf_counter() - started
            for file in folder.glob("runs/*/metrics.jsonl"):
                lines = [line for line in file.read_text().split("\n")[:-1] if line]
                records += [(now, json.loads(line)) for line in lines[len(records) :]]
            if pattern and first is None and re.search(pattern, log.read_text(), re.MULTILINE):
                first = now
            is_last = last_step is not None and records and records[-1][1]["step"] >= last_step
            if code is not None or now > limit or is_last:
                break
            time.sleep(0.05)
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Watched(records, time.perf_counter() - started, code, log.read_text()[-3000:], first)
