"""The pictures: loss curves of one run or several, as PNG. matplotlib is imported only when one is drawn."""

from __future__ import annotations

import os
from pathlib import Path

from mvp_engine.runs import Run

INK, GRID = "#1f2933", "#d9dee3"
COLOURS = ["#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2"]


def plot_runs(runs: list[Run], metric: str, out: Path) -> int:
    """Draw `metric` of training (line) and evaluation (dots) over steps; gives the number of points."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    points, positive = 0, True
    for i, run in enumerate(runs):
        colour = COLOURS[i % len(COLOURS)]
        label = run.id if len(runs) > 1 else "train"
        for split, style in (("train", "-"), ("eval", "o")):
            pairs = [(r["step"], r[metric]) for r in run.records(split) if r.get(metric) is not None]
            if not pairs:
                continue
            points += len(pairs)
            positive = positive and all(value > 0 for _, value in pairs)
            steps, values = zip(*pairs, strict=True)
            name = label if split == "train" else (f"{run.id}, eval" if len(runs) > 1 else "eval")
            own = colour if split == "train" or len(runs) > 1 else COLOURS[1]
            axes.plot(steps, values, style, color=own, label=name, linewidth=1.6, markersize=4.5)
    if points and positive:
        axes.set_yscale("log")
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel(metric, color=INK)
    axes.set_title(runs[0].id if len(runs) == 1 else metric, color=INK, fontsize=11, loc="left")
    axes.grid(True, color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    if points:
        axes.legend(frameon=False)
    beside = out.with_name(f".{out.name}.tmp")
    figure.savefig(beside, format="png")
    os.replace(beside, out)
    return points
