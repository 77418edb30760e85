"""The report page of a run: metrics, curves, prompts with the model's answers and media, config, next steps.

The page is one HTML file without scripts that loads nothing from elsewhere. Everything from data is escaped.
"""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

from PIL import Image

from mvp_engine.errors import count
from mvp_engine.files import atomic_write_text
from mvp_engine.log.format import is_learning_rate
from mvp_engine.report.facts import Record, RunFacts, percent
from mvp_engine.report.plot import COLOURS, DARK, GRID, INK, Curve, draw_curves, lay_out, new_figure
from mvp_engine.runs import Run

_EMPTY_LINES = re.compile(r"\n\s*\n")  # poorly trained models generate many
# Forbids whatever escaping might miss, and every request to another host.
_POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"


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
    shown: int = 24,
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
        parts += _table(name, rows)
    parts += _examples(examples, shown)
    parts += sections
    parts += _table("Losses by source", facts.source_rows())
    parts += _table("Rows left out", facts.left_out_rows())
    parts += _table("Slow steps", facts.slow_step_rows())
    parts += _table("What trains", facts.part_rows())
    parts += _table("Device and throughput", facts.machine_rows())
    parts.append("<h2>Next steps</h2>")
    for purpose, command in (facts.next_steps() if next_steps is None else next_steps).items():
        command = f"<code class=command>{escape(command)}</code>"
        parts.append(f"<div>{escape(purpose)}{command}</div>")
    if config is None:
        config_file = run.dir / "config.yaml"
        config = config_file.read_text() if config_file.is_file() else ""
    summary = "<summary>all keys of this run</summary>"
    parts += ["<h2>Config</h2>", f"<details>{summary}<pre>{escape(config)}</pre></details>"]
    head = (
        "<meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name=viewport content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(parts)
    page = f"<!doctype html><html lang=en><head>{head}</head><body>\n{body}\n</body></html>\n"
    atomic_write_text(file, page)


def _curves(facts: RunFacts, panels: Mapping[str, Mapping[str, str]]) -> list[str]:
    rates = {name: name for record in facts.records for name in record if is_learning_rate(name)}
    loads = {"mean of layers": "expert_load", "worst layer": "expert_load_max"}
    panels = {**panels, "learning rate": rates, "gradient norm": {"": "grad_norm"}}
    images = []
    for title, metrics in {**panels, "load of the busiest expert / mean": loads}.items():
        if svg := curves_svg(facts.records, title, metrics):
            data = base64.b64encode(svg.encode()).decode()
            images.append(f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">')
    return images


def _table(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """A table with the column names in its first row, which may be empty."""
    if not rows:
        return []
    lines = [f"<h2>{escape(title)}</h2><div class=scroll><table>"]
    for cell, row in zip(chain(["th"], repeat("td")), rows, strict=False):
        if any(row):
            lines.append(f"<tr>{''.join(f'<{cell}>{escape(text)}' for text in row)}</tr>")
    return [*lines, "</table></div>"]


# ---- Examples ---------------------------------------------------------------------------------------


def _examples(examples: Sequence[Example], shown: int) -> list[str]:
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


# The curves of a report page: metrics over steps, one SVG image for each panel, in light and dark colours.

# Colours of the plot and their counterparts on a dark page.
_DARK = {INK: "#dde3ea", GRID: "#39424d", **DARK}


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
.curves img { width: 100%; max-width: 560px; height: auto; }
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
