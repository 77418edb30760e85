"""Logging backends, and the hub that passes metrics to those of the config. Only rank 0 has backends; the other ranks
print warnings to stderr.

To add one, subclass `Backend` and name it in the config as `file.py:Class` or `module:Class`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import inspect
import json
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mvp_engine.errors import Interrupted, UserError
from mvp_engine.imports import load_spec
from mvp_engine.log import format as fmt
from mvp_engine.report.page import plot_overview
from mvp_engine.runs import Run

LOGGER = logging.getLogger("mvp_engine")
BARS = "▁▂▃▄▅▆▇█"
COLUMNS = 4  # metrics per row of the panel
# Columns right of the panel, where the terminal echoes `^C`. After a line of full width the echo wraps, and a part of
# the panel would stay on the screen.
MARGIN = 4


_OPEN_HUBS: list[int] = []  # the threads that trainings run in


class OwnMessages(logging.Filter):
    """Leaves out messages of trainings in other threads of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread == self.thread or record.thread not in _OPEN_HUBS


class Terminal:
    def __init__(
        self, title: str, total_steps: int | None, live: bool, console: Console | None = None
    ) -> None:
        self.title = title
        self.total_steps = total_steps
        self.console = console or Console(highlight=False)
        self.handler = message_handler(self.console)
        self.handler.addFilter(OwnMessages())
        LOGGER.addHandler(self.handler)
        self.step = 0
        self.doing = ""
        self.losses: list[float] = []
        self.started = time.monotonic()
        # The first step of this process, and when it ended.
        self.first: tuple[int, float] | None = None
        self.early_eta_s: float | None = None  # by the second step: a record with an ETA may be far
        self.latest: dict[str, dict[str, Any]] = {}  # the last record of each split
        self.live: Live | None = None
        self.cell: Any = None  # the output of a notebook that is written again and again
        self.cell_shown = 0.0
        if live and self.console.is_jupyter:
            from IPython.display import display

            self.cell = display({"text/plain": "starting"}, raw=True, display_id=True)
        if live and self.console.is_terminal:
            # Its thread draws the panel again twice a second, with the step of that moment.
            options: Any = {"console": self.console, "refresh_per_second": 2, "transient": True}
            self.live = Live(get_renderable=self._panel, **options)
            self.live.start()

    def advance(self, step: int, doing: str, is_logged: bool) -> None:
        """After every step. `is_logged`: a record of this step follows."""
        self.step = step
        self.doing = doing
        if self.cell:
            self._show_cell()
        if doing or not self.total_steps or self.early_eta_s is not None:
            return
        now = time.monotonic()
        if self.first is None:
            self.first = step, now
            return
        first, ended = self.first
        self.early_eta_s = (self.total_steps - step) * (now - ended) / (step - first)
        if not self.live and not self.cell and not is_logged:
            left = fmt.duration(self.early_eta_s)
            self.console.print(f"step {step}/{self.total_steps}: about {left} left")

    def show(self, record: dict[str, Any]) -> None:
        self.latest[record["split"]] = record
        self.step = record["step"]
        if record["split"] == "train" and record.get("loss") is not None:
            self.losses.append(record["loss"])
        if not (self.live or self.cell) or record["split"] != "train":
            self._print_line(record)

    def _show_cell(self, seconds: float = 0.5) -> None:
        """Write the live line of a notebook again: the progress, and the last metrics of the training."""
        now = time.monotonic()
        if now - self.cell_shown < seconds:
            return
        self.cell_shown = now
        record = self.latest.get("train")
        metrics = f"\n{fmt.line(record, self.total_steps)}" if record else ""
        self.cell.update({"text/plain": f"{self._status()}{metrics}"}, raw=True)

    def close(self) -> None:
        if self.cell:
            self._show_cell(0.0)
            self.cell = None
        if self.live:
            self.live.stop()
            self.live = None
            if "train" in self.latest:  # the panel disappears, its last metrics stay
                self._print_line(self.latest["train"])
        LOGGER.removeHandler(self.handler)

    def _print_line(self, record: dict[str, Any]) -> None:
        in_file = not self.console.is_terminal  # where a record stays on one line
        self.console.print(fmt.line(record, self.total_steps), markup=False, soft_wrap=in_file)

    def _panel(self) -> Panel:
        record = self.latest.get("train")
        parts: list[Any] = [self._progress()]
        if record is None:
            text = "starting: metrics are shown after the first step"
            parts.append(Text(text, style="dim"))
        else:
            parts.append(_metrics_table(record))
            curve = sparkline(self.losses, max(10, self.console.width - MARGIN - 12))
            parts.append(Text.assemble(("loss ", "dim"), (curve, "cyan")))
        style: Any = {"title_align": "left", "border_style": "dim"}
        width = max(20, self.console.width - MARGIN)
        return Panel(Group(*parts), title=self.title, width=width, **style)

    def _status(self) -> str:
        """The step, and the time that passed and that is left."""
        record = self.latest.get("train")
        follows = self.doing
        if not follows and record and "eta_s" in record["perf"]:
            later = (self.step - record["step"]) * record["perf"]["step_s"]
            follows = f"{fmt.duration(max(0.0, record['perf']['eta_s'] - later))} left"
        elif not follows and self.early_eta_s is not None:
            follows = f"about {fmt.duration(self.early_eta_s)} left"
        elapsed = fmt.duration(time.monotonic() - self.started)
        of = f"/{self.total_steps}" if self.total_steps else ""
        text = f"step {self.step}{of}   {elapsed} elapsed"
        return f"{text}, {follows}" if follows else text

    def _progress(self) -> Table:
        total = self.total_steps or 1
        bar = ProgressBar(total=total, completed=self.step, pulse=not self.total_steps)
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(ratio=1)
        table.add_column(justify="right")
        table.add_row(bar, Text(self._status()))
        return table


