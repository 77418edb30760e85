"""What a run leaves on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_lines(file: Path) -> list[Any]:
    with file.open() as lines:  # `str.splitlines` would also split texts with U+2028
        return [json.loads(line) for line in lines]


def log_of(folder: Path) -> str:
    """The log of the newest run below `folder`."""
    from mvp_engine.runs import list_runs

    return (list_runs(folder)[-1].dir / "log.txt").read_text()
