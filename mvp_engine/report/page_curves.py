"""The curves of a report page: metrics over steps, one SVG image for each panel, in light and dark colours."""

from __future__ import annotations

import io
from collections.abc import Mapping
from itertools import cycle
from typing import Any

from mvp_engine.report.plot import (
    COLOURS,
    GRID,
    INK,
    Curve,
    Record,
    draw_curves,
    lay_out,
    new_figure,
)

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
    """Metrics by label over steps, as SVG, of the training and of the evaluations; empty without values."""
    curves = []
    for (label, metric), colour in zip(metrics.items(), cycle(COLOURS), strict=False):
        held_out = Curve.read(records, "eval", metric, label, colour)
        name = "" if held_out.values else label  # one entry of the legend for both
        if len(metrics) == 1:
            name = "train"
            held_out = Curve.read(records, "eval", metric, label, COLOURS[1])
        curves += [Curve.read(records, "train", metric, name, colour), held_out]
    if not any(curve.values for curve in curves):
        return ""
    figure = new_figure(5, 3.2)
    scale = title if title == "learning rate" else next(iter(metrics.values()))
    draw_curves(figure.subplots(), curves, title, scale)
    return _svg(figure)


def _svg(figure: Any) -> str:
    out = io.BytesIO()
    lay_out(figure)
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
