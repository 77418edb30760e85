"""A run as one page: figures, curves, what the model answered beside the pictures it saw, the config, how to go on.

The page is one file without scripts, and loads nothing from anywhere. Whatever comes from data is escaped.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from mvp_engine.files import atomic_write_text
from mvp_engine.log.plot import curves_svg
from mvp_engine.runs import Run

# By how their files begin.
_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
_EMPTY_LINES = re.compile(r"\n\s*\n")  # models that have learnt little write many
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
.pictures, .right, .wrong { white-space: nowrap; }
.right { color: var(--good); } .wrong { color: var(--bad); font-weight: 600; }
table.steps td:first-child { white-space: nowrap; }
tr.missed td { background: #fef2f2; }
pre { background: #f6f7f9; border-radius: 8px; padding: 12px 16px; overflow-x: auto; font-size: 13px; }
summary { cursor: pointer; color: var(--dim); }
"""


@dataclass(frozen=True)
class Example:
    """A question to the model. Its media, asked for only if it is shown, are PNG, JPEG, GIF, WebP or WAV files."""

    media: Callable[[], Sequence[bytes]]
    question: str
    expected: str
    written: str
    right: bool | None  # None: there is no right or wrong, as where a text goes on


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
    """`panels` are metrics to draw, by title and label; `next_steps` are commands, by what they do; `tables` are rows
    of texts by title, the first with the names of the columns.

    Of the examples at most `shown` are on the page, in their order; up to half of the places are for wrong answers.
    """
    wrong = [i for i, example in enumerate(examples) if example.right is False]
    right = [i for i, example in enumerate(examples) if example.right is not False]
    room = min(len(right), max(shown - len(wrong), shown - shown // 2))
    chosen = [examples[i] for i in sorted([*_spread(wrong, shown - room), *_spread(right, room)])]
    curve = base64.b64encode(curves_svg(run, panels).encode()).decode()
    parts = [
        f"<h1>{escape(title)}</h1><p class=dim>{escape(subtitle)}</p>",
        f"<div class=figures>{''.join(_figure(name, text) for name, text in figures.items())}</div>",
        f'<h2>Curves</h2><img class=curves alt="curves over steps" src="data:image/svg+xml;base64,{curve}">',
        *(part for name, rows in (tables or {}).items() for part in _table(name, rows)),
        *_answers(chosen, len(examples), len(wrong)),
        "<h2>How to go on</h2><table class=steps>",
        *(
            f"<tr><td>{escape(what)}<td><code>{escape(command)}</code></tr>"
            for what, command in next_steps.items()
        ),
        f"</table><h2>Config</h2><details><summary>all keys of this run</summary><pre>{escape(config)}</pre></details>",
    ]
    # The policy forbids what escaping should have prevented, and every request to somewhere else.
    policy = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
    page = (
        f'<!doctype html><html lang=en><head><meta charset=utf-8><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><meta name=viewport content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
    atomic_write_text(file, page)


def _figure(name: str, text: str) -> str:
    return f"<div class=figure><b>{escape(text)}</b>{escape(name)}</div>"


def _table(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    kinds = ["th", *["td"] * (len(rows) - 1)]
    lines = [
        "".join(f"<{kind}>{escape(text)}" for text in row)
        for kind, row in zip(kinds, rows, strict=True)
    ]
    return [f"<h2>{escape(title)}</h2><table>", *(f"<tr>{line}</tr>" for line in lines), "</table>"]


def _answers(chosen: Sequence[Example], asked: int, wrong: int) -> list[str]:
    if not chosen:
        return []
    seen = [example.media() for example in chosen]
    open_ended = all(example.right is None for example in chosen)
    title, heads = "Answers", ["question", "right answer", "the model's answer", ""]
    told = f"{asked:,} questions were asked"
    if open_ended:
        title, heads = "Continued texts", ["a text begins", "and goes on", "the model goes on"]
        told = f"{asked:,} beginnings of texts were given"
    elif all(example.right is not None for example in chosen):
        missed = sum(example.right is False for example in chosen)
        told += f", {wrong:,} answers are wrong. Shown are {missed:,} wrong ones, marked, and "
        told += f"{len(chosen) - missed:,} right ones"
    column = "<th>" if any(seen) else ""
    column += "".join(f"<th>{name}" for name in heads)
    rows = [
        _row(example, media if any(seen) else None)
        for example, media in zip(chosen, seen, strict=True)
    ]
    return [
        f"<h2>{title}</h2>",
        f"<p class=dim>{told}.</p>",
        f"<table><tr>{column}</tr>",
        *rows,
        "</table>",
    ]


def _row(example: Example, media: Sequence[bytes] | None) -> str:
    mark = "<span class=right>right</span>" if example.right else "<span class=wrong>wrong</span>"
    said = (
        _EMPTY_LINES.sub("\n\n", text)
        for text in (example.question, example.expected, example.written)
    )
    texts = "".join(f"<td>{escape(text)}" for text in said)
    texts += "" if example.right is None else f"<td>{mark}"
    kind = " class=missed" if example.right is False else ""
    shown = "" if media is None else f"<td class=pictures>{''.join(map(_medium, media))}"
    return f"<tr{kind}>{shown}{texts}</tr>"


def _medium(data: bytes) -> str:
    text = base64.b64encode(data).decode()
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return f'<audio controls src="data:audio/wav;base64,{text}"></audio>'
    kind = next((kind for start, kind in _KINDS.items() if data.startswith(start)), None)
    return "[?]" if kind is None else f'<img alt="" src="data:image/{kind};base64,{text}">'


def _spread(numbers: Sequence[int], count: int) -> list[int]:
    """So many of them, evenly from beginning to end."""
    count = min(count, len(numbers))
    return [numbers[i * len(numbers) // count] for i in range(count)]
