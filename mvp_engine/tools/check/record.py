"""What a check has found so far: the facts, saved after each stage for the process that started the ranks.

The keys of the facts are documented in docs/check.md and do not change.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.files import atomic_write_text
from mvp_engine.tools.check.show import Printer

RESULTS = (
    "data",
    "eval_data",
    "parts",
    "step",
    "split",
    "rollouts",
    "memory",
    "training",
    "evaluation",
)


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts that the ranks of a check left in `folder`."""
    found = json.loads((folder / "facts.json").read_text())
    error = folder / "error.txt"
    if error.exists():
        found["problems"].append(error.read_text())
    return {"ok": not found["problems"], **found}


class CheckRecord:
    """The facts of one check. Every rank collects them; rank 0 prints and saves them."""

    def __init__(self, config_file: str, folder: Path, quiet: bool) -> None:
        self.folder = folder
        self.is_main = os.environ.get("RANK", "0") == "0"
        self.printer = Printer(quiet or not self.is_main)
        self.facts: dict[str, Any] = {
            "config": config_file,
            "engine": None,
            "device": None,
            "processes": 1,
            "auto": None,
            "stages": [],
            "problems": [],
            "warnings": [],
            "bad_rows": [],
            "without_gradient": [],
            **dict.fromkeys(RESULTS),
        }

    def __getitem__(self, key: str) -> Any:
        return self.facts[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.facts[key] = value

    def problem(self, text: str) -> None:
        self.facts["problems"].append(text)

    def warning(self, text: str) -> None:
        self.facts["warnings"].append(text)

    def begin_stage(self, name: str) -> None:
        self._started = time.perf_counter()
        self.facts["stages"].append({"name": name, "ok": False, "seconds": None, "says": None})
        self.save()

    def end_stage(self, result: str, ok: bool = True) -> None:
        seconds = round(time.perf_counter() - self._started, 2)
        stage = self.facts["stages"][-1]
        stage |= {"ok": ok, "seconds": seconds, "says": result}
        self.save()
        self.printer.stage(stage)

    def fail(self, error: BaseException) -> None:
        """Note the error of the first rank that fails; the others fail as a consequence."""
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(FileExistsError), open(self.folder / "error.txt", "x") as out:
            out.write(text)
        self.printer.failed(self.facts["stages"][-1]["name"])

    def save(self) -> None:
        if self.is_main:
            atomic_write_text(self.folder / "facts.json", json.dumps(self.facts))


def more_steps(config: Any) -> str:
    """How a training gets more steps."""
    if config.loop.total_steps is not None:
        return "raise loop.total_steps"
    if hasattr(config, "rl"):
        return "raise loop.epochs, or lower rl.prompts"
    data = getattr(config, "mllm", None)
    in_tokens = data is not None and data.global_batch_tokens
    size = "mllm.global_batch_tokens" if in_tokens else "data.global_batch_size"
    return f"raise loop.epochs, or lower {size} or mllm.micro_batch_tokens"
