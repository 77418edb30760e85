"""Curves of metrics over steps as inline SVG, for the report page and the live page; PNG plots are in `page.py`.

Colours are variables of the page's style sheet, so that one drawing serves light and dark pages.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from mvp_engine.log.format import is_learning_rate, is_share, number, rate
from mvp_engine.report.facts import percent
from mvp_engine.report.page import COLOURS, Curve, needs_log_scale, smoothed

# Points of a drawn curve: more than 2.5 per pixel are not seen. Longer ones keep the extremes of each stretch.
MAX_POINTS = 500
# The drawing in its own units, which a phone shows at 0.8 of their size, and the rectangle of its axes.
WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 426, 8, 226


@dataclass(frozen=True)
class Scale:
    """The values at the ends of the axes."""

    left: float
    right: float
    low: float
    high: float
    is_log: bool = False

    @classmethod
    def of(cls, curves: Sequence[Curve], metric: str, window: tuple[float, float] | None) -> Scale:
        steps = [step for c in curves if c.values for step in (c.steps[0], c.steps[-1])]
        left, right = window or (min(steps), max(steps))
        inside = [_window(c, left, right) for c in curves]
        values = [v for _, values in inside if values for v in (min(values), max(values))]
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        is_log = needs_log_scale(metric, low, high)
        if is_share(metric):
            low = max(0.0, low)
        if not is_log:
            room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
            low, high = (low if low == 0 else low - room), high + room
        else:
            low, high = low / 1.1, high * 1.1
        return cls(left, right if right > left else left + 1, low, high, is_log)

    def x(self, step: float) -> float:
        return LEFT + (step - self.left) / (self.right - self.left) * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
        return BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)


def plot_svg(
    title: str,
    curves: Sequence[Curve],
    metric: str,
    *,
    window: tuple[float, float] | None = None,
    scale: Scale | None = None,
    hover: bool = False,
) -> str:
    """The HTML of a plot; empty without values. `metric` decides how the axis is scaled, unless `scale` does.

    `window`: the steps that are shown. With `hover`, the plot has its values as an attribute for `live.js`.
    """
    curves = [curve for curve in curves if curve.values]
    if not curves:
        return ""
    scale = scale or Scale.of(curves, metric, window)
    parts = _axes(scale, metric)
    points = []
    for curve in curves:
        steps: Sequence[float]
        steps, values = _window(curve, scale.left, scale.right)
        colour = f"var(--c{COLOURS.index(curve.colour)})"
        if curve.is_long and not is_learning_rate(metric):
            parts.append(
                _path(scale, *_extremes(steps, values), colour, "stroke-width:.8;opacity:.35")
            )
            _, values = _window(curve, scale.left, scale.right, smoothed(curve.values))
        steps, values = _means(steps, values)
        parts.append(_path(scale, steps, values, colour, "stroke-width:1.7"))
        if curve.is_eval or len(values) == 1:
            for step, value in zip(steps, values, strict=True):
                name = f"<title>step {step:g}: {escape(_text(metric, value))}</title>"
                place = f'cx="{scale.x(step):.1f}" cy="{scale.y(value):.1f}"'
                parts.append(f'<circle {place} r="2.6" style="fill:{colour}">{name}</circle>')
        if hover:
            steps, values = _means(*_window(curve, scale.left, scale.right))  # not smoothed
            name = curve.label or ("eval" if curve.is_eval else "train")
            shown = [_text(metric, value) for value in values]
            points.append([name, colour, [round(step) for step in steps], shown])
    data = ""
    if hover:
        ends = {
            "x": [scale.left, scale.right],
            "axes": [LEFT, RIGHT, TOP, BOTTOM],
            "curves": points,
        }
        data = f' data-plot="{escape(json.dumps(ends))}"'
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{escape(title)}"'
    names = {curve.label: curve.colour for curve in curves if curve.label}
    legend = ""
    if len(names) > 1:
        for name, colour in names.items():
            line = f'<i style="background:var(--c{COLOURS.index(colour)})"></i>'
            legend += f"<span>{line}{escape(name)}</span>"
        legend = f"<div class=legend>{legend}</div>"
    svg = f"<svg {box}{data}>{''.join(parts)}</svg>"
    return f"<figure class=plot><figcaption>{escape(title)}</figcaption>{svg}{legend}</figure>"


def _window(
    curve: Curve, left: float, right: float, values: Sequence[float] | None = None
) -> tuple[Sequence[int], Sequence[float]]:
    """The points of these steps."""
    first, end = bisect_left(curve.steps, left), bisect_right(curve.steps, right)
    return curve.steps[first:end], (curve.values if values is None else values)[first:end]


Points = tuple[Sequence[float], Sequence[float]]


def _stretches(steps: Sequence[float], count: int) -> np.ndarray:
    """The first point of each of `count` stretches of about equal length."""
    return np.unique(np.linspace(0, len(steps), count, endpoint=False).astype(int))


def _extremes(steps: Sequence[float], values: Sequence[float]) -> Points:
    """The smallest and the largest value of each stretch, if the curve is too long."""
    if len(values) <= MAX_POINTS:
        return steps, values
    first = _stretches(steps, MAX_POINTS // 2)
    series = np.asarray(values, float)
    ends = np.stack([np.minimum.reduceat(series, first), np.maximum.reduceat(series, first)], 1)
    return np.repeat(np.asarray(steps)[first], 2).tolist(), ends.ravel().tolist()


def _means(steps: Sequence[float], values: Sequence[float]) -> Points:
    """The mean of each stretch at its middle, if the curve is too long."""
    if len(values) <= MAX_POINTS:
        return steps, values
    first = _stretches(steps, MAX_POINTS)
    counts: np.ndarray = np.diff(np.append(first, len(steps)))
    series = np.asarray([steps, values], float)
    means: list[list[float]] = (np.add.reduceat(series, first, axis=1) / counts).tolist()
    return means[0], means[1]


def _path(
    scale: Scale, steps: Sequence[float], values: Sequence[float], colour: str, style: str
) -> str:
    places = [f"{scale.x(s):.1f} {scale.y(v):.1f}" for s, v in zip(steps, values, strict=True)]
    return f'<path d="M{"L".join(places)}" style="stroke:{colour};{style}"/>' if places else ""


def _axes(scale: Scale, metric: str) -> list[str]:
    """Grid lines with their values."""
    parts = []
    for value in _log_ticks(scale) if scale.is_log else _ticks(scale.low, scale.high, 5):
        y = scale.y(value)
        parts.append(f'<line class=grid x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = escape(_text(metric, value, is_tick=True))
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor=end>{text}</text>')
    for step in _ticks(scale.left, scale.right, 8, least=1):
        x = scale.x(step)
        parts.append(f'<line class=grid x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}"/>')
        text = f"{step:,.0f}" if scale.right < 10_000 else rate(step)
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 16}" text-anchor=middle>{text}</text>')
    return parts


def _ticks(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most `most`."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    steps = [factor * power for factor in (1, 2, 5, 10)]
    width = max(least, next(one for one in steps if (high - low) / one <= most))
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    return [index * width for index in range(first, last + 1)]


def _log_ticks(scale: Scale) -> list[float]:
    low, high = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    every = max(1, (high - low) // 5)
    factors = (1, 2, 5) if high - low <= 4 else (1,)
    ticks = [f * 10.0**power for power in range(low, high + 1, every) for f in factors]
    return [tick for tick in ticks if scale.low <= tick <= scale.high]


def _text(metric: str, value: float, is_tick: bool = False) -> str:
    if is_share(metric):
        return f"{100 * value:.4g}%" if is_tick else percent(value)
    if metric.endswith("_per_s"):
        return rate(value)
    if is_tick and 0 < abs(value) < 0.001:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.6g}" if is_tick else number(value)
