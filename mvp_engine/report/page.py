"""The report page of a run: metrics, curves, prompts with the model's answers and media, config, next steps.

The page is one HTML file without scripts that loads nothing from elsewhere. Everything from data is escaped.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import traceback
import wave
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mvp_engine.errors import count
from mvp_engine.files import atomic_path, atomic_write_text
from mvp_engine.log.format import duration, is_learning_rate, is_share, number
from mvp_engine.report.facts import Record, RunFacts, metric_text, percent
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


@dataclass(frozen=True)
class Curve:
    """One metric of one split over steps."""

    label: str  # empty: not in the legend
    colour: str
    steps: Sequence[int]
    values: Sequence[float]
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

    @property
    def is_long(self) -> bool:
        return len(self.values) >= MIN_SMOOTHED and not self.is_eval


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
        is_rate = (metric or title) == "learning rate"
        values = curve.values
        if curve.is_long and not is_rate:
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


def plot_points(
    file: Path, values: Mapping[str, Sequence[Any]], metric: str, figures: Sequence[float]
) -> None:
    """A PNG of a metric over the values of each key; the first point is marked as the best."""
    figure = new_figure(4.2 * len(values), 3.6)
    for axes, (key, texts) in zip(
        figure.subplots(1, len(values), squeeze=False)[0], values.items(), strict=True
    ):
        try:
            places: list[Any] = [float(text) for text in texts]
            if min(places) > 0 and max(places) > 20 * min(places):
                axes.set_xscale("log")
        except ValueError:  # names
            places = [str(text) for text in texts]
        axes.scatter(places, figures, color=COLOURS[0])
        axes.scatter(places[:1], figures[:1], color=COLOURS[2], label="best", zorder=3)
        axes.set(xlabel=key, ylabel=metric)
        axes.legend(frameon=False)
    save_png(figure, file)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean over a twentieth of the points around each: an average of the past would lag behind a fall."""
    reach = max(1, len(values) // 40)
    sums = np.cumsum([0.0, *values])
    places = np.arange(len(values))
    first, end = np.maximum(0, places - reach), np.minimum(len(values), places + reach + 1)
    means: list[float] = ((sums[end] - sums[first]) / (end - first)).tolist()
    return means


def needs_log_scale(metric: str, low: float, high: float) -> bool:
    return ("loss" in metric or "norm" in metric) and low > 0 and high > LOG_SCALE_SPAN * low


def _scale(axes: Any, metric: str, values: list[float]) -> None:
    """Percent for shares; a log scale, with plain numbers, for losses and norms that span much; else linear."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if is_share(metric):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    elif metric == "learning rate":
        axes.yaxis.set_major_formatter("{x:g}")
    if values and needs_log_scale(metric, min(values), max(values)):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


SHOWN = 24  # examples on a page
MEDIA_OF_ANSWERS = "answers"
_EMPTY_LINES = re.compile(r"\n\s*\n")  # poorly trained models generate many
# Forbids whatever escaping might miss, and every request to another host.
PAGE_POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Example:
    """A prompt and the model's answer. `media` returns PNG, JPEG, GIF, WebP or WAV files; only shown ones are read."""

    media: Callable[[], Sequence[bytes]]
    question: str
    expected: str
    written: str
    right: bool | None  # None: neither right nor wrong, as for answers that nothing has judged
    spoken: Callable[[], Sequence[bytes]] = list  # the answer as sound: WAV files


def write_report(
    file: Path,
    run: Run,
    *,
    title: str,
    subtitle: str,
    figures: Mapping[str, str] | None = None,
    panels: Mapping[str, Mapping[str, str]] | None = None,
    examples: Sequence[Example] = (),
    sections: Sequence[str] = (),
    config: str | None = None,
    next_steps: Mapping[str, str] | None = None,
    tables: Mapping[str, Sequence[Sequence[str]]] | None = None,
    shown: int = SHOWN,
) -> None:
    """Write the page of a run. What is not given is taken from the run folder.

    `figures` are metrics as text. `panels` are metrics to plot, by title and label. `next_steps` are commands, by
    what they do. `tables` are rows of texts by title, the first row with the column names. At most `shown` examples
    are on the page, in their order; up to half of them are wrong answers. `sections` are more HTML, after them.
    """
    facts = RunFacts(run)
    parts = [f"<h1>{escape(title)}</h1><p class=dim>{escape(subtitle)}</p>"]
    boxes = ""
    for name, text in (facts.figures() if figures is None else figures).items():
        boxes += f"<div class=figure><b>{escape(text)}</b>{escape(name)}</div>"
    curves = _curves(facts, facts.panels() if panels is None else panels)
    parts.append(f"<div class=figures>{boxes}</div>")
    parts += ["<h2>Curves</h2><div class=curves>", *curves, "</div>"]
    for name, rows in (tables or {}).items():
        parts += table_html(name, rows)
    parts += table_html("Benchmarks", facts.task_rows())
    parts += example_cards(examples, shown)
    parts += sections
    parts += table_html("Losses by source", facts.source_rows())
    parts += table_html("Rows left out", facts.left_out_rows())
    parts += table_html("Slow steps", facts.slow_step_rows())
    parts += table_html("What trains", facts.part_rows())
    parts += table_html("Device and throughput", facts.machine_rows())
    parts.append("<h2>Next steps</h2>")
    for purpose, command in (facts.next_steps() if next_steps is None else next_steps).items():
        command = f"<code class=command>{escape(command)}</code>"
        parts.append(f"<div>{escape(purpose)}{command}</div>")
    if config is None:
        config_file = run.dir / "config.yaml"
        config = config_file.read_text() if config_file.is_file() else ""
    summary = "<summary>all keys of this run</summary>"
    parts += ["<h2>Config</h2>", f"<details>{summary}<pre>{escape(config)}</pre></details>"]
    atomic_write_text(file, html_page(title, "\n".join(parts), policy=PAGE_POLICY))


def html_page(title: str, body: str, more_style: str = "", *, policy: str | None = None) -> str:
    """A page in the style of the report."""
    forbid = f'<meta http-equiv="Content-Security-Policy" content="{policy}">' if policy else ""
    head = (
        f'<meta charset=utf-8>{forbid}<meta name=viewport content="width=device-width">'
        f"<title>{escape(title)}</title><style>{style()}{more_style}</style>"
    )
    return f"<!doctype html><html lang=en><head>{head}</head><body>\n{body}\n</body></html>\n"


def _curves(facts: RunFacts, panels: Mapping[str, Mapping[str, str]]) -> list[str]:
    from mvp_engine.report.svg import plot_svg

    rates = {name: name for record in facts.records for name in record if is_learning_rate(name)}
    loads = {"mean of layers": "expert_load", "worst layer": "expert_load_max"}
    panels = {**panels, "learning rate": rates, "gradient norm": {"": "grad_norm"}}
    plots = []
    for title, metrics in {**panels, "load of the busiest expert / mean": loads}.items():
        curves = panel_curves(metrics, partial(Curve.read, facts.records))
        plots.append(plot_svg(title, curves, next(iter(metrics.values()), "")))
    return plots


def panel_curves(metrics: Mapping[str, str], read: Callable[..., Curve]) -> list[Curve]:
    """The curves of the metrics by label, of the training and of the evaluations."""
    curves = []
    for (label, metric), colour in zip(metrics.items(), cycle(COLOURS), strict=False):
        held_out = read("eval", metric, label, colour)
        name = "" if held_out.values else label  # one entry of the legend for both
        if len(metrics) == 1:
            name = "train"
            held_out = read("eval", metric, label, COLOURS[1])
        curves += [read("train", metric, name, colour), held_out]
    return curves


def table_html(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """A table with the column names in its first row, which may be empty."""
    if not rows:
        return []
    lines = [f"<h2>{escape(title)}</h2><div class=scroll><table>"]
    for cell, row in zip(chain(["th"], repeat("td")), rows, strict=False):
        if any(row):
            lines.append(f"<tr>{''.join(f'<{cell}>{escape(text)}' for text in row)}</tr>")
    return [*lines, "</table></div>"]


# ---- Examples ---------------------------------------------------------------------------------------


def example_cards(examples: Sequence[Example], shown: int = SHOWN) -> list[str]:
    chosen = _choose(examples, shown)
    if not chosen:
        return []
    if all(example.right is None for example in chosen):
        title, text = "Completions", f"{len(examples):,} prompts were completed."
        names = ["prompt", "reference", "the model's completion"]
    else:
        title, text = "Answers", f"{_counts(examples, chosen)}."
        names = ["prompt", "expected answer", "the model's answer"]
    cards = [_example(example, names) for example in chosen]
    head = [f"<h2>{title}</h2>", f"<p class=dim>{text}</p>", "<div class=cards>"]
    return [*head, *cards, "</div>"]


def _choose(examples: Sequence[Example], shown: int) -> list[Example]:
    """At most `shown` examples in their order; up to half of them, or more if right ones are few, are wrong."""
    wrong = [i for i, example in enumerate(examples) if example.right is False]
    others = [i for i, example in enumerate(examples) if example.right is not False]
    num_others = min(len(others), max(shown - len(wrong), shown - shown // 2))
    chosen = [*_spread(wrong, shown - num_others), *_spread(others, num_others)]
    return [examples[i] for i in sorted(chosen)]


def _counts(examples: Sequence[Example], chosen: Sequence[Example]) -> str:
    text = f"{count(len(examples), 'prompt')} {'was' if len(examples) == 1 else 'were'} answered"
    numbers = Counter(example.right for example in examples)
    shown = Counter(example.right for example in chosen)
    wrong, judged = numbers[False], numbers[False] + numbers[True]
    of_judged = f" of {judged:,} that were judged" if numbers[None] else ""
    return (
        f"{text}, {wrong:,} answers{of_judged} are wrong ({percent(wrong / judged)}). "
        f"Shown are {shown[False]:,} wrong ones, marked, and {shown[True]:,} right ones"
    )


def _example(example: Example, names: Sequence[str]) -> str:
    media = "".join(media_item(data) for data in example.media())
    html = f"<div class=media>{media}</div>" if media else ""
    html += "<dl>"
    texts = (example.question, example.expected, example.written)
    for name, text in zip(names, texts, strict=True):
        text = escape(_EMPTY_LINES.sub("\n\n", text))
        html += f"<dt>{name}<dd>{text}" if text else f"<dt>{name}<dd class=dim>(empty)"
    spoken = "".join(media_item(data) for data in example.spoken())
    html += f"<dt>spoken<dd class=media>{spoken}" if spoken else ""
    if example.right is None:
        return f"<div class=card>{html}</dl></div>"
    mark = "right" if example.right else "wrong"
    return f'<div class="card {mark}">{html}<dd class=mark>{mark}</dl></div>'


def _spread(numbers: Sequence[int], count: int) -> list[int]:
    """At most `count` of the numbers, evenly spread over the sequence."""
    count = min(count, len(numbers))
    return [numbers[i * len(numbers) // count] for i in range(count)]


# Images that a click enlarges, and audio, inside the HTML file.

# Image formats by the first bytes of a file.
_IMAGE_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
MAX_IMAGE_SIDE = 960  # pixels of an enlarged image
MAX_PNG_SIDE = 320
SMALL_IMAGE = 120  # pixels: smaller ones are enlarged without smoothing


def media_item(data: bytes) -> str:
    """The HTML of a PNG, JPEG, GIF, WebP or WAV file."""
    text = base64.b64encode(data).decode()
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return f'<audio controls src="data:audio/wav;base64,{text}"></audio>'
    for first_bytes, kind in _IMAGE_KINDS.items():
        if data.startswith(first_bytes):
            small = " class=small" if _is_small(data) else ""
            image = f'<img alt=""{small} src="data:image/{kind};base64,{text}">'
            # Without a script: the state of the checkbox enlarges the image.
            return f'<label class=zoom><input type=checkbox aria-label="enlarge">{image}</label>'
    return "[?]"


def _is_small(data: bytes) -> bool:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return max(image.size) < SMALL_IMAGE
    except OSError:  # not readable here; the browser shows what it can
        return False


def image_file(image: Image.Image) -> bytes:
    """A small image as PNG, exactly; a large one as JPEG, for a page of a few megabytes."""
    file = io.BytesIO()
    if max(image.size) <= MAX_PNG_SIDE:
        image.save(file, "png")
        return file.getvalue()
    smaller = image.convert("RGB")
    smaller.thumbnail((MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))
    smaller.save(file, "jpeg", quality=85)
    return file.getvalue()


def wav_file(samples: np.ndarray, rate: int) -> bytes:
    """A WAV file of 16 bits."""
    file = io.BytesIO()
    clipped = np.clip(samples, -1, 1)
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes((clipped * 32767).astype("<i2").tobytes())
    return file.getvalue()


# The style sheet of the report page: light and dark, from a phone to a wide screen, without scripts.

STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --dim: #64707d; --line: #d9dee3; --page: #fff; --box: #f6f7f9;
  --good: #047857; --bad: #b91c1c; --missed: #fef2f2; }
@media (prefers-color-scheme: dark) { :root { --ink: #dde3ea; --dim: #98a4b1; --line: #39424d; --page: #14181d;
  --box: #1e242b; --good: #34d399; --bad: #f87171; --missed: #2c1a1d; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1080px;
  margin: 0 auto; padding: 32px 24px 64px; overflow-wrap: anywhere; }
h1 { font-size: 26px; line-height: 1.25; margin: 0; } h2 { font-size: 18px; margin: 36px 0 10px; }
.dim { color: var(--dim); margin: 2px 0 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(136px, 1fr)); gap: 12px; margin-top: 22px; }
.figure { border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; color: var(--dim); font-size: 14px; }
.figure b { display: block; color: var(--ink); font-size: 20px; font-variant-numeric: tabular-nums; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 12px 20px; }
.plot { margin: 0; max-width: 620px; } .plot svg { display: block; width: 100%; height: auto; }
.plot figcaption { font-size: 14px; } .plot text { font-size: 11.5px; fill: var(--dim); }
.plot path, .plot line { fill: none; stroke-linejoin: round; } .plot .grid { stroke: var(--line); }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; font-size: 13px; color: var(--dim); padding-left: 11%; }
.legend i { display: inline-block; width: 14px; height: 3px; margin-right: 5px; vertical-align: middle; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; min-width: min(100%, 480px); }
th { text-align: left; color: var(--dim); font-weight: 500; font-size: 13px; }
th, td { padding: 6px 24px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: normal; }
td { font-variant-numeric: tabular-nums; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 16px;
  margin-top: 14px; }
.card { display: flex; flex-wrap: wrap; gap: 4px 16px; border: 1px solid var(--line); border-left-width: 4px;
  border-radius: 8px; padding: 12px 14px; }
.card.right { border-left-color: var(--good); } .card.wrong { border-left-color: var(--bad);
  background: var(--missed); }
.card dl { flex: 1 1 150px; margin: 0; } .card dt { color: var(--dim); font-size: 13px; margin-top: 6px; }
.card dd { margin: 0; white-space: pre-wrap; max-height: 18em; overflow-y: auto; }
.mark { font-weight: 600; } .right .mark { color: var(--good); } .wrong .mark { color: var(--bad); }
.media { flex: 1 1 100%; display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 120px), 1fr));
  gap: 8px; }
.media:has(> .zoom:only-child) { flex: 0 1 240px; }
.media audio { width: 100%; max-width: 340px; }
.zoom { display: block; min-height: 240px; }
.zoom input { position: absolute; opacity: 0; }
.zoom img { display: block; width: 100%; max-width: 240px; height: 240px; object-fit: contain; cursor: zoom-in;
  border: 1px solid var(--line); border-radius: 4px; background: var(--box); }
.zoom img.small { image-rendering: pixelated; }
.zoom input:focus-visible + img { outline: 2px solid #2563eb; }
.zoom input:checked + img { position: fixed; inset: 0; z-index: 1; width: 100vw; max-width: none; height: 100vh;
  border: 0; border-radius: 0; background: rgba(0, 0, 0, 0.88); cursor: zoom-out; }
code { user-select: all; font-size: 13px; }
pre, .command { display: block; background: var(--box); border-radius: 8px; padding: 10px 14px; margin: 4px 0 12px;
  font-size: 13px; }
pre { overflow-x: auto; }
summary { cursor: pointer; color: var(--dim); }
@media (max-width: 480px) { body { padding: 20px 16px 48px; } h1 { font-size: 22px; }
  .figures { grid-template-columns: repeat(auto-fill, minmax(104px, 1fr)); } .figure { padding: 8px 10px; }
  .figure b { font-size: 18px; } th, td { padding-right: 14px; font-size: 14px; } }
"""


def style() -> str:
    """The style sheet with the colours of curves."""
    light, dark = (
        " ".join(f"--c{i}: {colour};" for i, colour in enumerate(colours))
        for colours in (COLOURS, DARK.values())
    )
    scheme = f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return f"{STYLE}:root {{ {light} }} {scheme}"


NAME_WIDTH = 12


def end_of_run(run: Run, seconds: float, *, page: bool, summary: bool) -> None:
    """Write `report.html`, unless this launch has, and print the summary. An error here is not one of the run."""
    try:
        if page and not _is_new(run, seconds):
            write_page(run)
        if summary:
            text = summary_text(RunFacts(run), seconds)
            print(text, flush=True)
            log = run.dir / "log.txt"
            if log.is_file():
                with log.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")
    except Exception:  # noqa: BLE001 - the training has ended well
        print(f"the report of {run.dir} failed:\n{traceback.format_exc()}", flush=True)


def _is_new(run: Run, seconds: float) -> bool:
    file = run.dir / "report.html"
    created = run.info.get("ended", 0.0) - seconds
    return file.is_file() and file.stat().st_mtime >= created


def write_page(run: Run) -> None:
    """The page from what the run folder holds, with generated answers."""
    facts = RunFacts(run)
    write_report(
        run.dir / "report.html",
        run,
        title=str(facts.info.get("name", run.id)),
        subtitle=f"{run.id}, {_progress(facts)}",
        examples=read_answers(run)[1],
    )


def read_answers(run: Run, step: int | None = None) -> tuple[list[int], list[Example]]:
    """The steps of the evaluations that `answers.jsonl` has, and the answers of one, by default the last.

    Media of some rows, and what was spoken, are in the folder `answers` (`write_media`).
    """
    file = run.dir / "answers.jsonl"
    if not file.is_file():
        return [], []
    by_step: dict[int, list[dict[str, Any]]] = {}
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            by_step.setdefault(record["step"], []).append(record)
    steps = sorted(by_step)
    rows = by_step.get(steps[-1] if step not in by_step else step, [])
    examples = []
    for row in rows:
        read = [
            partial(_read_files, run.dir / MEDIA_OF_ANSWERS, f"{row.get('sample')}-{kind}*")
            for kind in ("media", "spoken")
        ]
        texts = row["prompt"], row["expected"], row["written"]
        examples.append(Example(read[0], *texts, row["right"], read[1]))
    return steps, examples


def _read_files(folder: Path, pattern: str) -> list[bytes]:
    return [file.read_bytes() for file in sorted(folder.glob(pattern))]


def write_media(run: Run, samples: Sequence[int], examples: Sequence[Example]) -> None:
    """Keep the media of the answers that a page shows, in the order of `answers.jsonl`; those before are removed."""
    folder = run.dir / MEDIA_OF_ANSWERS
    old = set(folder.glob("*-*"))
    sample_of = {id(example): sample for example, sample in zip(examples, samples, strict=True)}
    for example in _choose(examples, SHOWN):
        sample = sample_of[id(example)]
        kept = set(folder.glob(f"{sample}-media*"))
        files = {} if kept else {"media": example.media()}
        files["spoken"] = example.spoken()
        for kind, contents in files.items():
            for index, data in enumerate(contents):
                if data:
                    folder.mkdir(exist_ok=True)
                    file = folder / f"{sample}-{kind}{index:03d}"
                    file.write_bytes(data)
                    kept.add(file)
        old -= kept
    for file in old:
        file.unlink(missing_ok=True)


def _progress(facts: RunFacts) -> str:
    total = facts.setup.get("total_steps")
    return f"step {facts.step:,}" + (f" of {total:,}" if total else "")


def summary_text(facts: RunFacts, seconds: float) -> str:
    """What a run did, in a few lines, and the commands that may follow."""
    run = facts.run
    lines = [
        f"\n{run.id}: {facts.info.get('status')} at {_progress(facts)}, in {duration(seconds)}"
    ]
    train = facts.last("train")
    held_out = facts.last("eval")
    name = facts.headline
    if train.get(name) is not None:
        lines.append(_line("train", f"{name} {number(train[name])}"))
    if held_out:
        values = _metrics(held_out)
        lines.append(_line("eval", f"step {held_out['step']:,}  {values}"))
    if best := facts.best:
        value = metric_text(best["metric"], best["value"])
        lines.append(_line("best", f"{best['metric']} {value} at step {best['step']:,}"))
    speed = [f"{name} {text}" for name, text in facts.speed().items() if name != "seconds per step"]
    if speed:
        lines.append(_line("speed", ", ".join(speed)))
    if skipped := train.get("skipped"):
        lines.append(_line("skipped", f"{skipped} steps: see {run.dir / 'skipped_steps.jsonl'}"))
    if facts.left_out:
        reasons = ", ".join(f"{s}: {n:,} {r}" for (s, r), n in facts.left_out.most_common())
        lines.append(_line("left out", f"{facts.left_out.total():,} rows ({reasons})"))
    lines += [_line(name, text) for name, text in facts.slow_step_lines()]
    lines.append(_line("files", _files(run)))
    lines.append("next:")
    steps = facts.next_steps()
    width = max(map(len, steps))
    lines += [f"  {what:<{width}}  {command}" for what, command in steps.items()]
    return "\n".join(lines)


def _line(name: str, text: str) -> str:
    return f"  {name:<{NAME_WIDTH}}{text}"


def _metrics(record: dict[str, Any]) -> str:
    hidden = ("loss", "step", "epoch", "split")
    others = [name for name in record if name not in hidden and not name.startswith("loss_")]
    names = ["loss", *others] if "loss" in record else others
    return "  ".join(f"{name} {metric_text(name, record[name])}" for name in names)


def _files(run: Run) -> str:
    names = [name for name in ("report.html", "loss.png") if (run.dir / name).is_file()]
    checkpoints = run.checkpoint_list()
    if checkpoints:
        names.append(f"checkpoints/{checkpoints[-1].name}")
    return f"{run.dir}/ ({', '.join(names)})" if names else f"{run.dir}/"
