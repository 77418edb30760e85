"""The pictures: curves of one run or several. matplotlib is imported only when one is drawn."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mvp_engine.files import atomic_path
from mvp_engine.runs import Run

INK, GRID = "#1f2933", "#d9dee3"
COLOURS = ["#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2"]


def plot_runs(runs: list[Run], metric: str, out: Path) -> int:
    """Draw `metric` of training (line) and evaluation (dots) over steps as PNG; gives the number of points."""
    figure, (axes,) = _figure(1)
    lines = []
    for i, run in enumerate(runs):
        label, colour = (run.id if len(runs) > 1 else "train"), COLOURS[i % len(COLOURS)]
        lines += [(run, "train", metric, label, colour)]
        own = (f"{run.id}, eval", colour) if len(runs) > 1 else ("eval", COLOURS[1])
        lines += [(run, "eval", metric, *own)]
    points = _draw(axes, lines, {"eval": "o"}, log=True)
    axes.set_ylabel(metric, color=INK)
    axes.set_title(runs[0].id if len(runs) == 1 else metric, color=INK, fontsize=11, loc="left")
    with atomic_path(out) as temporary:
        figure.savefig(temporary, format="png")
    return points


def curves_svg(run: Run, panels: Mapping[str, Mapping[str, str]]) -> str:
    """Evaluations as SVG: a panel for each title, with metrics by label. One alone has its training curve too."""
    figure, every = _figure(len(panels))
    for axes, (title, metrics) in zip(every, panels.items(), strict=True):
        lines = (
            [(run, "train", *metrics.values(), "train", COLOURS[0])] if len(metrics) == 1 else []
        )
        for (label, metric), colour in zip(metrics.items(), COLOURS[len(lines) :], strict=False):
            lines.append((run, "eval", metric, label, colour))
        _draw(axes, lines, {"eval": "o-"}, log=any("loss" in metric for metric in metrics.values()))
        axes.set_title(title, color=INK, fontsize=11, loc="left")
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue().decode()


def _figure(panels: int) -> tuple[Any, list[Any]]:
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(8, 4.5) if panels == 1 else (5 * panels, 3.2), dpi=120, layout="constrained"
    )
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _draw(axes: Any, lines: list[tuple[Any, ...]], styles: dict[str, str], log: bool) -> int:
    """Each line is a run, a split, a metric, a label and a colour; gives the number of points."""
    points, values_seen = 0, list[float]()
    for run, split, metric, label, colour in lines:
        pairs = [(r["step"], r[metric]) for r in run.records(split) if r.get(metric) is not None]
        if pairs:
            points += len(pairs)
            steps, values = zip(*pairs, strict=True)
            values_seen += values
            axes.plot(
                steps,
                values,
                styles.get(split, "-"),
                color=colour,
                label=label,
                linewidth=1.6,
                markersize=4.5,
            )
    if log and points and min(values_seen) > 0:
        axes.set_yscale("log")
    axes.set_xlabel("step", color=INK)
    axes.grid(True, color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    if points:
        axes.legend(
            frameon=False, loc="upper right" if log else "lower right"
        )  # where curves of their kind are not
    return points
