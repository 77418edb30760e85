"""`mvp data inspect --html`: rows as cards with images, video frames, audio and the tokens with loss, in one file.

The facts are those of `--json`; media are read from the rows' own files, small enough for a page. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from mvp_engine import plugins
from mvp_engine.errors import count
from mvp_engine.files import atomic_write_text
from mvp_engine.kit.data.read.decoders import decode
from mvp_engine.kit.data.read.probe import probe
from mvp_engine.kit.data.read.row_types import MEDIA, BadRow, Codes, Limits, Message, Part, Row
from mvp_engine.report.page import (
    PAGE_POLICY,
    html_page,
    image_file,
    media_item,
    table_html,
    wav_file,
)
from mvp_engine.tools.inspect_page import SIDES, headline, media_words

ROWS = 24  # of a gallery, unless --limit says otherwise
FRAMES = 6  # of a video
SAMPLING_RATE = 16_000
MAX_SECONDS = 30  # of an audio clip
MAX_CHARACTERS = 20_000  # of a row's text
MAX_BAD_ROWS = 200
LIMITS = Limits(max_frames=FRAMES, timeout=20.0)

STYLE = """
.tokens { flex: 1 1 100%; white-space: pre-wrap; max-height: 32em; overflow-y: auto; font-size: 14px; }
.loss { color: var(--good); background: color-mix(in srgb, var(--good) 14%, transparent); border-radius: 3px; }
.tag { color: #9333ea; font-size: 12px; border: 1px solid; border-radius: 4px; padding: 0 4px; }
.card > b { flex: 1 1 100%; font-weight: 600; } .card.wrong { border-left-color: var(--bad); }
.cards { grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); }
.card { align-content: flex-start; } .media { display: flex; flex-wrap: wrap; } .media audio { width: 260px; }
.media figure { margin: 0; } .media figcaption { color: var(--dim); font-size: 12px; }
.zoom { min-height: 0; } .zoom img { height: auto; width: auto; max-width: 200px; max-height: 160px; }
.zoom img.small { min-width: 72px; }
.bar { display: inline-block; height: 12px; background: var(--c0); border-radius: 2px; vertical-align: middle; }
"""


@dataclass
class Gallery:
    """Media of the rows that are shown, by the place of the row and the side of a pair: of each item its files."""

    media: dict[tuple[str, int], list[list[bytes]]] = field(default_factory=dict)

    def keep(self, where: str, row: Row, root: Path) -> None:
        sides: list[tuple[int, Sequence[Message]]] = [(0, row.messages), (1, row.messages)]
        for side, messages in [*sides, (-1, row.rejected or ())]:
            parts = [part for message in messages for part in _media(message)]
            if side < 1 and parts:
                self.media[where, side] = [_files(part, root) for part in parts]
        self.media[where, 1] = self.media.get((where, 0), [])


def _media(message: Message) -> Iterator[Part]:
    yield from (part for part in message.parts if part.kind in MEDIA)
    if message.target is not None:
        yield message.target


def _files(part: Part, root: Path) -> list[bytes]:
    """An image, some frames of a video, or the start of an audio clip; none if it cannot be read."""
    if isinstance(part.value, Codes):
        return []
    try:
        item = decode(part, probe(part, LIMITS, root), LIMITS, root, SAMPLING_RATE)
    except BadRow:
        return []
    if part.kind == "image":
        return [image_file(item)]
    if part.kind == "video":
        return [image_file(Image.fromarray(frame)) for frame in item[:: -(-len(item) // FRAMES)]]
    return [wav_file(item[: MAX_SECONDS * SAMPLING_RATE], SAMPLING_RATE)]


def write_gallery(file: Path, facts: dict[str, Any], gallery: Gallery) -> None:
    """Write the page; the folder is created."""
    parts = [f"<h1>{escape(headline(facts).plain)}</h1><p class=dim>{escape(_subtitle(facts))}</p>"]
    boxes = "".join(
        f"<div class=figure><b>{escape(text)}</b>{escape(name)}</div>"
        for name, text in _figures(facts).items()
    )
    parts.append(f"<div class=figures>{boxes}</div>")
    if facts["missing"]:
        parts.append(f"<p class=dim>Not known: {escape(facts['missing'])}</p>")
    cards = [card for row in facts["rows"] for card in _cards(row, gallery)]
    if cards:
        colour = "<span class=loss>text with loss</span> <span class=tag>media</span>"
        parts += [f"<h2>Rows</h2><p class=dim>{colour}</p><div class=cards>", *cards, "</div>"]
    names = ["source", "rows", "usable", "bad", "over-long", "tokens", "share"]
    sources = [
        [
            s["name"],
            *(f"{s[key]:,}" for key in ("rows", "good", "bad", "overlong")),
            _number(s["tokens"]),
            _share(s),
        ]
        for s in facts["sources"]
    ]
    parts += table_html("Sources", [names, *sources])
    parts += _lengths(facts["lengths"])
    bad = [
        [r["where"], r["reason"], r["detail"][:300]] for r in facts["bad"]["rows"][:MAX_BAD_ROWS]
    ]
    shown = (
        f", {MAX_BAD_ROWS} of {facts['bad']['total']:,}"
        if facts["bad"]["total"] > MAX_BAD_ROWS
        else ""
    )
    parts += table_html(f"Bad rows{shown}", [["row", "reason", ""], *bad] if bad else [])
    overlong = (facts["overlong"] or {"where": []})["where"][:MAX_BAD_ROWS]
    parts += table_html(
        "Over-long rows, dropped", [["row"], *([one] for one in overlong)] if overlong else []
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(
        file, html_page(str(facts["data"]), "\n".join(parts), STYLE, policy=PAGE_POLICY)
    )


def _subtitle(facts: dict[str, Any]) -> str:
    sample = facts["sample"]
    kinds = [
        f"{number:,} {name}" for name, number in {**sample["formats"], **sample["media"]}.items()
    ]
    unused = ", ".join(sample["unused_columns"])
    words = f"{', '.join(kinds)} in {count(sample['rows'], 'sampled row')}"
    return words + (f"; columns that no reader uses: {unused}" if unused else "")


def _figures(facts: dict[str, Any]) -> dict[str, str]:
    """Counts of the rows, and how they are packed."""
    figures = {"rows": _number(sum(source["rows"] for source in facts["sources"]))}
    figures["bad"] = _number(facts["bad"]["total"])
    if facts["overlong"] is not None:
        figures["over-long, dropped"] = _number(facts["overlong"]["rows"])
    if (lengths := facts["lengths"]) is not None:
        figures[f"{lengths['unit']} of the median row"] = _number(lengths["median"])
        figures[f"{lengths['unit']} of the longest"] = _number(lengths["max"])
    if (plan := facts["plan"]) is not None:
        figures["tokens of an epoch"] = _number(plan["tokens"])
        figures[f"packs of {plan['micro_batch_tokens']:,} tokens"] = _number(plan["packs"])
        figures["of the packs is filled"] = f"{plan['fill']:.1%}"
        figures[f"steps of {count(plan['packs_per_step'], 'pack')} per epoch"] = _number(
            plan["steps"]
        )
    return figures


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _share(source: dict[str, Any]) -> str:
    return "-" if source["share"] is None else f"{source['share']:.1%} of the {source['share_of']}"


def _lengths(lengths: dict[str, Any] | None) -> list[str]:
    if lengths is None:
        return []
    most = max(one["rows"] for one in lengths["histogram"])
    lines = [f"<h2>Lengths in {escape(lengths['unit'])}</h2><div class=scroll><table>"]
    for one in lengths["histogram"]:
        bar = f'<span class=bar style="width:{max(1, round(300 * one["rows"] / most)) if one["rows"] else 0}px"></span>'
        lines.append(f"<tr><td>{one['from']:,} to {one['to']:,}<td>{bar} {one['rows']:,}")
    return [*lines, "</table></div>"]


def _cards(row: dict[str, Any], gallery: Gallery) -> Iterator[str]:
    """A card for each sequence of a row, or with the reason why it has none."""
    title = escape(
        f"row {row['row']}, {row['where']}" + (f", {row['format']}" if row["format"] else "")
    )
    if row["bad"]:
        media = "".join(_figure(files, "") for files in gallery.media.get((row["where"], 0), []))
        reason = escape(f"{row['bad']['reason']}: {row['bad']['detail']}")
        body = f"<div class=media>{media}</div><div class=tokens>{reason}</div>"
        yield f'<div class="card wrong"><b>{title}</b>{body}</div>'
    for sequence in row["sequences"]:
        files = gallery.media.get((row["where"], sequence["side"]), [])
        items = sequence["media"]
        figures = [_figure(one, media_words(item)) for one, item in zip(files, items, strict=False)]
        counts = ""
        if sequence["tokens"] is not None:
            counts = f": {sequence['tokens']:,} tokens, {sequence['learnt']:,} with loss"
        media = f"<div class=media>{''.join(figures)}</div>" if any(figures) else ""
        lines = "".join(f"<div class=dim>{escape(line)}</div>" for line in _facts_of_kits(sequence))
        head = f"<b>{title}{SIDES[sequence['side']]}{counts}</b>"
        yield f"<div class=card>{head}{media}<div class=tokens>{_tokens(sequence)}</div>{lines}</div>"


def _figure(files: Sequence[bytes], words: str) -> str:
    """The files of one item: several frames of a video have one caption."""
    caption = f"<figcaption>{escape(words)}</figcaption>" if words else ""
    shown = [
        f"<figure>{media_item(data)}{caption if i == 0 else ''}</figure>"
        for i, data in enumerate(files)
    ]
    return "".join(shown) or f"<figure>[not readable]{caption}</figure>"


def _tokens(sequence: dict[str, Any]) -> str:
    html, left = [], MAX_CHARACTERS
    for segment in sequence["text"]:
        if "media" in segment:
            html.append(
                f"<span class=tag>{escape(media_words(sequence['media'][segment['media']]))}</span>"
            )
            continue
        text = escape(segment["text"][: max(0, left)])
        left -= len(segment["text"])
        html.append(f"<span class=loss>{text}</span>" if segment["learnt"] and text else text)
    more = f" <span class=dim>... {-left:,} more characters</span>" if left < 0 else ""
    return "".join(html).strip() + more


def _facts_of_kits(sequence: dict[str, Any]) -> Iterator[str]:
    for key in plugins.names("inspect"):
        if key in sequence:
            for name, words, _ in plugins.load("inspect", key).lines(sequence[key], False):
                yield f"{name} {words}"
