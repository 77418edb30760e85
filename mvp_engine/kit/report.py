"""The report page of a run: metrics, curves, prompts with the model's answers and media, config, next steps.

The page is one HTML file without scripts that loads nothing from elsewhere. Everything from data is escaped.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from mvp_engine.files import atomic_write_text
from mvp_engine.kit.report_curves import curves_svg
from mvp_engine.runs import Run

# Image formats by the first bytes of a file.
_IMAGE_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
_EMPTY_LINES = re.compile(r"\n\s*\n")  # poorly trained models generate many
# Forbids whatever escaping might miss, and every request to another host.
_POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light; --ink: #1f2933; --dim: #64707d; --line: #d9dee3; --good: #047857; --bad: #b91c1c; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; max-width: 960px; margin: 0 auto;
  padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 36px 0 10px; }
.dim { color: var(--dim); margin: 2px 0 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(128px, 1fr)); gap: 12px; margin-top: 22px; }
.figure { border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; overflow-wrap: anywhere; }
.figure b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; }
.curves { width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; color: var(--dim); font-weight: 500; font-size: 13px; }
th, td { padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); }
td { overflow-wrap: anywhere; white-space: pre-wrap; vertical-align: top; }
td audio { height: 32px; width: 220px; vertical-align: middle; }
td img { height: 56px; width: 56px; object-fit: contain; image-rendering: pixelated; margin-right: 6px;
  border: 1px solid var(--line); border-radius: 4px; vertical-align: middle; background: #f6f7f9; }
.media, .right, .wrong { white-space: nowrap; }
.right { color: var(--good); } .wrong { color: var(--bad); font-weight: 600; }
table.steps td:first-child { white-space: nowrap; }
tr.missed td { background: #fef2f2; }
pre { background: #f6f7f9; border-radius: 8px; padding: 12px 16px; overflow-x: auto; font-size: 13px; }
summary { cursor: pointer; color: var(--dim); }
"""


@dataclass(frozen=True)
class Example:
    """A prompt and the model's answer. `media` returns PNG, JPEG, GIF, WebP or WAV files; only shown ones are read."""

    media: Callable[[], Sequence[bytes]]
    question: str
    expected: str
    written: str
    right: bool | None  # None: neither right nor wrong, as for the continuation of a text


def write_report(
    file: Path,
    run: Run,
    *,
    title: str,
    subtitle: str,
    figures: Mapping[str, str],
    panels: Mapping[str, Mapping[str, str]],
    examples: Sequence[Example],
    config: str,
    next_steps: Mapping[str, str],
    tables: Mapping[str, Sequence[Sequence[str]]] | None = None,
    shown: int = 24,
) -> None:
    """Write the page.

    `panels` are metrics to plot, by title and label. `next_steps` are commands, by what they do. `tables` are rows
    of texts by title, the first row with the column names. At most `shown` examples are on the page, in their
    order; up to half of them are wrong answers.
    """
    curves = base64.b64encode(curves_svg(run, panels).encode()).decode()
    figure_boxes = "".join(_figure(name, text) for name, text in figures.items())
    parts = [
        f"<h1>{escape(title)}</h1><p class=dim>{escape(subtitle)}</p>",
        f"<div class=figures>{figure_boxes}</div>",
        "<h2>Curves</h2>",
        f'<img class=curves alt="curves over steps" src="data:image/svg+xml;base64,{curves}">',
    ]
    for name, rows in (tables or {}).items():
        parts += _table(name, rows)
    parts += _examples(examples, shown)
    parts += _next_steps(next_steps)
    parts += [
        "<h2>Config</h2>",
        f"<details><summary>all keys of this run</summary><pre>{escape(config)}</pre></details>",
    ]
    atomic_write_text(file, _page(title, parts))


