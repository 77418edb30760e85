"""`mvp data inspect`: of a config, or of a data file with or without a model; and its facts on a terminal, where tokens
with loss are coloured, or marked where colours are missing. Without a model it imports no torch."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mvp_engine import plugins
from mvp_engine.config.engine_class import shipped_config
from mvp_engine.errors import UserError, count

WITH_LOSS = "bold green"
MEDIA = "magenta"
DIM = "dim"
ERROR = "red"
MAX_CHARACTERS = 2000  # of a row's text, unless it is shown in full
MAX_BAD_ROWS = 10
SHOWN_ROWS = 3
MAX_DETAIL = 300  # characters of a bad row's detail
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # could move the cursor or set colours
OVERLONG_FIX = "raise data.max_length or data.pack_tokens, or set data.overlong"
SIDES = {1: ", chosen", -1: ", rejected", 0: ""}


def print_inspection(
    target: str,
    overrides: list[str],
    *,
    model: str | None,
    split: str,
    row: str | None,
    limit: int | None,
    pack_tokens: int,
    html: str | None,
    decode: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Inspect a config's data, or a data file: with the processor of `model`, else only as it is read.

    With `html`, the rows are shown in this file. With `strict`, rows that cannot be trained on are an error, after
    everything is printed.
    """
    from mvp_engine.tools.inspect_gallery import ROWS, Gallery, write_gallery

    gallery = Gallery()
    options: Any = {"limit": limit or (ROWS if html else SHOWN_ROWS), "row": row}
    options["keep"] = gallery.keep if html else None
    if Path(target).suffix in (".yaml", ".yml") or shipped_config(Path(target)):
        from mvp_engine.config import compose
        from mvp_engine.tools.inspect import config_data_kit, inspect_kit

        composed = compose(target, overrides)
        kit = config_data_kit(composed.engine_class, composed.config, model)
        data = composed.config.data
        packs = kit.settings.global_batch_packs(data.global_batch_size) or data.micro_batch_size
        facts = inspect_kit(kit, split, packs, decode=decode, **options)
    elif overrides:
        raise UserError(
            f"{overrides[0]!r}: only a config has keys to override, {target} is no YAML file"
        )
    elif model:
        from mvp_engine.tools.inspect import file_data_kit, inspect_kit

        kit = file_data_kit(target, model, pack_tokens)
        facts = inspect_kit(kit, split, 1, decode=decode, **options)
    elif decode:
        raise UserError("--decode needs the processor of a model: give --model MODEL too")
    else:
        from mvp_engine.tools.inspect_rows import inspect_file

        facts = inspect_file(target, **options)
    facts = {"data": target, "model": model, **facts}
    if html:
        write_gallery(Path(html), facts, gallery)
    if as_json:
        print(json.dumps(facts, indent=2))
    elif html:
        show({**facts, "rows": []}, Console(highlight=False))
        print(f"{html} ({count(len(facts['rows']), 'row')})")
    else:
        show(facts, Console(highlight=False), in_full=row is not None)
    rows = sum(source["rows"] for source in facts["sources"])
    unusable = rows - sum(source["good"] for source in facts["sources"])
    if strict and unusable:
        raise UserError(
            f"--strict: {unusable:,} of {count(rows, 'row')} of {target} cannot be trained on"
        )


def show(facts: dict[str, Any], console: Console, in_full: bool = False) -> None:
    """Print all facts; with `in_full`, rows of any length are printed completely."""
    plain = console.color_system is None
    console.print(headline(facts))
    _overview(facts, console)
    _histogram(facts["lengths"], console)
    show_bad(facts["bad"], console)
    if facts["rows"]:
        has_processor = facts["overlong"] is not None
        source = "as the model sees them" if has_processor else "as they are read"
        mark = ("between « and »", "") if plain else ("green", WITH_LOSS)
        console.print(Text.assemble(f"\nRows {source}; text with loss is ", mark))
    for row in facts["rows"]:
        _row(row, console, plain, in_full)


def headline(facts: dict[str, Any]) -> Text:
    """One line that says whether the data can be trained on."""
    rows = sum(source["rows"] for source in facts["sources"])
    good = sum(source["good"] for source in facts["sources"])
    text = Text(f"{_clean(facts['data'])}: " if "data" in facts else "", "bold")
    if good == rows:
        every = "all " if rows > 1 else ""
        verb = "read" if facts["overlong"] is None else "trained on"
        text.append(f"{every}{count(rows, 'row')} can be {verb}", WITH_LOSS)
    else:
        reasons = dict(facts["bad"]["by_reason"])
        if rows - good > facts["bad"]["total"]:
            reasons["over-long"] = rows - good - facts["bad"]["total"]
        named = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())
        text.append(f"{rows - good:,} of {count(rows, 'row')} cannot be trained on", ERROR)
        text.append(f": {named}")
    return text


