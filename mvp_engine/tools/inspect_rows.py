"""Facts of rows for `mvp data inspect`: as the model sees them, as they are read, their counts, and those of a file
without a model. This module imports no torch. The keys are documented in docs/data.md and do not change."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mvp_engine import plugins
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.tokenization import has_weights
from mvp_engine.kit.data.read.media_source import open_media
from mvp_engine.kit.data.read.row_files import COSTS
from mvp_engine.kit.data.read.row_types import (
    MAX_TEXT,
    MEDIA,
    BadRow,
    Codes,
    Limits,
    Row,
    RowFormat,
)
from mvp_engine.kit.data.read.rows import null_bits, null_rows, read_row
from mvp_engine.kit.data.read.sources import Source, open_source
from mvp_engine.kit.data.settings import DataSource, read_manifest, resolve_source

if TYPE_CHECKING:  # they import torch
    from mvp_engine.kit.data.encode.row_encoder import EncodedSequence, RowEncoder

SAMPLE = 1000  # rows per source that are read for formats and media
BINS = 10  # of the length histogram, at most one more
Format = RowFormat | str | None
Facts = dict[str, Any]
Keep = (
    Callable[[str, Row, Path], None] | None
)  # gets the rows that are shown, with their place and root


@dataclass
class SourceFacts:
    """The counts of one source."""

    name: str
    rows: int = 0
    good: int = 0
    bad: int = 0
    overlong: int = 0
    tokens: int | None = None
    share: float | None = None
    share_of: str = "rows"  # or tokens


@dataclass
class Sample:
    """Counts of formats, media and unused columns over rows.

    `left_out` counts the turns of a row whose reasoning the model's chat template leaves out. Of prompts for rollouts,
    the columns that the prompt does not use are those of the reward.
    """

    left_out: Callable[[Row], int] | None = None
    rows: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    media: Counter[str] = field(default_factory=Counter)
    unused_columns: Counter[str] = field(default_factory=Counter)
    reward_columns: Counter[str] = field(default_factory=Counter)
    reasoning_left_out: int = 0

    def add(self, get: Callable[[], Any], row_format: Format) -> None:
        self.rows += 1
        try:
            row = read_row(get(), row_format)
        except BadRow:
            self.formats["bad"] += 1
            return
        self.formats[row.format] += 1
        self.media.update(part.kind for part in row.media())
        if spoken := sum(message.target is not None for message in row.messages):
            self.media["spoken answers"] += spoken
        is_prompt = isinstance(row_format, RowFormat) and row_format.drops_answers
        (self.reward_columns if is_prompt else self.unused_columns).update(row.unused)
        self.reasoning_left_out += self.left_out(row) if self.left_out else 0

    def add_source(self, source: Source, row_format: Format) -> None:
        """At most SAMPLE evenly spread rows."""
        places = np.linspace(0, len(source) - 1, min(len(source), SAMPLE)).astype(int)
        for index in np.unique(places).tolist():
            self.add(partial(source.__getitem__, index), row_format)

    def facts(self) -> Facts:
        facts = {name: value for name, value in vars(self).items() if name != "left_out"}
        return {k: dict(v.most_common()) if isinstance(v, Counter) else v for k, v in facts.items()}


def length_stats(values: np.ndarray, unit: str) -> Facts | None:
    """Minimum, median, mean, 95th percentile, maximum and a histogram with round bin widths."""
    if not len(values):
        return None
    low, high = int(values.min()), int(values.max())
    least = max(1.0, (high - low + 1) / BINS)
    # The smallest of 1, 2, 5 times a power of ten that is not below `least`.
    power = 10 ** math.floor(math.log10(least))
    width = int(next(step * power for step in (1, 2, 5, 10) if step * power >= least))
    first = low // width * width
    bins = []
    for i, rows in enumerate(np.bincount((values - first) // width).tolist()):
        start = first + i * width
        bins.append({"from": start, "to": start + width - 1, "rows": rows})
    return {
        "unit": unit,
        "min": low,
        "median": int(np.quantile(values, 0.5, method="higher")),
        "mean": round(float(values.mean()), 1),
        "p95": int(np.quantile(values, 0.95, method="higher")),
        "max": high,
        "histogram": bins,
    }


def count_bad(records: Iterable[Facts]) -> Facts:
    """Bad rows: their number, their number by reason, and the records themselves."""
    rows = list(records)
    reasons = Counter(record["reason"] for record in rows)
    return {"total": len(rows), "by_reason": dict(reasons.most_common()), "rows": rows}


def bad_reason(error: BadRow) -> Facts:
    return {"reason": error.reason, "detail": error.detail}


def find_row(sources: Sequence[Source], row: str) -> tuple[int, int]:
    """The source and the index in it of `row`: an index over all sources, or a place such as `rows.jsonl:17`."""
    index = int(row) if row.isdecimal() else None
    for which, source in enumerate(sources):
        if index is None:
            for place in range(len(source)):
                if source.where(place) == row:
                    return which, place
        elif index < len(source):
            return which, index
        else:
            index -= len(source)
    if index is not None:
        total = sum(len(source) for source in sources)
        raise UserError(f"--row {row}: the data has {total} rows, counted from 0")
    example = sources[0].where(0)
    raise UserError(f"--row {row}: not found; give the row's index, or its place such as {example}")


# ---- Rows as the model sees them ----------------------------------------------------------------------


def encoded_row(
    row_encoder: RowEncoder,
    get: Callable[[], Any],
    where: str,
    root: Path,
    row_format: Format,
    keep: Keep = None,
) -> Facts:
    """A row, which `get` reads. Media are decoded too, so that a shown row is one that can be trained on."""
    facts: Facts = {"where": where, "format": None, "bad": None, "sequences": []}
    try:
        raw = get()
        row = read_row(raw, row_format)
        facts["format"] = row.format
        if keep is not None:
            keep(where, row, root)
        sequences = row_encoder.encode(raw, row_format, root)
        row_encoder.load(sequences, root, {})
    except BadRow as error:
        return {**facts, "bad": bad_reason(error)}
    sides = (1, -1) if len(sequences) == 2 else (0,)  # chosen and rejected, or a single one
    for sequence, side in zip(sequences, sides, strict=True):
        facts["sequences"].append(_sequence(row_encoder, sequence, side))
    return facts


def _sequence(row_encoder: RowEncoder, sequence: EncodedSequence, side: int) -> Facts:
    media = []
    for info, (start, end) in zip(sequence.infos, sequence.spans, strict=True):
        item: Facts = {"kind": info.kind}
        if info.kind != "audio":
            item |= {"width": info.width, "height": info.height}
        if info.kind == "video":
            item |= {"frames": info.num_frames}
        if info.kind != "image":
            item |= {"seconds": round(info.seconds, 3)}
        item |= {"tokens": end - start, "encoder": row_encoder.item_cost(info)}
        media.append(item)
    facts = {
        "side": side,
        "tokens": len(sequence.ids),
        "learnt": sum(map(bool, sequence.loss[1:])),  # no token predicts the first one
        "media": media,
        "text": _segments(row_encoder, sequence),
        **_default_facts(),
    }
    if has_weights(sequence.loss):
        facts["weights"] = sorted({float(one) for one in sequence.loss if one})
    if row_encoder.row_part is not None:
        facts |= row_encoder.row_part.facts(sequence)
    return facts | sequence.facts()


def _default_facts() -> Facts:
    """The facts of kits for a sequence that has none of them."""
    known: dict[str, plugins.InspectFact] = plugins.load_all("inspect")
    return {name: fact.default for name, fact in known.items() if fact.default is not None}


def _segments(row_encoder: RowEncoder, sequence: EncodedSequence) -> list[Facts]:
    """The text in segments with loss, without loss, and of media, decoded from the token ids themselves."""
    kinds = [(-1, bool(loss)) for loss in [False, *sequence.loss[1:]]]  # (medium or -1, has loss)
    for item, (start, end) in enumerate(sequence.spans):
        kinds[start:end] = [(item, False)] * (end - start)
    changes = [i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]]
    tokenizer = row_encoder.media.tokenizer
    segments = list[Facts]()
    decoded = ""
    for start, end in pairwise([0, *changes, len(kinds)] if kinds else [0]):
        # Decoded from the beginning each time: a segment decoded alone may lose its leading blank.
        text = tokenizer.decode(sequence.ids[:end], clean_up_tokenization_spaces=False)
        item, loss = kinds[start]
        segments.append(
            {"media": item} if item >= 0 else {"text": text[len(decoded) :], "learnt": loss}
        )
        decoded = text
    return segments


# ---- Rows as they are read, of a file without a model -------------------------------------------------


def inspect_file(path: str, *, limit: int = 3, row: str | None = None, keep: Keep = None) -> Facts:
    """What is known without a model: formats, counts, bad rows, missing media files, and the messages of some rows."""
    if manifest := read_manifest(path):
        return _inspect_prepared(path, manifest)
    settings = resolve_source(DataSource(path=path))
    more: Facts = {}
    if of_kit := plugins.data_folder(settings.path):
        source, more = of_kit.open(settings)
    else:
        source = open_source(settings.path, settings.root, MAX_TEXT)
    # Whether media of answers may be targets depends on the config, which is not known here.
    targets = tuple(plugins.names("target"))
    row_format = RowFormat(
        columns=settings.columns, targets=targets, downloaded=settings.is_downloaded
    )
    limit = min(limit, len(source))
    shown = range(limit) if row is None else [find_row([source], row)[1]]
    shown_rows: dict[int, Row] = {}
    reasons: dict[int, Facts] = {}  # of bad rows
    lengths = list[int]()
    bits = np.zeros(len(source), np.uint8)
    for index in range(len(source)):
        try:
            read = read_row(source[index], row_format)
            _open_media(read, source.root)
        except BadRow as error:
            reasons[index] = bad_reason(error)
            continue
        lengths.append(sum(len(message.text) for message in read.messages) + len(read.text or ""))
        bits[index] = null_bits(read) + bool(read.media())
        if index in shown:
            shown_rows[index] = read
    for index, (reason, detail) in null_rows(source, bits).items():
        reasons[index] = {"reason": reason, "detail": detail}
    name = settings.label
    row_facts = []
    for index in shown:
        facts = {"row": index, "source": name, "where": source.where(index), "format": None}
        facts |= {"bad": reasons.get(index), "sequences": []}
        if index in shown_rows:
            facts["format"] = shown_rows[index].format
            facts["sequences"] = plain_row(shown_rows[index])
            if keep is not None:
                keep(facts["where"], shown_rows[index], source.root)
        row_facts.append(facts)
    sample = Sample()
    sample.add_source(source, row_format)
    bad = [{"source": name, "where": source.where(i), **facts} for i, facts in reasons.items()]
    counts = SourceFacts(name, len(source), len(source) - len(bad), len(bad))
    return {
        "split": None,
        "decoded": False,
        "missing": "tokens, loss masks, media sizes and packing need the model's processor: give --model MODEL",
        "sources": [vars(counts)],
        "sample": sample.facts(),
        "lengths": length_stats(np.array(lengths, np.int64), "characters"),
        "plan": None,
        "loading": None,
        "overlong": None,
        "bad": count_bad(bad),
        "rows": row_facts,
        **more,
    }


def _inspect_prepared(path: str, manifest: Facts) -> Facts:
    """What a folder of prepared data says about itself; its rows are token ids."""
    sources, bad, lengths = [], list[Facts](), []
    for one in manifest["sources"]:
        rows = open_source(f"{path}/{one['folder']}")
        with np.load(Path(path) / one["folder"] / COSTS, allow_pickle=False) as costs:
            tokens = costs["tokens"]
            reasons = json.loads(costs["bad"].tobytes())
        lengths.append(tokens[tokens > 0])
        good, name = int((tokens > 0).sum()), one["folder"]
        counts = SourceFacts(name, one["rows"], good, one["bad"], one["overlong"], one["tokens"])
        sources.append(vars(counts))
        for row, reason, detail in reasons:
            bad.append(
                {"source": name, "where": rows.where(row), "reason": reason, "detail": detail}
            )
    stored = [size for one in manifest["sources"] for _, size in one["shards"]]
    sample = Sample(rows=sum(one["rows"] for one in manifest["sources"]))
    sample.formats["prepared"] = sample.rows
    return {
        "split": None,
        "decoded": False,
        "missing": "texts, media and packing: inspect the config of a training on it, with data.sources="
        f"{path}",
        "sources": sources,
        "sample": sample.facts(),
        "lengths": length_stats(np.concatenate(lengths), "tokens"),
        "plan": None,
        "loading": {
            "shards": len(stored),
            "bytes": sum(stored),
            "tokens_per_s": None,
            "bytes_per_step": None,
        },
        "overlong": None,
        "bad": count_bad(bad),
        "rows": [],
    }


def _open_media(row: Row, root: Path) -> None:
    """Raise BadRow for media that are missing; targets may be codes."""
    targets = [message.target for message in row.messages if message.target]
    files = [target for target in targets if not isinstance(target.value, Codes)]
    for part in [*row.media(), *files]:
        open_media(part.value, Limits(), root, part.kind)


def plain_row(row: Row) -> list[Facts]:
    """The sequences of a row before any chat template, with the messages that have loss by default."""
    if row.rejected:
        return [_plain_sequence(row, 1), _plain_sequence(row, -1)]
    return [_plain_sequence(row, 0)]


def _plain_sequence(row: Row, side: int) -> Facts:
    segments = list[Facts]()
    media = list[Facts]()

    def add_text(text: str, has_loss: bool) -> None:
        segments.append({"text": text, "learnt": has_loss})

    def add_media(kind: str) -> None:
        segments.append({"media": len(media)})
        media.append({"kind": kind})

    if row.text is not None:
        add_text(row.text, True)
    for message in row.rejected if side < 0 else row.messages:
        add_text(f"{message.role}: ", False)
        has_loss = message.role == "assistant" if message.loss is None else bool(message.loss)
        for part in message.parts:
            if part.kind in MEDIA:
                add_media(part.kind)
            else:
                add_text(part.value, has_loss)
        if message.target is not None:
            add_media("speech")
        if calls := message.extra.get("tool_calls"):
            add_text(f"{calls}", has_loss)
        add_text("\n", False)
    facts: Facts = {"side": side, "tokens": None, "learnt": None}
    return {**facts, "media": media, **_default_facts(), "text": segments}
