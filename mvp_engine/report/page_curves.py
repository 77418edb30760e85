"""The curves of a report page: metrics over steps, one SVG image for each panel, in light and dark colours."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from mvp_engine.report.plot import COLOURS, GRID, INK, Curve, Record, draw_curves, new_figure

# Colours of the plot and their counterparts on a dark page.
_DARK = {INK: "#dde3ea", GRID: "#39424d"}
_DARK_COLOURS = [
    "#60a5fa",
    "#f87171",
    "#34d399",
    "#fbbf24",
    "#a78bfa",
    "#22d3ee",
    "#f472b6",
    "#a3e635",
    "#a8a29e",
]
_DARK |= dict(zip(COLOURS, _DARK_COLOURS, strict=True))


def curves_svg(records: list[Record], title: str, metrics: Mapping[str, str]) -> str:
    """Metrics by label over steps, as SVG; empty without values.

    A single metric has a curve of the training and one of the evaluations. Of several, the evaluations are shown; the
    training where there are none.
    """
    curves = []
    for i, (label, metric) in enumerate(metrics.items()):
        colour = COLOURS[i % len(COLOURS)]
        if len(metrics) == 1:
            train = Curve.read(records, "train", metric, "train", COLOURS[0])
            curves = [train, Curve.read(records, "eval", metric, label, COLOURS[1])]
            break
        curve = Curve.read(records, "eval", metric, label, colour)
        if not curve.values:
            curve = Curve.read(records, "train", metric, label, colour)
        curves.append(curve)
    if not any(curve.values for curve in curves):
        return ""
    figure = new_figure(5, 3.2)
    scale = title if title == "learning rate" else next(iter(metrics.values()))
    draw_curves(figure.subplots(), curves, title, scale)
    return _svg(figure)


def _svg(figure: Any) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    head, tag, rest = out.getvalue().decode().partition("<defs>")
    light = ""
    dark = ""
    for i, (colour, dark_colour) in enumerate(_DARK.items()):
        rest = rest.replace(colour, f"var(--c{i})")
        light += f"--c{i}: {colour}; "
        dark += f"--c{i}: {dark_colour}; "
    # An image has its own style sheet. Browsers give it the colour scheme of the page.
    style = f":root {{ {light}}} @media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}"
    return f"{head}<style>{style}</style>{tag}{rest}"