def _overview(facts: dict[str, Any], console: Console) -> None:
    is_mixture = len(facts["sources"]) > 1
    for source in facts["sources"]:
        _line(console, "source", _source(source, is_mixture))
    sample = facts["sample"]
    plan = facts["plan"]
    total = sum(source["rows"] for source in facts["sources"])
    sampled = f" (of {sample['rows']:,} sampled rows)" if sample["rows"] < total else ""
    _line(console, "formats", _numbered(sample["formats"]) + sampled)
    media = ", ".join(f"{count:,} {kind}" for kind, count in sample["media"].items())
    media = (media or "none") + sampled
    if sample["media"] and plan and not facts["decoded"]:
        media += "; only their headers were read: mvp data inspect --decode finds corrupt ones"
    if "prepared" not in sample["formats"]:  # it has them, but not their numbers
        _line(console, "media", media)
    if sample["reward_columns"]:
        names = _numbered(sample["reward_columns"])
        _line(console, "reward", f"{names}{sampled}: columns that only the reward reads")
    _facts_of_kits(facts, console)
    if sample["unused_columns"]:
        unused = _numbered(sample["unused_columns"])
        words = f"{unused}{sampled}: no reader uses these columns; rename with `columns`"
        _line(console, "unused", Text(words, ERROR))
    if sample["reasoning_left_out"]:
        turns = count(sample["reasoning_left_out"], "turn")
        words = f"{turns}{sampled} without loss, as the chat template leaves out the reasoning of earlier turns"
        _line(console, "reasoning", Text(words, ERROR))
    if plan is not None:
        packs = f"{count(plan['packs'], 'pack')} of {plan['micro_batch_tokens']:,} tokens"
        per_step = count(plan["packs_per_step"], "pack")
        steps = f"{count(plan['steps'], 'step')} of {per_step} per epoch"
        _line(console, "plan", f"{packs}, {plan['fill']:.1%} full; {steps}")
    if loading := facts.get("loading"):
        _line(console, "loading", _loading(loading))
    overlong = facts["overlong"]
    if overlong is not None and overlong["rows"]:
        places = ", ".join(overlong["where"][:MAX_BAD_ROWS])
        more = ", ..." if overlong["rows"] > MAX_BAD_ROWS else ""
        dropped = f"{count(overlong['rows'], 'row')} dropped"
        _line(console, "over-long", _clean(f"{dropped}: {places}{more}; {OVERLONG_FIX}"))
    if facts["missing"]:
        _line(console, "missing", Text(facts["missing"], ERROR))


def _loading(loading: dict[str, Any]) -> str:
    words = []
    if loading["shards"]:
        size = f" of {_bytes(loading['bytes'])}" if loading["bytes"] else ""
        words.append(count(loading["shards"], "shard") + size)
    if loading["tokens_per_s"]:
        words.append(f"one worker reads {loading['tokens_per_s']:,} tokens/s")
    if loading["bytes_per_step"]:
        words.append(f"a step reads {_bytes(loading['bytes_per_step'])}")
    return "; ".join(words)


def _bytes(number: float) -> str:
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while number >= 1000 and len(units) > 1:
        number /= 1000
        units.pop(0)
    return f"{number:.3g} {units[0]}"


def _numbered(counts: dict[str, int]) -> str:
    return _clean(", ".join(f"{name} {number:,}" for name, number in counts.items()))


def _source(source: dict[str, Any], is_mixture: bool) -> Text:
    text = Text.assemble(
        (source["name"], "bold"), f": {count(source['rows'], 'row')}, {source['good']:,} usable"
    )
    if source["tokens"] is not None:
        text.append(f", {source['tokens']:,} tokens")
    if source["share"] is not None and is_mixture:
        text.append(f", {source['share']:.1%} of the {source['share_of']} of an epoch")
    for key, name in (("bad", "bad"), ("overlong", "over-long")):
        if source[key]:
            text.append(f", {source[key]:,} {name}", ERROR)
    return text


def _line(console: Console, name: str, words: str | Text) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=9, style=DIM)
    table.add_column()
    table.add_row(name, words)
    console.print(table)


