"""SkipGuard: counts skipped steps, records their samples, and stops the run when they are too many."""

from __future__ import annotations

import json
import logging
from collections import deque
from pathlib import Path
from typing import Any

from mvp_engine.config.schema import Guard
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_write_text
from mvp_engine.model_engine import StepStatus

LOGGER = logging.getLogger("mvp_engine")


class SkipGuard:
    """Every rank keeps the same counts, because every rank has the same step statuses."""

    def __init__(self, config: Guard, folder: Path, rank: int) -> None:
        self.config = config
        self.rank = rank
        self.file = folder / (
            "skipped_steps.jsonl" if rank == 0 else f"skipped_steps.rank{rank}.jsonl"
        )
        self.total = self.consecutive = self.overflows = 0
        self._steps: deque[dict[str, Any]] = deque()  # steps without a status yet

    def watch(self, step: int, place: dict[str, Any]) -> None:
        self._steps.append({"step": step, "place": place})

    def take(self, statuses: list[StepStatus], feed: Any) -> None:
        for status in statuses:
            entry = self._steps.popleft()
            if status.reason is None:
                self.consecutive = 0
            elif status.overflow:
                self.overflows += 1
                LOGGER.info("step %d skipped: %s", entry["step"], status.reason)
            else:
                self._skip(entry, status.reason, feed)

    def _skip(self, entry: dict[str, Any], reason: str, feed: Any) -> None:
        self.total += 1
        self.consecutive += 1
        ids = feed.sample_ids(entry["place"])
        record = {
            "step": entry["step"],
            "rank": self.rank,
            "reason": reason,
            **entry["place"],
            "sample_ids": ids,
        }
        with open(self.file, "a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")
        if self.rank == 0:
            LOGGER.warning(
                "step %d skipped on all ranks: %s. Samples are in %s. Skipped so far: %d (%d in a row).",
                entry["step"],
                reason,
                self.file,
                self.total,
                self.consecutive,
            )
        row, total = self.config.max_consecutive_skips, self.config.max_total_skips
        if self.consecutive >= row or (total is not None and self.total >= total):
            limit = (
                f"guard.max_consecutive_skips={row}"
                if self.consecutive >= row
                else f"guard.max_total_skips={total}"
            )
            raise UserError(
                f"stopped at step {entry['step']}: {self.consecutive} step(s) in a row and {self.total} in all were "
                f"skipped ({limit}); the last because {reason}. The samples are listed in {self.file}. "
                "Look at those samples, lower optim.lr or raise the limit, then resume with resume=auto."
            )

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total, "consecutive": self.consecutive, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, int], step: int) -> None:
        """Steps after `step` will run again, so their records are removed."""
        if self.file.is_file():
            lines = self.file.read_text().splitlines(keepends=True)
            atomic_write_text(
                self.file, "".join(line for line in lines if json.loads(line)["step"] <= step)
            )
        self.total, self.consecutive, self.overflows = (
            state["total"],
            state["consecutive"],
            state["overflows"],
        )
