"""`mvp data inspect`: what a data kit makes of the rows, as facts that `inspect_page.py` prints.

The keys of what `inspect_kit` and `inspect_file` return are documented in docs/data.md and do not change.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.config import compose
from mvp_engine.errors import UserError
from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.data.read.sources import Source, open_source
from mvp_engine.kit.data.settings import DataSource, resolve_source
from mvp_engine.tools.data_kit import config_data_kit, file_data_kit
from mvp_engine.tools.inspect_page import show
from mvp_engine.tools.inspect_rows import bad_reason, encoded_row, find_row, plain_row
from mvp_engine.tools.inspect_stats import count_bad, length_stats, sample_rows
from mvp_engine.tools.inspect_streams import inspect_streams


def print_inspection(
    what: str,
    overrides: list[str],
    *,
    model: str | None,
    split: str,
    row: str | None,
    limit: int,
    pack_tokens: int,
    decode: bool,
    as_json: bool,
) -> None:
    """Inspect a config's data, or a data file: with the processor of `model`, else only as it is read."""
    if Path(what).suffix in (".yaml", ".yml"):
        composed = compose(what, overrides)
        kit = config_data_kit(composed.engine_class, composed.config, model)
        data = composed.config.data
        packs = kit.settings.global_batch_packs(data.global_batch_size) or data.micro_batch_size
        facts = inspect_kit(kit, split, packs, limit=limit, row=row, decode=decode)
    elif overrides:
        raise UserError(
            f"{overrides[0]!r}: only a config has keys to override, {what} is no YAML file"
        )
    elif model:
        kit = file_data_kit(what, model, pack_tokens)
        facts = inspect_kit(kit, split, 1, limit=limit, row=row, decode=decode)
    else:
        facts = inspect_file(what, limit=limit, row=row)
    facts = {"data": what, "model": model, **facts}
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        from rich.console import Console

        show(facts, Console(highlight=False), in_full=row is not None)


def inspect_kit(
    kit: MLLMDataKit,
    split: str,
    packs: int,
    *,
    limit: int = 3,
    row: str | None = None,
    decode: bool = False,
) -> dict[str, Any]:
    """All facts of a split. `row` is an index over all sources, or a place such as `rows.jsonl:17`."""
    if kit.is_stream(split):
        return inspect_streams(kit, split, limit=limit, row=row)
    dataset = kit.dataset(split, global_batch_size=packs)
    mixture, costs = kit.measured(split)
    bad = kit.bad_rows(split)
    corrupt = Counter[str]()
    if decode:
        found = _decode_all(dataset)
        corrupt.update(record.source for record in found)
        bad += found
    sources = []
    shares = mixture.shares()
    for name, source, cost in zip(mixture.names, mixture.sources, costs, strict=True):
        sources.append(
            {
                "name": name,
                "rows": len(source),
                "good": int((cost.tokens > 0).sum()) - corrupt[name],
                "bad": sum(record.source == name for record in bad),
                "overlong": len(cost.long),
                "tokens": int(cost.tokens.sum()),
                "share": round(shares[name], 4),
            }
        )
    wanted = _in_turn(mixture.sources, limit) if row is None else [find_row(mixture.sources, row)]
    shown = []
    for which, index in wanted:
        facts = encoded_row(kit.row_encoder, mixture.sources[which], index, dataset.formats[which])
        number = int(dataset.first[which]) + index
        shown.append({"row": number, "source": mixture.names[which], **facts})
    plan = dataset.plan
    lengths = np.concatenate([cost.tokens[cost.tokens > 0] for cost in costs])
    return {
        "split": split,
        "missing": None,
        "decoded": decode,
        "sources": sources,
        "sample": sample_rows(mixture.sources, dataset.formats),
        "lengths": length_stats(lengths, "tokens"),
        "plan": {
            "rows": len(plan.rows),
            "tokens": int(plan.tokens.sum()),
            "micro_batch_tokens": plan.budget,
            "packs": len(plan),
            "fill": round(plan.fill_ratio, 4),
            "packs_per_step": plan.packs_per_step,
            "steps": plan.steps,
        },
        "overlong": {
            "fate": kit.settings.overlong,
            "rows": sum(len(cost.long) for cost in costs),
            "where": [record.where for record in kit.overlong_rows(split)],
        },
        "bad": count_bad(vars(record) for record in bad),
        "rows": shown,
    }


def _decode_all(dataset: Any) -> list[Any]:
    """Records of the rows with corrupt media. A row may be in several packs; its record is returned once."""
    found = {}
    for index in range(len(dataset)):
        for record in dataset[index][1]:
            found[record.where] = record
    return list(found.values())


def _in_turn(sources: Sequence[Source], limit: int) -> list[tuple[int, int]]:
    """(source, index) of the first row of each source, then of the second of each, and so on up to `limit`."""
    places = list[tuple[int, int]]()
    for index in range(max(len(source) for source in sources)):
        for which, source in enumerate(sources):
            if len(places) >= limit:
                return places
            if index < len(source):
                places.append((which, index))
    return places


def inspect_file(path: str, *, limit: int = 3, row: str | None = None) -> dict[str, Any]:
    """What is known without a model: formats, counts, bad rows, and the messages of some rows."""
    settings = resolve_source(DataSource(path=path))
    source = open_source(settings.path, settings.root)
    row_format = RowFormat(columns=settings.columns)
    name = settings.label
    wanted = range(limit) if row is None else [find_row([source], row)[1]]
    lengths = list[int]()
    bad = list[dict[str, Any]]()
    shown = list[dict[str, Any]]()
    for index in range(len(source)):
        where = source.where(index)
        facts: dict[str, Any] = {"format": None, "bad": None, "sequences": []}
        try:
            read = read_row(source[index], row_format)
            messages = sum(len(message.text) for message in read.messages)
            lengths.append(messages + len(read.text or ""))
            if index in wanted:
                facts["format"] = read.format
                facts["sequences"] = plain_row(read)
        except BadRow as error:
            facts["bad"] = bad_reason(error)
            bad.append({"source": name, "where": where, **facts["bad"]})
        if index in wanted:
            shown.append({"row": index, "source": name, "where": where, **facts})
    counts = {
        "name": name,
        "rows": len(source),
        "good": len(source) - len(bad),
        "bad": len(bad),
        "overlong": 0,
        "tokens": None,
        "share": None,
    }
    return {
        "split": None,
        "decoded": False,
        "missing": "tokens, loss masks, media files and packing need the model's processor: give --model FOLDER",
        "sources": [counts],
        "sample": sample_rows([source], [row_format]),
        "lengths": length_stats(np.array(lengths, np.int64), "characters"),
        "plan": None,
        "overlong": None,
        "bad": count_bad(bad),
        "rows": shown,
    }
