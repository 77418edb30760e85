"""The facts of `inspect.py` on a terminal: coloured where there are colours, with marks where there are none."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

LEARNT, MEDIUM, FAINT, WRONG = "bold green", "magenta", "dim", "red"
MOST = 2000  # characters of a row's text
LISTED = 10  # bad rows
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # could move the cursor or set colours


def show(facts: dict[str, Any], console: Console, whole: bool = False) -> None:
    """Print everything; `whole`: however long a row is."""
    plain = console.color_system is None
    _overview(facts, console)
    _histogram(facts["lengths"], console)
    show_bad(facts["bad"], console)
    if facts["rows"]:
        how = (
            "as they are read: what would be"
            if facts["overlong"] is None
            else "as the model sees them: what is"
        )
        marked = ("between « and »", "") if plain else ("green", LEARNT)
        console.print(Text.assemble(f"\nRows {how} learnt is ", marked))
    for row in facts["rows"]:
        _row(row, console, plain, whole)


def _overview(facts: dict[str, Any], console: Console) -> None:
    sample, plan = facts["sample"], facts["plan"]
    for source in facts["sources"]:
        tokens = "" if source["tokens"] is None else f", {source['tokens']:,} tokens"
        words = f"{source['rows']:,} rows, {source['good']:,} to train on{tokens}"
        lost = [
            f"{source[key]:,} {key.replace('overlong', 'over-long')}"
            for key in ("bad", "overlong")
            if source[key]
        ]
        _line(
            console,
            "source",
            Text.assemble(
                (source["name"], "bold"), f": {words}", *((f", {one}", WRONG) for one in lost)
            ),
        )
    of = (
        f" (of {sample['rows']:,} rows looked at)"
        if sample["rows"] < sum(s["rows"] for s in facts["sources"])
        else ""
    )
    _line(
        console, "formats", ", ".join(f"{name} {n:,}" for name, n in sample["formats"].items()) + of
    )
    media = (", ".join(f"{n:,} {kind}" for kind, n in sample["media"].items()) or "none") + of
    unread = "; only their headers were read: mvp data inspect --decode finds broken ones"
    _line(
        console,
        "media",
        media + (unread if sample["media"] and plan and not facts["decoded"] else ""),
    )
    if plan is not None:
        packs = f"{plan['packs']:,} packs of {plan['micro_batch_tokens']:,} tokens, {plan['fill']:.1%} full"
        _line(
            console,
            "plan",
            f"{packs}; {plan['steps']:,} steps of {plan['packs_per_step']} an epoch",
        )
    if facts["overlong"] is not None and facts["overlong"]["rows"]:
        fate = {"drop": "dropped", "truncate": "truncated", "shrink": "shrunk"}[
            facts["overlong"]["fate"]
        ]
        _line(console, "over-long", f"{facts['overlong']['rows']:,} rows {fate}")
    if facts["missing"]:
        _line(console, "missing", Text(facts["missing"], WRONG))


def _line(console: Console, name: str, words: str | Text) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=9, style=FAINT)
    table.add_column()
    table.add_row(name, words)
    console.print(table)


def _histogram(lengths: dict[str, Any] | None, console: Console) -> None:
    if lengths is None:
        return
    figures = ", ".join(
        f"{key} {lengths[key]:,}" for key in ("min", "median", "mean", "p95", "max")
    )
    _line(console, "lengths", f"in {lengths['unit']}: {figures}")
    bins = lengths["histogram"]
    names = [
        f"{one['from']:,}-{one['to']:,}" if one["to"] > one["from"] else f"{one['from']:,}"
        for one in bins
    ]
    wide, most = max(map(len, names)), max(one["rows"] for one in bins)
    room = max(10, min(60, console.width - wide - 24))
    for i, (name, one) in enumerate(zip(names, bins, strict=True)):
        if not one["rows"]:
            if bins[i - 1]["rows"]:  # one line for all that are empty; the first never is
                console.print(Text(f"{'...':>{wide + 11}}", FAINT))
            continue
        bar = "█" * -(-one["rows"] * room // most)
        console.print(Text(f"{'':11}{name:>{wide}}  {bar} {one['rows']:,}"), no_wrap=True)


def show_bad(bad: dict[str, Any], console: Console) -> None:
    if not bad["total"]:
        return
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in bad["by_reason"].items())
    console.print(Text(f"\n{bad['total']:,} bad row(s): {reasons}", WRONG))
    for record in bad["rows"][:LISTED]:
        words = f"{record['where']}: {record['reason']}: {_clean(record['detail'])[:300]}"
        console.print(Padding(Text(words, overflow="fold"), (0, 0, 0, 2)))
    if bad["total"] > LISTED:
        console.print(
            Text(f"  ... and {bad['total'] - LISTED:,} more; --json lists them all", FAINT)
        )


def _row(row: dict[str, Any], console: Console, plain: bool, whole: bool) -> None:
    about = f"row {row['row']}, {row['where']}" + (f", {row['format']}" if row["format"] else "")
    if row["bad"]:
        console.print(Text(f"\n{about}", "bold"))
        console.print(
            Padding(
                Text(f"bad: {row['bad']['reason']}: {_clean(row['bad']['detail'])}", WRONG),
                (0, 0, 0, 2),
            )
        )
    for one in row["sequences"]:
        side = {1: ", chosen", -1: ", rejected", 0: ""}[one["side"]]
        counts = (
            "" if one["tokens"] is None else f": {one['tokens']:,} tokens, {one['learnt']:,} learnt"
        )
        console.print(Text(f"\n{about}{side}{counts}", "bold"))
        text = _text(one, plain)
        if len(text) > MOST and not whole:
            more, text = len(text) - MOST, text[:MOST]
            text.append(
                f" ... {more:,} more characters: mvp data inspect --row {row['row']}", FAINT
            )
        text.rstrip()
        console.print(text, overflow="fold")


def _text(one: dict[str, Any], plain: bool) -> Text:
    text = Text()
    for piece in one["text"]:
        if "media" in piece:
            text.append(f"[{_medium(one['media'][piece['media']])}]", MEDIUM)
        elif piece["learnt"] and plain:
            text.append(f"«{_clean(piece['text'])}»")
        else:
            text.append(_clean(piece["text"]), LEARNT if piece["learnt"] else "")
    return text


def _medium(item: dict[str, Any]) -> str:
    words = [item["kind"]]
    if "width" in item:
        words.append(f"{item['width']}x{item['height']}")
    if "frames" in item:
        words.append(f"{item['frames']} frames")
    if "seconds" in item:
        words.append(f"{item['seconds']:g} s")
    return " ".join(words) + (f" = {item['tokens']:,} tokens" if "tokens" in item else "")


def _clean(text: str) -> str:
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
