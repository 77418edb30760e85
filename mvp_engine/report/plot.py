"""Plots of metrics over steps. matplotlib is imported only when one is drawn."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

from mvp_engine.files import atomic_path
from mvp_engine.log.format import is_learning_rate, is_share
from mvp_engine.runs import Run

INK = "#1f2933"
GRID = "#d9dee3"
# Colours of curves, and their counterparts on a dark page.
DARK = {
    "#2563eb": "#60a5fa",
    "#dc2626": "#f87171",
    "#059669": "#34d399",
    "#d97706": "#fbbf24",
    "#7c3aed": "#a78bfa",
    "#0891b2": "#22d3ee",
    "#db2777": "#f472b6",
    "#65a30d": "#a3e635",
    "#78716c": "#a8a29e",
}
COLOURS = list(DARK)
LOG_SCALE_SPAN = 8  # losses and norms with a largest value this many times the smallest
MIN_SMOOTHED = 20  # points; a curve with fewer is drawn as it is
Record = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """One metric of one split over steps."""

    label: str  # empty: not in the legend
    colour: str
    steps: list[int]
    values: list[float]
    is_eval: bool

    @classmethod
    def read(
        cls, records: Iterable[Record], split: str, metric: str, label: str, colour: str
    ) -> Curve:
        steps = list[int]()
        values = list[float]()
        for record in records:
            value = record.get(metric, record.get("perf", {}).get(metric))
            if record["split"] == split and value is not None:
                steps.append(record["step"])
                values.append(value)
        return cls(label, colour, steps, values, split != "train")


def plot_overview(run: Run, out: Path) -> None:
    """Loss, learning rate and gradient norm of a run, and its losses by source, as a PNG file."""
    records = list(run.records())
    names = list(dict.fromkeys(name for record in records for name in record))
    sources = [name for name in names if name.startswith("loss_")]
    rates = [name for name in names if is_learning_rate(name)]

    def curve(split: str, metric: str, label: str, colour: str = COLOURS[0]) -> Curve:
        return Curve.read(records, split, metric, label, colour)

    by_source = []
    for name, colour in zip(sources, cycle(COLOURS), strict=False):
        label = name.removeprefix("loss_")
        by_source += [curve("train", name, label, colour), curve("eval", name, "", colour)]
    panels = {
        "loss": [curve("train", "loss", "train"), curve("eval", "loss", "eval", COLOURS[1])],
        "loss by source (lines: train, points: eval)": by_source,
        "learning rate": [
            curve("train", name, name, c) for name, c in zip(rates, cycle(COLOURS), strict=False)
        ],
        "gradient norm": [curve("train", "grad_norm", "")],
    }
    titles = list(panels)
    figure = new_figure(10, 6.5)
    top = titles[:2] if sources else ["loss", "loss"]
    mosaic = figure.subplot_mosaic([top, titles[2:]], height_ratios=[3, 2])
    for title, axes in mosaic.items():
        draw_curves(axes, panels[title], title)
    figure.suptitle(run.id, color=INK, fontsize=11)
    save_png(figure, out)


def new_figure(width: float, height: float) -> Any:
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def lay_out(figure: Any) -> None:
    """Place the axes once before a file is drawn: a smaller axis may get longer tick labels, which need room."""
    figure.get_layout_engine().execute(figure)


def save_png(figure: Any, out: Path) -> None:
    lay_out(figure)
    with atomic_path(out) as temporary:
        figure.savefig(temporary, format="png")


def draw_curves(axes: Any, curves: Sequence[Curve], title: str, metric: str = "") -> None:
    """Draw the curves that have values. `metric`, by default the title, decides how the axis is scaled."""
    drawn = [curve for curve in curves if curve.values]
    for curve in drawn:
        is_long = len(curve.values) >= MIN_SMOOTHED and not curve.is_eval
        is_rate = (metric or title) == "learning rate"
        values = curve.values
        if is_long and not is_rate:
            axes.plot(curve.steps, values, color=curve.colour, linewidth=0.8, alpha=0.3)
            values = smoothed(values)
        markers = "o-" if curve.is_eval or len(values) == 1 else "-"
        label = curve.label or "_"  # matplotlib leaves labels with an underscore out
        style: Any = {"color": curve.colour, "linewidth": 1.6, "markersize": 4}
        axes.plot(curve.steps, values, markers, label=label, **style)
    _scale(axes, metric or title, [value for curve in drawn for value in curve.values])
    axes.set_title(title, color=INK, fontsize=10, loc="left")
    axes.set_xlabel("step", color=INK, fontsize=9)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(True, color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(INK)
    labels = [curve.label for curve in drawn if curve.label]
    if len(labels) > 1:
        width = axes.get_window_extent().width / axes.figure.dpi
        column = 0.7 + 0.085 * max(map(len, labels))  # inches: a line and a text of 9 points
        # Below the axes, where no curve is.
        place: Any = {"loc": "upper left", "bbox_to_anchor": (0, -0.16)}
        columns = max(1, int(width / column))
        axes.legend(frameon=False, ncols=columns, fontsize=9, labelcolor=INK, **place)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean over a twentieth of the points around each: an average of the past would lag behind a fall."""
    reach = max(1, len(values) // 40)
    sums = [0.0, *accumulate(values)]
    windows = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[end] - sums[first]) / (end - first) for first, end in windows]


def _scale(axes: Any, metric: str, values: list[float]) -> None:
    """Percent for shares; a log scale, with plain numbers, for losses and norms that span much; else linear."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if is_share(metric):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    elif metric == "learning rate":
        axes.yaxis.set_major_formatter("{x:g}")
    is_loss = "loss" in metric or "norm" in metric
    if is_loss and values and min(values) > 0 and max(values) > LOG_SCALE_SPAN * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
