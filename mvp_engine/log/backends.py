"""Logging backends. To add one, subclass `Backend` and name it in the config as `file.py:Class` or `module:Class`."""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

from mvp_engine.log import format as fmt
from mvp_engine.log.terminal import Terminal
from mvp_engine.report.plot import plot_overview
from mvp_engine.runs import Run

LOGGER = logging.getLogger("mvp_engine")
REDRAW_SECONDS = 20.0  # least time between two drawings of loss.png


@dataclass(frozen=True)
class RunInfo:
    """Facts of the run that a backend gets at its start."""

    run: Run
    project: str
    workflow: str
    config: dict[str, Any]
    start_step: int = 0  # records up to this step exist already
    total_steps: int | None = None
    # Log messages from before the start; they were printed already.
    messages: list[logging.LogRecord] = field(default_factory=list)


class Backend:
    """The interface of a backend; only rank 0 has backends. Settings from the config are arguments of `__init__`.

    An OSError is reported once and the next call is made; any other error disables the backend with a warning.
    """

    package = ""  # what it imports; a missing one ends the run before data is read

    def start(self, info: RunInfo) -> None:
        """Before the first record. A UserError here ends the run."""
        self.info = info

    def metrics(self, record: dict[str, Any]) -> None:
        """A record: `{"step", "epoch", "split", <metric>: float or None, "totals": {...}, "perf": {...}}`."""
        raise NotImplementedError

    def progress(self, step: int, doing: str) -> None:
        """After every step; `doing` names what follows it, such as an evaluation, or is empty."""

    def close(self, failure: str | None) -> None:
        """End the backend. `failure` is the traceback of a failed run; None if it finished or was interrupted."""


class TerminalBackend(Backend):
    """A live panel on a TTY, plain lines otherwise."""

    def start(self, info: RunInfo) -> None:
        self.terminal = Terminal(info.run.id, info.total_steps, live=info.workflow == "train")
        self.terminal.step = info.start_step
        self.interval = info.config.get("log", {}).get("interval", 1)

    def metrics(self, record: dict[str, Any]) -> None:
        self.terminal.show(record)

    def progress(self, step: int, doing: str) -> None:
        self.terminal.advance(step, doing, is_logged=step % self.interval == 0)

    def close(self, failure: str | None) -> None:
        self.terminal.close()


class FileBackend(Backend):
    """`log.txt`: messages and lines of metrics; a resumed run appends to it."""

    def start(self, info: RunInfo) -> None:
        super().start(info)
        self.handler = logging.FileHandler(info.run.dir / "log.txt", encoding="utf-8")
        self.handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        # A full disk is reported by the backends that raise OSError.
        self.handler.handleError = lambda record: None  # type: ignore[method-assign]
        for message in info.messages:
            self.handler.emit(message)
        LOGGER.addHandler(self.handler)

    def metrics(self, record: dict[str, Any]) -> None:
        self._write(logging.INFO, fmt.line(record, self.info.total_steps))

    def _write(self, level: int, text: str) -> None:
        self.handler.emit(logging.LogRecord("mvp_engine", level, "", 0, text, (), None))

    def close(self, failure: str | None) -> None:
        if failure:
            self._write(logging.ERROR, failure)
        LOGGER.removeHandler(self.handler)
        self.handler.close()


class JsonlBackend(Backend):
    """`metrics.jsonl` of a training; other workflows write `<workflow>.jsonl` in the same folder.

    Records that do not fit on a full disk are kept and written once it has space again.
    """

    def start(self, info: RunInfo) -> None:
        name = "metrics" if info.workflow == "train" else info.workflow
        if info.workflow == "train":
            info.run.rewind_metrics(info.start_step)
        self.file = open(info.run.dir / f"{name}.jsonl", "ab", buffering=0)  # noqa: SIM115
        self.pending = b""

    def metrics(self, record: dict[str, Any]) -> None:
        self.pending += json.dumps(record, allow_nan=False).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        size = os.fstat(self.file.fileno()).st_size  # a failed write moves `tell()` beyond it
        try:
            written = self.file.write(self.pending)
            if written != len(self.pending):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.pending = b""
        except OSError:
            self.file.truncate(size)  # leaves no partial line
            raise

    def close(self, failure: str | None) -> None:
        self._write()
        self.file.close()


class TensorBoardBackend(Backend):
    package = "tensorboard"

    def start(self, info: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = info.run.dir / "tensorboard"
        # A resumed run repeats the steps after its checkpoint: their old events are hidden.
        purge_step = info.start_step + 1 if info.workflow == "train" else None
        self.writer = SummaryWriter(str(folder), purge_step=purge_step)

    def metrics(self, record: dict[str, Any]) -> None:
        for name, value in flat(record).items():
            self.writer.add_scalar(name, value, record["step"])
        self.writer.flush()

    def close(self, failure: str | None) -> None:
        self.writer.close()


class PlotBackend(Backend):
    """`loss.png`, redrawn during the run at most every 20 s and for at most about 1 % of the time."""

    def start(self, info: RunInfo) -> None:
        super().start(info)
        self.next_draw = time.monotonic() + REDRAW_SECONDS

    def metrics(self, record: dict[str, Any]) -> None:
        started = time.monotonic()
        if self.info.workflow == "train" and started >= self.next_draw:
            self.draw()
            cost = time.monotonic() - started
            self.next_draw = time.monotonic() + max(REDRAW_SECONDS, 100 * cost)

    def draw(self) -> None:
        plot_overview(self.info.run, self.info.run.dir / "loss.png")

    def close(self, failure: str | None) -> None:
        if self.info.workflow == "train":
            self.draw()


class TrackerBackend(Backend):
    """An experiment tracker. Settings go to its `init`."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def init(self, info: RunInfo, **options: Any) -> None:
        options |= {"project": info.project, "resume": "allow", "config": info.config}
        self.tracker = importlib.import_module(self.package).init(**{**options, **self.settings})

    def metrics(self, record: dict[str, Any]) -> None:
        self.tracker.log(flat(record), step=record["step"])


class WandbBackend(TrackerBackend):
    package = "wandb"

    def start(self, info: RunInfo) -> None:
        self.init(info, id=info.run.id, dir=str(info.run.dir))

    def close(self, failure: str | None) -> None:
        self.tracker.finish(exit_code=1 if failure else 0)


class TrackioBackend(TrackerBackend):
    package = "trackio"

    def start(self, info: RunInfo) -> None:
        self.init(info, name=info.run.id)

    def close(self, failure: str | None) -> None:
        self.tracker.finish()


BACKENDS: dict[str, type[Backend]] = {
    "terminal": TerminalBackend,
    "file": FileBackend,
    "jsonl": JsonlBackend,
    "tensorboard": TensorBoardBackend,
    "plot": PlotBackend,
    "wandb": WandbBackend,
    "trackio": TrackioBackend,
}


def flat(record: dict[str, Any]) -> dict[str, float]:
    """A record as trackers expect it: `train/loss`, `perf/memory_gib`, ..."""
    values = dict[str, Any]()
    for key, value in record.items():
        if key not in ("step", "split", "perf"):
            values[f"{record['split']}/{key}"] = value
    for key, value in record.get("perf", {}).items():
        values[f"perf/{key}"] = value
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