def message_handler(console: Console) -> logging.Handler:
    if console.is_terminal:
        return RichHandler(console=console, show_path=False, show_time=False, rich_tracebacks=True)
    handler = logging.StreamHandler(console.file)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    return handler


def _metrics_table(record: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 3))
    pairs = [(name, text) for name, text in fmt.shown(record) if name != "eta"]
    for start in range(0, len(pairs), COLUMNS):
        row = pairs[start : start + COLUMNS]
        cells = [Text.assemble((f"{name} ", "dim"), (text, "bold")) for name, text in row]
        table.add_row(*cells, *[""] * (COLUMNS - len(cells)))
    return table


def sparkline(values: list[float], width: int) -> str:
    """The series in `width` characters, each the mean of its part; on a log scale if all values are positive."""
    if not values:
        return ""
    count = min(width, len(values))
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    if min(means) > 0:
        means = [math.log(mean) for mean in means]
    low = min(means)
    span = (max(means) - low) or 1.0
    heights = [int(len(BARS) * (mean - low) / span) for mean in means]
    return "".join(BARS[min(height, len(BARS) - 1)] for height in heights)


BackendEntry = str | dict[str, Any]  # of log.backends
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
        self.handler.addFilter(OwnMessages())
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


BACKENDS: dict[str, type[Backend]] = {
    "terminal": TerminalBackend,
    "file": FileBackend,
    "jsonl": JsonlBackend,
    "tensorboard": TensorBoardBackend,
    "plot": PlotBackend,
}
# The classes of these are in `mvp_engine.log.trackers`.
TRACKERS = ("wandb", "trackio", "mlflow", "swanlab", "comet", "clearml")


def flat(record: dict[str, Any]) -> dict[str, float]:
    """A record as trackers expect it: `train/loss`, `perf/memory_gib`, ..."""
    keys = record.keys() - {"step", "split", "perf"}
    values = {f"{record['split']}/{key}": record[key] for key in record if key in keys}
    values |= {f"perf/{key}": value for key, value in record.get("perf", {}).items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


# ---- The hub of one run: it passes metrics to the backends of the config, and owns the log messages ----


class EarlyMessages(logging.Handler):
    """A handler for messages while data and model are built, before the hub exists.

    It prints them at once and keeps them for the hub's log file.
    """

    def __init__(self, backends: list[BackendEntry], rank: int = 0) -> None:
        super().__init__()
        if rank == 0 and "terminal" in backends:
            self.printer = message_handler(Console())
        else:
            prefix = f"[rank {rank}] " if rank else ""
            self.printer = _warnings_handler(f"{prefix}%(levelname)s %(message)s")
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if record.levelno >= self.printer.level:
            self.printer.handle(record)

    def __enter__(self) -> EarlyMessages:
        _own_logger()
        LOGGER.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        LOGGER.removeHandler(self)


def _warnings_handler(format: str) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter(format))
    return handler


def _own_logger() -> list[logging.LogRecord]:
    """Send the package's messages to its own handlers only; ends `EarlyMessages` and returns its records."""
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    records = list[logging.LogRecord]()
    for handler in list(LOGGER.handlers):
        if isinstance(handler, EarlyMessages):
            LOGGER.removeHandler(handler)
            records += handler.records
    return records


