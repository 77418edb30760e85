"""Attempts of a benchmark: one that fails, or runs out of memory, is a row like any other."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.watch import limit_of

DAY = 86_400.0
FOUND = "found.json"  # in the folder of the attempt: what the process measured


def attempt(script: str, what: str, tried: str, folder: str, limit: float | None = None) -> dict[str, Any]:
    """Run `script` in a process of its own, with the words of this command and `--inside`; a failure is a row with its
    last lines.

    `limit`: seconds after which it is killed; earlier where the session of benchmarks ends.
    """
    limit = limit_of(DAY if limit is None else limit)
    found = Path(folder) / FOUND
    found.unlink(missing_ok=True)
    command = [sys.executable, script, *sys.argv[1:], "--inside", what, tried, folder]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired as late:
        shown = (late.stderr or b"").decode(errors="replace")
        return {"tried": tried, "error": f"not done after {limit:.0f} s", "stderr": shown[-1500:]}
    if found.exists():
        return {"tried": tried, **json.loads(found.read_text())}
    is_memory = "OutOfMemory" in done.stderr or "out of memory" in done.stderr
    return {"tried": tried, "error": "out of memory" if is_memory else done.stderr[-1500:]}


def failure(error: Exception) -> dict[str, str]:
    """The row of an attempt in this process that raised an error, which is printed."""
    traceback.print_exception(error)
    return {"why": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
