"""`mvp data inspect` with a processor: what a data kit makes of the rows, as facts that `inspect_page.py` prints.

Its keys are those of `inspect_file.py`; they are documented in docs/data.md and do not change.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine import plugins
from mvp_engine.config import compose
from mvp_engine.errors import UserError
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.kit.actions.kit import ActionDataKit
from mvp_engine.kit.actions.rows import is_lerobot
from mvp_engine.kit.actions.settings import ActionData
from mvp_engine.kit.auto import changed, global_batch, with_defaults
from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.pack.plan import Plan
from mvp_engine.kit.data.processor import load_processor
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.sources import Source
from mvp_engine.kit.data.settings import DATA_KIT_FIX, MLLMData, data_section
from mvp_engine.tools import inspect_stats
from mvp_engine.tools.inspect_rows import bad_reason, encoded_row, find_row
from mvp_engine.tools.inspect_stats import count_bad, length_stats, sample_rows

NO_PLAN = "a packing plan: these are prompts, and rollouts are packed when they are generated"


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
    dropped = kit.overlong_rows(split)
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
                "overlong": sum(record.source == name for record in dropped),
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
    robot = getattr(kit, "robot_facts", None)  # of LeRobot folders
    # Rollouts are packed with their completions, when these are known.
    has_plan = kit.settings.prompt_only != "always"
    lengths = np.concatenate([cost.tokens[cost.tokens > 0] for cost in costs])
    return {
        "split": split,
        "missing": None if has_plan else NO_PLAN,
        "decoded": decode,
        "sources": sources,
        "sample": sample_rows(
            mixture.sources, dataset.formats, kit.row_encoder.template.reasoning_left_out
        ),
        "lengths": length_stats(lengths, "tokens"),
        "plan": _plan(dataset.plan) if has_plan else None,
        "overlong": {
            "fate": kit.settings.overlong,
            "rows": len(dropped),
            "where": [record.where for record in dropped],
        },
        "bad": count_bad(vars(record) for record in bad),
        "rows": shown,
        **({} if robot is None else {"robot": robot(split)}),
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "rows": len(plan.rows),
        "tokens": int(plan.tokens.sum()),
        "micro_batch_tokens": plan.budget,
        "packs": len(plan),
        "fill": round(plan.fill_ratio, 4),
        "packs_per_step": plan.packs_per_step,
        "steps": plan.steps,
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


# `mvp data inspect` on streams: the first rows of each. The rest is known only once it is read.


class _StreamRow:
    """One row of a stream, in the place of a source that holds only this row."""

    def __init__(self, place: str, root: Path) -> None:
        self.place = place
        self.root = root
        self.raw: Any = None  # the row, or the BadRow that reading it raised

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> Any:
        if isinstance(self.raw, BadRow):
            raise self.raw
        return self.raw

    def where(self, _: int) -> str:
        return self.place


class _Counts:
    """What was counted over all streams so far."""

    def __init__(self) -> None:
        self.rows = 0
        self.formats = Counter[str]()
        self.media = Counter[str]()
        self.unused = Counter[str]()
        self.reasoning_left_out = 0
        self.lengths = list[int]()
        self.bad = list[dict[str, Any]]()
        self.overlong = list[str]()  # their places
        self.sources = list[dict[str, Any]]()
        self.shown = list[dict[str, Any]]()

    def add_sample(
        self, row: _StreamRow, row_format: RowFormat | str | None, kit: MLLMDataKit
    ) -> None:
        found = sample_rows([row], [row_format], kit.row_encoder.template.reasoning_left_out)
        self.rows += found["rows"]
        self.formats += Counter(found["formats"])
        self.media += Counter(found["media"])
        self.unused += Counter(found["unused_columns"])
        self.reasoning_left_out += found["reasoning_left_out"]


def inspect_streams(kit: MLLMDataKit, split: str, *, limit: int, row: str | None) -> dict[str, Any]:
    """The facts of `inspect_kit` for streams, over the first SAMPLE rows of each."""
    counts = _Counts()
    shares = kit.stream_shares(split)
    for stream in kit.streams(split):
        _inspect_stream(kit, stream, counts, limit, row)
        counts.sources[-1]["share"] = round(shares[stream.name], 4)
    most = inspect_stats.SAMPLE
    if row is not None and not counts.shown:
        raise UserError(f"--row {row}: not among the first {most:,} rows of a stream")
    return {
        "split": split,
        "missing": f"a packing plan: streams have none, and only the first {most:,} rows of each were read",
        "decoded": False,
        "sources": counts.sources,
        "sample": {
            "rows": counts.rows,
            "formats": counts.formats,
            "media": counts.media,
            "unused_columns": counts.unused,
            "reasoning_left_out": counts.reasoning_left_out,
        },
        "lengths": length_stats(np.array(counts.lengths, np.int64), "tokens"),
        "plan": None,
        "overlong": {
            "fate": kit.settings.overlong,
            "rows": len(counts.overlong),
            "where": counts.overlong,
        },
        "bad": count_bad(counts.bad),
        "rows": counts.shown,
    }


def _inspect_stream(
    kit: MLLMDataKit, stream: Any, counts: _Counts, limit: int, wanted: str | None
) -> None:
    lengths = list[int]()
    bad = list[dict[str, Any]]()
    overlong = list[str]()
    rows = 0
    for place, read in islice(stream, inspect_stats.SAMPLE):
        row = _StreamRow(place, stream.root)
        try:
            row.raw = read()
            sequences = kit.row_encoder.encode(row.raw, stream.format, stream.root)
            lengths.append(sum(len(sequence.ids) for sequence in sequences))
        except BadRow as error:
            row.raw = row.raw or error
            if error.reason == "overlong":
                overlong.append(place)
            else:
                bad.append({"source": stream.name, "where": place, **bad_reason(error)})
        index = counts.rows
        counts.add_sample(row, stream.format, kit)
        is_shown = rows < limit if wanted is None else wanted in (str(index), place)
        if is_shown:
            facts = encoded_row(kit.row_encoder, row, 0, stream.format)
            counts.shown.append({"row": index, "source": stream.name, **facts})
        rows += 1
    counts.lengths += lengths
    counts.bad += bad
    counts.overlong += overlong
    counts.sources.append(
        {
            "name": stream.name,
            "rows": rows,
            "good": len(lengths),
            "bad": len(bad),
            "overlong": len(overlong),
            "tokens": sum(lengths),
            "share": None,
        }
    )


# The data kit that a tool works on: the one of a recipe's config, or one for a single data file.


def config_data_kit(engine_class: Any, config: Any, model: str | None = None) -> MLLMDataKit:
    """The kit that the recipe's `data_kit(config)` builds, else one from its MLLMData section and model folder.

    `model` names another folder to take the processor from. Packs of `auto` have the size that it has without a GPU.
    """
    if any(isinstance(value, MLLMData) for _, value in config):
        plain = with_defaults(config)
        if data_section(config)[1].global_batch_tokens == "auto":
            kit = config_data_kit(engine_class, plain, model)
            plain = with_defaults(changed(config, global_batch(config, kit).values))
        config = plain
    if model is None and hasattr(engine_class, "data_kit"):
        return engine_class.data_kit(config)
    _, settings = data_section(config)
    folder = model or config.model.path
    if folder is None:
        raise UserError(
            f"the config has no model.path to load a processor from: {DATA_KIT_FIX}, or give --model MODEL"
        )
    return MLLMDataKit(settings, load_processor(folder), num_workers=config.data.num_workers)


def run_data_command(name: str, file: str, overrides: list[str], *, as_json: bool) -> None:
    """`mvp data NAME CONFIG`: a `data_command` plug-in, on the data kit of a config."""
    composed = compose(file, overrides)
    kit = config_data_kit(composed.engine_class, composed.config)
    plugins.load("data_command", name).run(kit, file, as_json=as_json)


def file_data_kit(path: str, model: str, pack_tokens: int) -> MLLMDataKit:
    """A kit for one data file; any number of bad rows is allowed."""
    settings = MLLMData.model_validate(
        {
            "sources": [{"path": path}],
            "micro_batch_tokens": pack_tokens,
            "max_bad_fraction": 1.0,
            "pairs": True,
        }
    )
    workers = os.cpu_count() or 1
    processor = load_processor(model)
    if is_lerobot(path):
        model_config = read_config(model, {})
        return ActionDataKit(
            settings, ActionData(), processor, model_config=model_config, num_workers=workers
        )
    return MLLMDataKit(settings, processor, num_workers=workers)
