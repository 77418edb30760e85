"""What a kit makes of rows, as facts for people (`show.py` prints them) and for programs: `mvp data inspect`.

The keys of what `inspect_kit` and `inspect_file` give are described in docs/data.md, and do not change.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.row_encoder import Prepared, Sampler
from mvp_engine.kit.data.kit import MLLMDataKit, load_processor
from mvp_engine.kit.data.read.rows import MEDIA, BadRow, Row, read_row, recognise
from mvp_engine.kit.data.read.sources import Source, open_source
from mvp_engine.kit.data.settings import MLLMData

SAMPLE = 1000  # rows of a source that are looked at for formats and media
BINS = 10


def kit_of(engine_class: Any, config: Any, model: str | None = None) -> MLLMDataKit:
    """The kit that a recipe makes with `data_kit(config)`; or that of its settings and the folder of its model."""
    if model is None and hasattr(engine_class, "data_kit"):
        return engine_class.data_kit(config)
    settings = next((value for _, value in config if isinstance(value, MLLMData)), None)
    folder = model or config.model.path
    if settings is None or folder is None:
        what = (
            "no section of type MLLMData"
            if settings is None
            else "no model.path to take a processor from"
        )
        raise UserError(
            f"the config has {what}: give the recipe's engine a classmethod data_kit(config) that makes its MLLMDataKit"
            + ("" if settings is None else ", or give --model FOLDER")
        )
    return MLLMDataKit(settings, load_processor(folder), num_workers=config.data.num_workers)


def kit_of_file(path: str, model: str, tokens: int) -> MLLMDataKit:
    settings = {"sources": [{"path": path}], "micro_batch_tokens": tokens, "max_bad_fraction": 1.0}
    return MLLMDataKit(
        MLLMData.model_validate(settings), load_processor(model), num_workers=os.cpu_count() or 1
    )


def inspect_kit(
    kit: MLLMDataKit,
    split: str,
    packs: int,
    *,
    limit: int = 3,
    row: str | None = None,
    decode: bool = False,
) -> dict[str, Any]:
    """Everything about a split. `row` is a number over all sources, or a place such as `rows.jsonl:17`."""
    if kit.is_stream(split):
        return _inspect_streams(kit, split, limit, row)
    dataset = kit.dataset(split, global_batch_size=packs)
    mixture, costs = kit._open(split)
    bad, broken = kit.bad_rows(split), Counter[str]()
    if decode:  # a row may come several times
        found = {
            record.where: record for index in range(len(dataset)) for record in dataset[index][1]
        }
        broken.update(record.source for record in found.values())
        bad += found.values()
    plan, sources = dataset.plan, []
    for name, source, cost in zip(mixture.names, mixture.sources, costs, strict=True):
        good = int((cost.tokens > 0).sum()) - broken[name]
        count = {"rows": len(source), "good": good, "bad": sum(one.source == name for one in bad)}
        sources.append(
            {"name": name, **count, "overlong": len(cost.long), "tokens": int(cost.tokens.sum())}
        )
    in_turn = (
        (i, n)
        for n in range(max(map(len, mixture.sources)))
        for i, s in enumerate(mixture.sources)
        if n < len(s)
    )
    places = list(islice(in_turn, limit)) if row is None else [_find(mixture.sources, row)]
    shown = []
    for which, number in places:
        source = mixture.sources[which]
        about = {"row": int(dataset.first[which]) + number, "source": mixture.names[which]}
        shown.append({**about, **_row(kit.sampler, source, number, dataset.formats[which])})
    lengths = np.concatenate([cost.tokens[cost.tokens > 0] for cost in costs])
    return {
        "split": split,
        "missing": None,
        "decoded": decode,
        "sources": sources,
        "sample": _sample(mixture.sources, dataset.formats),
        "lengths": _lengths(lengths, "tokens"),
        "plan": {
            "rows": len(plan.rows),
            "tokens": int(plan.tokens.sum()),
            "micro_batch_tokens": plan.budget,
            "packs": len(plan),
            "fill": round(plan.fill, 4),
            "packs_per_step": plan.packs_per_step,
            "steps": plan.steps,
        },
        "overlong": {"fate": kit.settings.overlong, "rows": sum(len(cost.long) for cost in costs)},
        "bad": count_bad([vars(record) for record in bad]),
        "rows": shown,
    }


def inspect_file(path: str, *, limit: int = 3, row: str | None = None) -> dict[str, Any]:
    """What can be told without a model: formats, counts, bad rows, and who says what."""
    source = open_source(path)
    name, places = Path(path).stem, range(len(source))
    lengths, bad, shown = [], [], list[dict[str, Any]]()
    wanted = {_find([source], row)[1]} if row is not None else set(places[:limit])
    for number in places:
        why = None
        try:
            read = read_row(source[number])
            lengths.append(
                sum(len(message.text) for message in read.messages) + len(read.text or "")
            )
        except BadRow as error:
            why = {"reason": error.reason, "detail": error.detail}
            bad.append({"source": name, "where": source.where(number), **why})
        if number in wanted:
            told = {"format": None if why else recognise(source[number]), "bad": why}
            sequences = (
                []
                if why
                else [_said(read, side) for side in ((0,) if not read.rejected else (1, -1))]
            )
            shown.append(
                {
                    "row": number,
                    "source": name,
                    "where": source.where(number),
                    **told,
                    "sequences": sequences,
                }
            )
    count = {
        "rows": len(source),
        "good": len(source) - len(bad),
        "bad": len(bad),
        "overlong": 0,
        "tokens": None,
    }
    return {
        "split": None,
        "decoded": False,
        "missing": "tokens, masks, media (are they there?) and packing need the model's processor: give --model FOLDER",
        "sources": [{"name": name, **count}],
        "sample": _sample([source], [None]),
        "lengths": _lengths(np.array(lengths, np.int64), "characters"),
        "plan": None,
        "overlong": None,
        "bad": count_bad(bad),
        "rows": shown,
    }


class _Now:
    """A row of a stream, in the place of a source that has it alone."""

    def __init__(self, place: str, raw: Any, root: Path) -> None:
        self.place, self.raw, self.root = place, raw, root

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> Any:
        if isinstance(self.raw, BadRow):
            raise self.raw
        return self.raw

    def where(self, _: int) -> str:
        return self.place


def _inspect_streams(kit: MLLMDataKit, split: str, limit: int, row: str | None) -> dict[str, Any]:
    """The beginning of each stream. What is in the rest, only reading it can tell."""
    sources, bad, shown, lengths = [], list[dict[str, Any]](), list[dict[str, Any]](), list[int]()
    sample: dict[str, Any] = {"rows": 0, "formats": Counter(), "media": Counter()}
    for stream in kit._streams(split):
        first, lost, long, number = len(lengths), len(bad), 0, -1
        for number, (place, read) in enumerate(islice(stream, SAMPLE)):
            now = _Now(place, None, stream.root)
            try:
                now.raw = read()
                sides = kit.sampler.prepare(now.raw, stream.format, stream.root)
                lengths.append(sum(len(side.ids) for side in sides))
            except BadRow as error:
                now.raw = now.raw or error
                long += error.reason == "overlong"
                if error.reason != "overlong":
                    bad.append(
                        {
                            "source": stream.name,
                            "where": place,
                            "reason": error.reason,
                            "detail": error.detail,
                        }
                    )
            found = _sample([now], [stream.format])
            sample = {
                key: sample[key] + (n if key == "rows" else Counter(n)) for key, n in found.items()
            }
            if row in (str(sample["rows"] - 1), place) if row is not None else number < limit:
                told = _row(kit.sampler, now, 0, stream.format)
                shown.append({"row": sample["rows"] - 1, "source": stream.name, **told})
        count = {
            "rows": number + 1,
            "good": len(lengths) - first,
            "bad": len(bad) - lost,
            "overlong": long,
        }
        sources.append({"name": stream.name, **count, "tokens": sum(lengths[first:])})
    if row is not None and not shown:
        raise UserError(f"--row {row}: it is not among the first {SAMPLE:,} rows of a stream")
    return {
        "split": split,
        "missing": f"streams have no plan, and only the first {SAMPLE:,} rows of each were looked at",
        "decoded": False,
        "sources": sources,
        "sample": sample,
        "lengths": _lengths(np.array(lengths, np.int64), "tokens"),
        "plan": None,
        "overlong": {
            "fate": kit.settings.overlong,
            "rows": sum(one["overlong"] for one in sources),
        },
        "bad": count_bad(bad),
        "rows": shown,
    }


def _find(sources: Sequence[Source], row: str) -> tuple[int, int]:
    """Which source, and which of its rows."""
    if row.isdecimal():
        number = int(row)
        for which, source in enumerate(sources):
            if number < len(source):
                return which, number
            number -= len(source)
        raise UserError(f"--row {row}: there are {sum(map(len, sources))} rows, counted from 0")
    for which, source in enumerate(sources):
        for number in range(len(source)):
            if source.where(number) == row:
                return which, number
    raise UserError(
        f"--row {row}: no row is called that; give its number, or its place such as {sources[0].where(0)}"
    )


def _row(
    sampler: Sampler, source: Source | _Now, number: int, format: str | None
) -> dict[str, Any]:
    """A row as the model sees it."""
    told: dict[str, Any] = {
        "where": source.where(number),
        "format": format,
        "bad": None,
        "sequences": [],
    }
    try:
        raw = source[number]
        told["format"] = format or recognise(raw)
        sides = sampler.prepare(raw, format, source.root)
        sampler.load(sides, source.root, {})  # media too: what is shown is what can be trained on
    except BadRow as error:
        return {**told, "bad": {"reason": error.reason, "detail": error.detail}}
    signs = (1, -1) if len(sides) == 2 else (0,)
    return {
        **told,
        "sequences": [_sequence(sampler, *one) for one in zip(sides, signs, strict=True)],
    }


def _sequence(sampler: Sampler, one: Prepared, side: int) -> dict[str, Any]:
    media = []
    for info, (start, end) in zip(one.infos, one.spans, strict=True):
        about: dict[str, Any] = {"kind": info.kind}
        if info.kind != "audio":
            about |= {"width": info.width, "height": info.height}
        if info.kind == "video":
            about |= {"frames": info.take}
        if info.kind != "image":
            about |= {"seconds": round(info.seconds, 3)}
        media.append({**about, "tokens": end - start, "encoder": sampler.media.cost(info).encoder})
    learnt = sum(one.loss[1:])  # nothing predicts the first token
    return {
        "side": side,
        "tokens": len(one.ids),
        "learnt": learnt,
        "media": media,
        "text": _pieces(sampler, one),
    }


def _pieces(sampler: Sampler, one: Prepared) -> list[dict[str, Any]]:
    """The text in pieces that are learnt, are not, or are media, made from the token ids themselves."""
    owner = np.full(len(one.ids), -1)
    for item, (start, end) in enumerate(one.spans):
        owner[start:end] = item
    kinds = [
        (item, bool(has) and item < 0)
        for item, has in zip(owner.tolist(), [False, *one.loss[1:]], strict=True)
    ]
    borders = [i for i in range(len(kinds) + 1) if i in (0, len(kinds)) or kinds[i] != kinds[i - 1]]
    tokenizer, pieces, before = sampler.media.tokenizer, list[dict[str, Any]](), ""
    for start, end in pairwise(borders):
        whole = tokenizer.decode(
            one.ids[:end], clean_up_tokenization_spaces=False
        )  # alone it might lose blanks
        item, learnt = kinds[start]
        pieces.append(
            {"media": item} if item >= 0 else {"text": whole[len(before) :], "learnt": learnt}
        )
        before = whole
    return pieces


def _said(row: Row, side: int) -> dict[str, Any]:
    """A conversation before any template, with what carries loss by default."""
    pieces, media = list[dict[str, Any]](), list[dict[str, Any]]()
    if row.text is not None:
        pieces.append({"text": row.text, "learnt": True})
    for message in row.rejected if side < 0 else row.messages:
        pieces.append({"text": f"{message.role}: ", "learnt": False})
        learnt = message.role == "assistant" if message.loss is None else message.loss
        for part in message.parts:
            if part.kind in MEDIA:
                pieces.append({"media": len(media)})
                media.append({"kind": part.kind})
            else:
                pieces.append({"text": part.value, "learnt": learnt})
        if calls := message.extra.get("tool_calls"):
            pieces.append({"text": f"{calls}", "learnt": learnt})
        pieces.append({"text": "\n", "learnt": False})
    return {"side": side, "tokens": None, "learnt": None, "media": media, "text": pieces}


def _sample(sources: Sequence[Source | _Now], formats: Sequence[str | None]) -> dict[str, Any]:
    """Formats and media of at most SAMPLE rows of each source, evenly spread."""
    rows, kinds, media = 0, Counter[str](), Counter[str]()
    for source, format in zip(sources, formats, strict=True):
        for number in np.unique(
            np.linspace(0, len(source) - 1, min(len(source), SAMPLE)).astype(int)
        ).tolist():
            rows += 1
            try:
                raw = source[number]
                found = read_row(raw, format)
                kinds[format or recognise(raw) or "bad"] += 1
                media.update(part.kind for part in found.media())
            except BadRow:
                kinds["bad"] += 1
    return {"rows": rows, "formats": dict(kinds.most_common()), "media": dict(media.most_common())}


def _lengths(values: np.ndarray, unit: str) -> dict[str, Any] | None:
    if not len(values):
        return None
    low, high = int(values.min()), int(values.max())
    least = max(1.0, (high - low + 1) / BINS)
    power = 10 ** math.floor(math.log10(least))
    width = int(next(step * power for step in (1, 2, 5, 10) if step * power >= least))
    first = low // width * width
    counts = np.bincount((values - first) // width)
    bins = [
        {"from": first + i * width, "to": first + (i + 1) * width - 1, "rows": n}
        for i, n in enumerate(counts.tolist())
    ]
    middle, most = (int(np.quantile(values, q, method="higher")) for q in (0.5, 0.95))
    figures = {
        "min": low,
        "median": middle,
        "mean": round(float(values.mean()), 1),
        "p95": most,
        "max": high,
    }
    return {"unit": unit, **figures, "histogram": bins}


def count_bad(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    found = list(records)
    reasons = Counter(record["reason"] for record in found)
    return {"total": len(found), "by_reason": dict(reasons.most_common()), "rows": found}
