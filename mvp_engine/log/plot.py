"""Plots of metrics over steps, for one or several runs. matplotlib is imported only when one is drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mvp_engine.files import atomic_path
from mvp_engine.runs import Run

INK = "#1f2933"
GRID = "#d9dee3"
COLOURS = ["#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2"]


@dataclass(frozen=True)
class Curve:
    """One metric of one split of a run."""

    run: Run
    split: str
    metric: str
    label: str
    colour: str
    style: str = "-"


def plot_runs(runs: list[Run], metric: str, out: Path) -> int:
    """Plot `metric` of training (line) and evaluation (dots) into a PNG file; returns the number of points."""
    figure, (axes,) = new_figure(1)
    curves = []
    if len(runs) == 1:
        run = runs[0]
        curves.append(Curve(run, "train", metric, "train", COLOURS[0]))
        curves.append(Curve(run, "eval", metric, "eval", COLOURS[1], "o"))
    else:
        for i, run in enumerate(runs):
            colour = COLOURS[i % len(COLOURS)]
            curves.append(Curve(run, "train", metric, run.id, colour))
            curves.append(Curve(run, "eval", metric, f"{run.id}, eval", colour, "o"))
    points = draw_curves(axes, curves, log_scale=True)
    axes.set_ylabel(metric, color=INK)
    set_title(axes, runs[0].id if len(runs) == 1 else metric)
    with atomic_path(out) as temporary:
        figure.savefig(temporary, format="png")
    return points


def new_figure(panels: int) -> tuple[Any, list[Any]]:
    """A matplotlib figure and the axes of its panels, side by side."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    size = (8, 4.5) if panels == 1 else (5 * panels, 3.2)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def set_title(axes: Any, title: str) -> None:
    axes.set_title(title, color=INK, fontsize=11, loc="left")


def draw_curves(axes: Any, curves: Sequence[Curve], log_scale: bool) -> int:
    """Draw the curves that have values; returns the number of points."""
    all_values = list[float]()
    for curve in curves:
        steps = list[int]()
        values = list[float]()
        for record in curve.run.records(curve.split):
            if record.get(curve.metric) is not None:
                steps.append(record["step"])
                values.append(record[curve.metric])
        if not values:
            continue
        all_values += values
        axes.plot(
            steps,
            values,
            curve.style,
            color=curve.colour,
            label=curve.label,
            linewidth=1.6,
            markersize=4.5,
        )
    if log_scale and all_values and min(all_values) > 0:
        axes.set_yscale("log")
    axes.set_xlabel("step", color=INK)
    axes.grid(True, color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    if all_values:
        # Losses fall and accuracies rise: the legend goes to the corner that the curves leave free.
        axes.legend(frameon=False, loc="upper right" if log_scale else "lower right")
    return len(all_values)