def _histogram(lengths: dict[str, Any] | None, console: Console) -> None:
    if lengths is None:
        return
    keys = ("min", "median", "mean", "p95", "max")
    figures = ", ".join(f"{key} {lengths[key]:,}" for key in keys)
    _line(console, "lengths", f"in {lengths['unit']}: {figures}")
    bins = lengths["histogram"]
    is_wide = bins[0]["to"] > bins[0]["from"]
    names = [f"{b['from']:,}-{b['to']:,}" if is_wide else f"{b['from']:,}" for b in bins]
    rows = [b["rows"] for b in bins]
    name_width = max(map(len, names))
    bar_width = max(10, min(60, console.width - name_width - 24))
    for i, (name, number) in enumerate(zip(names, rows, strict=True)):
        if number:
            bar = "█" * -(-number * bar_width // max(rows))  # rounded up: no bin looks empty
            console.print(Text(f"{'':11}{name:>{name_width}}  {bar} {number:,}"), no_wrap=True)
        # One line for consecutive empty bins; the first bin is never empty.
        elif rows[i - 1]:
            console.print(Text(f"{'...':>{name_width + 11}}", DIM))


def show_bad(bad: dict[str, Any], console: Console) -> None:
    """Print the bad rows by reason, with one example of each."""
    if not bad["total"]:
        return
    title = f"\n{count(bad['total'], 'bad row')}, with one example of each reason"
    console.print(Text(title, ERROR))
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column()
    table.add_column(overflow="fold")
    for reason, number in bad["by_reason"].items():
        example = next(record for record in bad["rows"] if record["reason"] == reason)
        detail = textwrap.shorten(_clean(example["detail"]), MAX_DETAIL, placeholder=" ...")
        words = Text(f"{example['where']}: {detail}")
        table.add_row(f"  {number:,}", Text(reason, "bold"), words)
    console.print(table)
    if bad["total"] > len(bad["by_reason"]):
        console.print(Text("  --json lists all of them", DIM))


def _row(row: dict[str, Any], console: Console, plain: bool, in_full: bool) -> None:
    title = f"row {row['row']}, {row['where']}"
    if row["format"]:
        title += f", {row['format']}"
    if row["bad"]:
        console.print(Text(f"\n{title}", "bold"))
        reason = f"bad: {row['bad']['reason']}: {_clean(row['bad']['detail'])}"
        console.print(Padding(Text(reason, ERROR), (0, 0, 0, 2)))
    for sequence in row["sequences"]:
        counts = ""
        if sequence["tokens"] is not None:
            counts = f": {sequence['tokens']:,} tokens, {sequence['learnt']:,} with loss"
        console.print(Text(f"\n{title}{SIDES[sequence['side']]}{counts}", "bold"))
        text = _text(sequence, plain)
        more = len(text) - MAX_CHARACTERS
        if more > 0 and not in_full:
            text = text[:MAX_CHARACTERS]
            text.append(f" ... {more:,} more characters: mvp data inspect --row {row['row']}", DIM)
        text.rstrip()
        console.print(text, overflow="fold")
        _facts_of_kits(sequence, console, in_full)


def _facts_of_kits(facts: dict[str, Any], console: Console, in_full: bool = False) -> None:
    """Facts under names that kits add: lines of a name, a text and its style."""
    styles = {"loss": WITH_LOSS, "dim": DIM}
    for key in plugins.names("inspect"):
        if key in facts:
            for name, words, style in plugins.load("inspect", key).lines(facts[key], in_full):
                _line(console, name, Text(_clean(words), styles.get(style, "")))


def _text(sequence: dict[str, Any], plain: bool) -> Text:
    text = Text()
    for segment in sequence["text"]:
        if "media" in segment:
            text.append(f"[{media_words(sequence['media'][segment['media']])}]", MEDIA)
        elif segment["learnt"] and plain:
            text.append(f"«{_clean(segment['text'])}»")
        else:
            text.append(_clean(segment["text"]), WITH_LOSS if segment["learnt"] else "")
    return text


def media_words(item: dict[str, Any]) -> str:
    words = [item["kind"]]
    if "width" in item:
        words.append(f"{item['width']}x{item['height']}")
    if "frames" in item:
        words.append(f"{item['frames']} frames")
    if "seconds" in item:
        words.append(f"{item['seconds']:g} s")
    if "tokens" in item:
        words.append(f"= {item['tokens']:,} tokens")
    return " ".join(words)


def _clean(text: str) -> str:
    """The text without control characters: data must not control the terminal."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
