"""The terminal: a live panel with progress, metrics and a sparkline on a TTY, plain lines otherwise."""

from __future__ import annotations

import logging
import math
import time
from itertools import pairwise
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mvp_engine.log import format as fmt

LOGGER = logging.getLogger("mvp_engine")
BARS = "▁▂▃▄▅▆▇█"
COLUMNS = 4  # metrics per row of the panel
# Columns right of the panel, where the terminal echoes `^C`. After a line of full width the echo wraps, and a part of
# the panel would stay on the screen.
MARGIN = 4


class Terminal:
    def __init__(
        self, title: str, total_steps: int | None, live: bool, console: Console | None = None
    ) -> None:
        self.title = title
        self.total_steps = total_steps
        self.console = console or Console(highlight=False)
        self.handler = message_handler(self.console)
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
        if live and self.console.is_terminal:
            # Its thread draws the panel again twice a second, with the step of that moment.
            options: Any = {"console": self.console, "refresh_per_second": 2, "transient": True}
            self.live = Live(get_renderable=self._panel, **options)
            self.live.start()

    def advance(self, step: int, doing: str, is_logged: bool) -> None:
        """After every step. `is_logged`: a record of this step follows."""
        self.step = step
        self.doing = doing
        if doing or not self.total_steps or self.early_eta_s is not None:
            return
        now = time.monotonic()
        if self.first is None:
            self.first = step, now
            return
        first, ended = self.first
        self.early_eta_s = (self.total_steps - step) * (now - ended) / (step - first)
        if not self.live and not is_logged:
            left = fmt.duration(self.early_eta_s)
            self.console.print(f"step {step}/{self.total_steps}: about {left} left")

    def show(self, record: dict[str, Any]) -> None:
        self.latest[record["split"]] = record
        self.step = record["step"]
        if record["split"] == "train" and record.get("loss") is not None:
            self.losses.append(record["loss"])
        if not self.live or record["split"] != "train":
            self._print_line(record)

    def close(self) -> None:
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
        parts: list[Any] = [self._progress(record)]
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

    def _progress(self, record: dict[str, Any] | None) -> Table:
        follows = self.doing
        if not follows and record and "eta_s" in record["perf"]:
            later = (self.step - record["step"]) * record["perf"]["step_s"]
            follows = f"{fmt.duration(max(0.0, record['perf']['eta_s'] - later))} left"
        elif not follows and self.early_eta_s is not None:
            follows = f"about {fmt.duration(self.early_eta_s)} left"
        elapsed = fmt.duration(time.monotonic() - self.started)
        of = f"/{self.total_steps}" if self.total_steps else ""
        text = f"step {self.step}{of}   {elapsed} elapsed"
        if follows:
            text += f", {follows}"
        total = self.total_steps or 1
        bar = ProgressBar(total=total, completed=self.step, pulse=not self.total_steps)
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(ratio=1)
        table.add_column(justify="right")
        table.add_row(bar, Text(text))
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