def _page(title: str, parts: list[str]) -> str:
    head = (
        "<meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name=viewport content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    body = "\n".join(parts)
    return f"<!doctype html><html lang=en><head>{head}</head><body>\n{body}\n</body></html>\n"


def _figure(name: str, text: str) -> str:
    return f"<div class=figure><b>{escape(text)}</b>{escape(name)}</div>"


def _table(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"<h2>{escape(title)}</h2><table>"]
    for number, row in enumerate(rows):
        cell = "td" if number else "th"
        cells = "".join(f"<{cell}>{escape(text)}" for text in row)
        lines.append(f"<tr>{cells}</tr>")
    return [*lines, "</table>"]


def _next_steps(commands: Mapping[str, str]) -> list[str]:
    lines = ["<h2>Next steps</h2><table class=steps>"]
    for what, command in commands.items():
        lines.append(f"<tr><td>{escape(what)}<td><code>{escape(command)}</code></tr>")
    return [*lines, "</table>"]


# ---- Examples ---------------------------------------------------------------------------------------


def _examples(examples: Sequence[Example], shown: int) -> list[str]:
    chosen = _choose(examples, shown)
    if not chosen:
        return []
    all_media = [example.media() for example in chosen]
    has_media = any(all_media)
    is_open_ended = all(example.right is None for example in chosen)
    if is_open_ended:
        title = "Completions"
        columns = ["prompt", "reference", "the model's completion"]
        counts = f"{len(examples):,} prompts were completed"
    else:
        title = "Answers"
        columns = ["prompt", "expected answer", "the model's answer", ""]
        counts = _counts(examples, chosen)
    header = "<th>" if has_media else ""
    header += "".join(f"<th>{name}" for name in columns)
    lines = [f"<h2>{title}</h2>", f"<p class=dim>{counts}.</p>", f"<table><tr>{header}</tr>"]
    for example, media in zip(chosen, all_media, strict=True):
        lines.append(_example(example, media if has_media else None))
    return [*lines, "</table>"]


def _choose(examples: Sequence[Example], shown: int) -> list[Example]:
    """At most `shown` examples in their order; up to half of them, or more if right ones are few, are wrong."""
    wrong = [i for i, example in enumerate(examples) if example.right is False]
    others = [i for i, example in enumerate(examples) if example.right is not False]
    num_others = min(len(others), max(shown - len(wrong), shown - shown // 2))
    chosen = [*_spread(wrong, shown - num_others), *_spread(others, num_others)]
    return [examples[i] for i in sorted(chosen)]


def _counts(examples: Sequence[Example], chosen: Sequence[Example]) -> str:
    text = f"{len(examples):,} prompts were answered"
    if any(example.right is None for example in chosen):
        return text
    wrong = sum(example.right is False for example in examples)
    shown_wrong = sum(example.right is False for example in chosen)
    shown_right = len(chosen) - shown_wrong
    return (
        f"{text}, {wrong:,} answers are wrong. "
        f"Shown are {shown_wrong:,} wrong ones, marked, and {shown_right:,} right ones"
    )


def _example(example: Example, media: Sequence[bytes] | None) -> str:
    cells = ""
    if media is not None:
        cells += f"<td class=media>{''.join(_media_item(data) for data in media)}"
    for text in (example.question, example.expected, example.written):
        collapsed = _EMPTY_LINES.sub("\n\n", text)
        cells += f"<td>{escape(collapsed)}"
    if example.right is not None:
        mark = "right" if example.right else "wrong"
        cells += f"<td><span class={mark}>{mark}</span>"
    row_class = " class=missed" if example.right is False else ""
    return f"<tr{row_class}>{cells}</tr>"


def _media_item(data: bytes) -> str:
    text = base64.b64encode(data).decode()
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return f'<audio controls src="data:audio/wav;base64,{text}"></audio>'
    for first_bytes, kind in _IMAGE_KINDS.items():
        if data.startswith(first_bytes):
            return f'<img alt="" src="data:image/{kind};base64,{text}">'
    return "[?]"


def _spread(numbers: Sequence[int], count: int) -> list[int]:
    """At most `count` of the numbers, evenly spread over the sequence."""
    count = min(count, len(numbers))
    return [numbers[i * len(numbers) // count] for i in range(count)]