class LogHub:
    """The backends of one run, from their start to their close."""

    def __init__(self, info: RunInfo, backends: list[BackendEntry], rank: int = 0) -> None:
        self.info = replace(info, messages=_own_logger())
        self.backends: list[Backend] = []
        self._failing: set[Backend] = set()  # backends with a reported OSError
        self._stderr: logging.Handler | None = None
        self._thread = threading.get_ident()
        self._is_open = True
        _OPEN_HUBS.append(self._thread)
        if rank == 0:
            self._start_backends(backends)
        else:
            self._stderr = _warnings_handler(f"[rank {rank}] %(levelname)s: %(message)s")
            LOGGER.addHandler(self._stderr)

    def _start_backends(self, entries: list[BackendEntry]) -> None:
        engine = self.info.config.get("engine")
        factories = [backend_factory(entry, engine) for entry in entries]
        try:
            for factory in factories:
                backend = factory()
                self.backends.append(backend)
                self._call(backend, "start", self.info)
        except BaseException as error:
            self.__exit__(None, error, None)  # closes a live panel, which owns the terminal
            raise

    def progress(self, step: int, doing: str = "") -> None:
        for backend in list(self.backends):
            self._call(backend, "progress", step, doing)

    def metrics(self, record: dict[str, Any]) -> None:
        """Pass a record to all backends; non-finite values become None."""
        finite = dict(record)
        for key, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                finite[key] = None
        for backend in list(self.backends):
            self._call(backend, "metrics", finite)

    def _call(self, backend: Backend, method: str, *values: Any) -> None:
        """Call a backend; its errors never end the training.

        A full disk or a lost connection (OSError) may pass, so the backend stays; any other error disables it.
        """
        try:
            getattr(backend, method)(*values)
            if method != "progress":
                self._failing.discard(backend)
        except Exception as error:
            name = type(backend).__name__
            if isinstance(error, OSError) and method != "start":
                if backend not in self._failing:
                    LOGGER.error("%s cannot write: %s. Training continues.", name, error)
                self._failing.add(backend)
                return
            self.backends.remove(backend)
            if isinstance(error, UserError) and method == "start":
                raise
            text = f"the log backend {name} is disabled, since its {method} failed."
            LOGGER.warning("%s Training continues.", text, exc_info=error)
            if method in ("metrics", "progress"):
                with contextlib.suppress(Exception):
                    backend.close(None)

    def __enter__(self) -> LogHub:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        failed = error is not None and not isinstance(error, Interrupted)
        failure = "".join(traceback.format_exception(error)) if failed else None
        for backend in list(self.backends):
            self._call(backend, "close", failure)
        self.backends = []  # a second close finds nothing to do
        if self._is_open:
            self._is_open = False
            _OPEN_HUBS.remove(self._thread)
        if self._stderr is not None:
            LOGGER.removeHandler(self._stderr)


def backend_factory(entry: BackendEntry, engine: str | None) -> Callable[[], Backend]:
    """Makes the backend of an entry of `log.backends`: a name, or `{name: ..., <setting>: ...}`.

    A name is that of a built-in backend, or the user's own as `module:Class` or `file.py:Class`; the file is found in
    the folder of the recipe's `engine`, if that is a `file.py:Class` too, or in the working directory.
    """
    settings = {"name": entry} if isinstance(entry, str) else dict(entry)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise UserError(f"log.backends: {entry} has no name: write {{name: wandb, ...}}")
    if name in TRACKERS:
        kind = importlib.import_module("mvp_engine.log.trackers").CLASSES[name]
    else:
        folder = Path((engine or "").rpartition(":")[0]).parent
        kind = BACKENDS.get(name) or _own_backend(name, folder)
    if kind.package and importlib.util.find_spec(kind.package) is None:
        fix = f"pip install {kind.package}, or leave it out"
        raise UserError(f"log.backends names {name!r}, but {kind.package} is not installed: {fix}")
    try:
        inspect.signature(kind).bind(**settings)
    except TypeError as error:
        raise UserError(
            f"log.backends: settings of {name!r}, which {kind.__name__}() takes: {error}"
        ) from None
    return partial(kind, **settings)


def _own_backend(name: str, recipe: Path) -> type[Backend]:
    location, colon, attribute = name.rpartition(":")
    if not colon:
        known = ", ".join((*BACKENDS, *TRACKERS))
        raise UserError(
            f"log.backends: unknown backend {name!r}; known: {known}, or module:Class, file.py:Class"
        )
    folder = recipe if (recipe / location).is_file() else Path.cwd()
    module, _ = load_spec(name, folder, "log.backends")
    kind = getattr(module, attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, Backend)):
        raise UserError(
            f"log.backends: {name!r} is not a subclass of mvp_engine.log.backends.Backend"
        )
    if kind.metrics is Backend.metrics:
        raise UserError(f"log.backends: {name!r} must define metrics(self, record)")
    return kind
