"""The curves of a report page: evaluation metrics over steps, as SVG."""

from __future__ import annotations

import io
from collections.abc import Mapping

from mvp_engine.log.plot import COLOURS, Curve, draw_curves, new_figure, set_title
from mvp_engine.runs import Run


def curves_svg(run: Run, panels: Mapping[str, Mapping[str, str]]) -> str:
    """Evaluation metrics as SVG: one panel per title, with metrics by label. A single metric has its training curve."""
    figure, all_axes = new_figure(len(panels))
    for axes, (title, metrics) in zip(all_axes, panels.items(), strict=True):
        curves = []
        if len(metrics) == 1:
            (metric,) = metrics.values()
            curves.append(Curve(run, "train", metric, "train", COLOURS[0]))
        colours = COLOURS[len(curves) :]
        for (label, metric), colour in zip(metrics.items(), colours, strict=False):
            curves.append(Curve(run, "eval", metric, label, colour, "o-"))
        draw_curves(axes, curves, log_scale=any("loss" in metric for metric in metrics.values()))
        set_title(axes, title)
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue().decode()
