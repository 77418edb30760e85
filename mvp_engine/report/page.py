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

from mvp_engine.errors import count
from mvp_engine.files import atomic_write_text
from mvp_engine.log.format import is_learning_rate
from mvp_engine.report.facts import RunFacts, config_text, percent
from mvp_engine.report.page_curves import curves_svg
from mvp_engine.report.page_media import media_item
from mvp_engine.report.page_rollouts import PromptRollouts, rollouts_html
from mvp_engine.report.page_style import STYLE
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
    spoken: Callable[[], Sequence[bytes]] = list  # the answer as speech: WAV files


def write_report(
    file: Path,
    run: Run,
    *,
    title: str,
    subtitle: str,
    figures: Mapping[str, str] | None = None,
    panels: Mapping[str, Mapping[str, str]] | None = None,
    examples: Sequence[Example] = (),
    rollouts: Mapping[str, Sequence[PromptRollouts]] | None = None,
    config: str | None = None,
    next_steps: Mapping[str, str] | None = None,
    tables: Mapping[str, Sequence[Sequence[str]]] | None = None,
    shown: int = 24,
) -> None:
    """Write the page of a run. What is not given is taken from the run folder.

    `figures` are metrics as text. `panels` are metrics to plot, by title and label. `next_steps` are commands, by
    what they do. `tables` are rows of texts by title, the first row with the column names. At most `shown` examples
    are on the page, in their order; up to half of them are wrong answers. `rollouts` are prompts with several
    completions and their rewards, by title.
    """
    facts = RunFacts(run)
    figures = facts.figures() if figures is None else figures
    figure_boxes = "".join(_figure(name, text) for name, text in figures.items())
    parts = [
        f"<h1>{escape(title)}</h1><p class=dim>{escape(subtitle)}</p>",
        f"<div class=figures>{figure_boxes}</div>",
        "<h2>Curves</h2><div class=curves>",
    ]
    parts += _curves(facts, facts.panels() if panels is None else panels)
    parts.append("</div>")
    for name, rows in (tables or {}).items():
        parts += _table(name, rows)
    parts += _examples(examples, shown)
    for name, prompts in (rollouts or {}).items():
        parts += rollouts_html(name, prompts)
    parts += _table("Losses by source", facts.source_rows())
    parts += _table("Rows left out", facts.left_out_rows())
    parts += _table("Slow steps", facts.slow_step_rows())
    parts += _table("What trains", facts.part_rows())
    parts += _table("Device and throughput", facts.machine_rows())
    parts += _next_steps(facts.next_steps() if next_steps is None else next_steps)
    text = config_text(run) if config is None else config
    parts += [
        "<h2>Config</h2>",
        f"<details><summary>all keys of this run</summary><pre>{escape(text)}</pre></details>",
    ]
    atomic_write_text(file, _page(title, parts))


def _page(title: str, parts: list[str]) -> str:
    head = (
        "<meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name=viewport content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(parts)
    return f"<!doctype html><html lang=en><head>{head}</head><body>\n{body}\n</body></html>\n"


def _figure(name: str, text: str) -> str:
    return f"<div class=figure><b>{escape(text)}</b>{escape(name)}</div>"


def _curves(facts: RunFacts, panels: Mapping[str, Mapping[str, str]]) -> list[str]:
    rates = {name: name for record in facts.records for name in record if is_learning_rate(name)}
    loads = {"mean of layers": "expert_load", "worst layer": "expert_load_max"}
    every = {**panels, "learning rate": rates, "gradient norm": {"": "grad_norm"}}
    every["load of the busiest expert / mean"] = loads
    images = []
    for title, metrics in every.items():
        svg = curves_svg(facts.records, title, metrics)
        if svg:
            data = base64.b64encode(svg.encode()).decode()
            images.append(f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">')
    return images


def _table(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """A table with the column names in its first row, which may be empty."""
    if not rows:
        return []
    lines = [f"<h2>{escape(title)}</h2><div class=scroll><table>"]
    for number, row in enumerate(rows):
        if not any(row):
            continue
        cell = "td" if number else "th"
        cells = "".join(f"<{cell}>{escape(text)}" for text in row)
        lines.append(f"<tr>{cells}</tr>")
    return [*lines, "</table></div>"]


def _next_steps(commands: Mapping[str, str]) -> list[str]:
    lines = ["<h2>Next steps</h2>"]
    for what, command in commands.items():
        lines.append(f"<div>{escape(what)}<code class=command>{escape(command)}</code></div>")
    return lines


# ---- Examples ---------------------------------------------------------------------------------------


def _examples(examples: Sequence[Example], shown: int) -> list[str]:
    chosen = _choose(examples, shown)
    if not chosen:
        return []
    if all(example.right is None for example in chosen):
        lines = [
            "<h2>Completions</h2>",
            f"<p class=dim>{len(examples):,} prompts were completed.</p>",
        ]
        names = ["prompt", "reference", "the model's completion"]
    else:
        lines = ["<h2>Answers</h2>", f"<p class=dim>{_counts(examples, chosen)}.</p>"]
        names = ["prompt", "expected answer", "the model's answer"]
    lines.append("<div class=cards>")
    lines += [_example(example, names) for example in chosen]
    return [*lines, "</div>"]


def _choose(examples: Sequence[Example], shown: int) -> list[Example]:
    """At most `shown` examples in their order; up to half of them, or more if right ones are few, are wrong."""
    wrong = [i for i, example in enumerate(examples) if example.right is False]
    others = [i for i, example in enumerate(examples) if example.right is not False]
    num_others = min(len(others), max(shown - len(wrong), shown - shown // 2))
    chosen = [*_spread(wrong, shown - num_others), *_spread(others, num_others)]
    return [examples[i] for i in sorted(chosen)]


def _counts(examples: Sequence[Example], chosen: Sequence[Example]) -> str:
    text = f"{count(len(examples), 'prompt')} {'was' if len(examples) == 1 else 'were'} answered"
    judged = sum(example.right is not None for example in examples)
    wrong = sum(example.right is False for example in examples)
    shown_wrong = sum(example.right is False for example in chosen)
    shown_right = sum(example.right is True for example in chosen)
    of_judged = "" if judged == len(examples) else f" of {judged:,} that were judged"
    return (
        f"{text}, {wrong:,} answers{of_judged} are wrong ({percent(wrong / judged)}). "
        f"Shown are {shown_wrong:,} wrong ones, marked, and {shown_right:,} right ones"
    )


def _example(example: Example, names: Sequence[str]) -> str:
    media = "".join(media_item(data) for data in example.media())
    html = f"<div class=media>{media}</div>" if media else ""
    html += "<dl>"
    texts = (example.question, example.expected, example.written)
    for name, text in zip(names, texts, strict=True):
        collapsed = _EMPTY_LINES.sub("\n\n", text)
        html += f"<dt>{name}<dd>{escape(collapsed)}" if text else f"<dt>{name}<dd class=dim>(empty)"
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
