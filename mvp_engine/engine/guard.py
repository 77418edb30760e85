"""SkipGuard: counts skipped steps, records their samples, and stops the run when they are too many."""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import format_tb
from typing import TYPE_CHECKING, Any

from torch import OutOfMemoryError

from mvp_engine.config.schema import Guard
from mvp_engine.distributed.hang import waits
from mvp_engine.errors import UserError, count
from mvp_engine.files import atomic_write_text
from mvp_engine.model_engine import StepStatus

if TYPE_CHECKING:
    from mvp_engine.engine.engine import Engine
    from mvp_engine.engine.feed import Feed
    from mvp_engine.engine.meter import Meter

DIVERGED = 3  # skipped steps in a row, from which on the weights are suspected
LOGGER = logging.getLogger("mvp_engine")


class LossTrend:
    """Since which step the loss has been non-finite or far above its average: a sign that the weights diverged."""

    MEMORY = 0.9  # of the moving average
    FAR = 3.0  # times the average

    def __init__(self) -> None:
        self.average: float | None = None
        self.rising_since: int | None = None

    def add(self, step: int, loss: float | None) -> None:
        if loss is None:
            return
        average = loss if self.average is None else self.average
        if math.isfinite(loss) and loss - average <= (self.FAR - 1) * abs(average):
            self.rising_since = None
            self.average = self.MEMORY * average + (1 - self.MEMORY) * loss
        elif self.rising_since is None:
            self.rising_since = step


class SkipGuard:
    """Every rank keeps the same counts, because every rank has the same step statuses."""

    def __init__(self, config: Guard, folder: Path, rank: int) -> None:
        self.config = config
        self.rank = rank
        self.file = folder / (
            "skipped_steps.jsonl" if rank == 0 else f"skipped_steps.rank{rank}.jsonl"
        )
        self.replay_command = f"mvp check {folder}"
        self.total = self.consecutive = self.overflows = 0
        self.trend = LossTrend()
        self._steps: deque[dict[str, Any]] = deque()  # steps without a status yet

    def watch(self, step: int, place: dict[str, Any]) -> None:
        self._steps.append({"step": step, "place": place})

    def take(self, statuses: list[StepStatus], engine: Engine) -> None:
        for status in statuses:
            entry = self._steps.popleft()
            self.trend.add(entry["step"], status.loss)
            if status.reason is None:
                self.consecutive = 0
            elif status.overflow:
                self.overflows += 1
                LOGGER.info("step %d skipped: %s", entry["step"], status.reason)
            else:
                self._skip(entry, status, engine)

    def _skip(self, entry: dict[str, Any], status: StepStatus, engine: Engine) -> None:
        self.total += 1
        self.consecutive += 1
        self._record(entry, status.reason, status.micro_batches, engine.feed)
        step = entry["step"]
        where = ""
        if status.micro_batches:
            numbers = ", ".join(str(number + 1) for number in status.micro_batches)
            where = f", in micro-batch {numbers} of rank {self.rank}"
        if self.rank == 0 or where:
            text = f"step {step} skipped on all ranks: {status.reason}{where}. Skipped so far: {self.total} "
            text += f"({self.consecutive} in a row). Find the row with: {self.replay_command}"
            LOGGER.warning(text)
        if self.consecutive < self.config.max_skips:
            return
        limit = f"guard.max_skips={self.config.max_skips}"
        raise UserError(
            f"stopped at step {step}: skipped {count(self.consecutive, 'step')} in a row and {self.total} in all"
            f" ({limit}); the last because {status.reason}. {self._advice(engine)}"
        )

    def _advice(self, engine: Engine) -> str:
        """What to do after a stop. Checkpoints of weights that may have diverged are renamed, so the command works."""
        rise = self.trend.rising_since
        text = f"Find the row and the parameter with: {self.replay_command}."
        overrides = []
        if rise is not None and self.consecutive >= DIVERGED:
            # The loss of a step shows what the update before it did to the weights.
            retired = engine.checkpoints.retire(after=rise - 2)
            text += (
                f" Since step {rise} the loss is non-finite or far above its average: unless all "
            )
            text += "of these rows are bad, the weights diverged, and optim.lr is too high. "
            text += f"Checkpoints renamed to diverged-*: {', '.join(retired) or 'none'}."
            overrides = [f"optim.lr={min(engine.config.optim.lr / 10, 1e-3):g}"]
        command = engine.run.resume_command(*overrides)
        return f"{text} Then continue, for example with: {command}"

    def report_end(self, step: int) -> None:
        """Warn at the end of a run that skipped steps."""
        if self.total and self.rank == 0:
            share = f"{self.total} of {step} steps ({self.total / step:.0%}) were skipped"
            share += ", also the last one" if self.consecutive else ""
            LOGGER.warning(
                f"{share}: their samples were not learnt. Find the rows: {self.replay_command}"
            )

    @contextmanager
    def recorded_errors(self, feed: Feed, meter: Meter) -> Iterator[None]:
        """A context for a step: it records one whose error a row may have caused, for `mvp check RUN`.

        No row causes an error outside of forward and backward, that of a collective whose other ranks have died, or
        that of too little memory.
        """
        try:
            yield
        except Exception as error:
            is_first = feed.world.failed_first(error)[0] == self.rank  # the others only follow
            no_row = meter.phase not in ("forward", "backward")
            no_row |= isinstance(error, OutOfMemoryError) or waits(format_tb(error.__traceback__))
            if is_first and not no_row:
                entry = self._steps[-1]
                self._record(entry, f"{type(error).__name__}: {error}", (), feed)
                text = f"step {entry['step']} failed. If a row caused it, this finds the row: "
                LOGGER.error(text + self.replay_command)
            raise

    def _record(
        self, entry: dict[str, Any], reason: str | None, bad: tuple[int, ...], feed: Feed
    ) -> None:
        record = {
            "step": entry["step"],
            "rank": self.rank,
            "ranks": feed.world.size,
            "reason": reason,
            **entry["place"],
            "nonfinite_micro_batches": list(bad),
            "sample_ids": feed.sample_ids(entry["place"]),
        }
        with open(self.file, "a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")

    def state_dict(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "consecutive": self.consecutive,
            "overflows": self.overflows,
            "trend": vars(self.trend),
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Steps after `step` will run again, so their records are removed."""
        if self.file.is_file():
            lines = self.file.read_text().splitlines(keepends=True)
            atomic_write_text(
                self.file, "".join(line for line in lines if json.loads(line)["step"] <= step)
            )
        self.total = state["total"]
        self.consecutive = state["consecutive"]
        self.overflows = state["overflows"]
        vars(self.trend).update(state.get("trend", {}))
