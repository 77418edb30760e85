"""The terminal: a live panel with progress, figures and a sparkline on a TTY; plain lines everywhere else."""

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


class Terminal:
    def __init__(
        self, title: str, total_steps: int | None, live: bool, console: Console | None = None
    ) -> None:
        self.title, self.total_steps = title, total_steps
        self.console = console or Console(highlight=False)
        self.handler: logging.Handler
        if self.console.is_terminal:
            self.handler = RichHandler(
                console=self.console, show_path=False, show_time=False, rich_tracebacks=True
            )
        else:
            self.handler = logging.StreamHandler(self.console.file)
            self.handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        LOGGER.addHandler(self.handler)
        self.losses: list[float] = []
        self.started = time.monotonic()
        self.latest: dict[str, dict[str, Any]] = {}
        self.live: Live | None = None
        if live and self.console.is_terminal:
            self.live = Live(
                self._panel(), console=self.console, refresh_per_second=2, transient=True
            )
            self.live.start()

    def show(self, record: dict[str, Any]) -> None:
        self.latest[record["split"]] = record
        if record["split"] == "train" and record.get("loss") is not None:
            self.losses.append(record["loss"])
        if self.live:
            self.live.update(self._panel())
        if not self.live or record["split"] != "train":
            self.console.print(fmt.line(record, self.total_steps), markup=False, soft_wrap=True)

    def close(self) -> None:
        if self.live:
            self.live.stop()
            self.live = None
            if "train" in self.latest:  # the panel goes; its last figures stay
                self.console.print(
                    fmt.line(self.latest["train"], self.total_steps), markup=False, soft_wrap=True
                )
        LOGGER.removeHandler(self.handler)

    def _panel(self) -> Panel:
        record = self.latest.get("train")
        step = record["step"] if record else 0
        eta = record["perf"].get("eta_s") if record else None
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(ratio=1)
        head.add_column(justify="right")
        of = f"/{self.total_steps}" if self.total_steps else ""
        times = f"{fmt.duration(time.monotonic() - self.started)} gone, {fmt.duration(eta)} left"
        bar = ProgressBar(total=self.total_steps or 1, completed=step, pulse=not self.total_steps)
        head.add_row(bar, Text(f"step {step}{of}   {times}"))
        parts: list[Any] = [head]
        if record:
            figures = Table.grid(padding=(0, 3))
            pairs = [(name, text) for name, text in fmt.shown(record) if name != "eta"]
            for start in range(0, len(pairs), 4):
                cells = [
                    Text.assemble((f"{n} ", "dim"), (t, "bold"))
                    for n, t in pairs[start : start + 4]
                ]
                figures.add_row(*cells, *[""] * (4 - len(cells)))
            width = max(10, self.console.width - 12)
            parts += [
                figures,
                Text.assemble(("loss ", "dim"), (sparkline(self.losses, width), "cyan")),
            ]
        else:
            parts.append(
                Text("starting: the first figures come after log.interval steps", style="dim")
            )
        return Panel(Group(*parts), title=self.title, title_align="left", border_style="dim")


def sparkline(values: list[float], width: int) -> str:
    """The whole series in `width` characters, each the mean of its share, on a log scale where all are positive."""
    if not values:
        return ""
    count = min(width, len(values))
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    if min(means) > 0:
        means = [math.log(m) for m in means]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[min(7, int(8 * (m - low) / span))] for m in means)
