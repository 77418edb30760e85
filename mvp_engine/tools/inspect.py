"""`mvp data inspect` with a processor: what a data kit makes of the rows, as facts that `inspect_page.py` prints."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine import plugins
from mvp_engine.config import compose
from mvp_engine.errors import UserError
from mvp_engine.kit.auto import changed, global_batch, with_defaults
from mvp_engine.kit.data.encode.processor import load_processor
from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.pack.plan import PacedMixture, Plan
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.sources import Source
from mvp_engine.kit.data.settings import (
    DATA_KIT_FIX,
    MLLMData,
    data_section,
    read_manifest,
    resolve_source,
)
from mvp_engine.tools import inspect_rows
from mvp_engine.tools.inspect_rows import (
    Facts,
    Keep,
    Sample,
    SourceFacts,
    bad_reason,
    count_bad,
    encoded_row,
    find_row,
    length_stats,
)

TIMED_PACKS = 8  # that are loaded to time it
TIMED_SECONDS = 1.0
NO_PLAN = "a packing plan: these are prompts, and rollouts are packed when they are generated"


@dataclass
class Inspection:
    """What was counted over the sources of a split."""

    split: str
    sample: Sample
    missing: str | None = None
    decoded: bool = False
    plan: Facts | None = None
    loading: Facts | None = None
    sources: list[SourceFacts] = field(default_factory=list)
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    overlong: list[str] = field(default_factory=list)  # places of rows
    bad: list[Facts] = field(default_factory=list)
    rows: list[Facts] = field(default_factory=list)  # those that are shown

    def facts(self, kit: MLLMDataKit) -> Facts:
        return {
            "split": self.split,
            "missing": self.missing,
            "decoded": self.decoded,
            "sources": list(map(vars, self.sources)),
            "sample": self.sample.facts(),
            "lengths": length_stats(self.lengths, "tokens"),
            "plan": self.plan,
            "loading": self.loading,
            "overlong": {
                "fate": kit.settings.overlong,
                "rows": len(self.overlong),
                "where": self.overlong,
            },
            "bad": count_bad(self.bad),
            "rows": self.rows,
        }


def inspect_kit(
    kit: MLLMDataKit,
    split: str,
    packs: int,
    *,
    limit: int = 3,
    row: str | None = None,
    decode: bool = False,
    keep: Keep = None,
) -> Facts:
    """All facts of a split. `row` is an index over all sources, or a place such as `rows.jsonl:17`."""
    sample = Sample(kit.row_encoder.template.reasoning_left_out)
    if kit.is_stream(split):
        return _inspect_streams(kit, Inspection(split, sample), packs, limit, row, keep).facts(kit)
    dataset = kit.dataset(split, global_batch_size=packs)
    mixture, costs = kit.measured(split)
    bad = kit.bad_rows(split)
    overlong = kit.overlong_rows(split)
    corrupt = _decode_all(dataset) if decode else []
    # Rollouts are packed with their completions, when these are known.
    has_plan = kit.settings.prompt_only != "always"
    result = Inspection(
        split,
        sample,
        missing=None if has_plan else NO_PLAN,
        decoded=decode,
        plan=_plan(dataset.plan) if has_plan else None,
        loading=_load_some(kit, dataset) if has_plan and len(dataset) else None,
        lengths=np.concatenate([cost.tokens[cost.tokens > 0] for cost in costs]),
        overlong=[record.where for record in overlong],
        bad=[vars(record) for record in [*bad, *corrupt]],
    )
    num_bad, num_corrupt, num_overlong = (
        Counter(record.source for record in records) for records in (bad, corrupt, overlong)
    )
    shares = mixture.shares()
    for name, source, cost in zip(mixture.names, mixture.sources, costs, strict=True):
        counts = SourceFacts(
            name,
            rows=len(source),
            good=int((cost.tokens > 0).sum()) - num_corrupt[name],
            bad=num_bad[name] + num_corrupt[name],
            overlong=num_overlong[name],
            tokens=int(cost.tokens.sum()),
            share=round(shares[name], 4),
            share_of=mixture.mixing.by if isinstance(mixture, PacedMixture) else "rows",
        )
        result.sources.append(counts)
    for source, row_format in zip(mixture.sources, dataset.formats, strict=True):
        sample.add_source(source, row_format)
    places = _in_turn(mixture.sources, limit) if row is None else [find_row(mixture.sources, row)]
    for which, index in places:
        source = mixture.sources[which]
        facts = encoded_row(
            kit.row_encoder,
            partial(source.__getitem__, index),
            source.where(index),
            source.root,
            dataset.formats[which],
            keep,
        )
        number = int(dataset.first[which]) + index
        result.rows.append({"row": number, "source": mixture.names[which], **facts})
    return {**result.facts(kit), **kit.facts(split)}


def _plan(plan: Plan) -> Facts:
    return {
        "rows": plan.num_rows,
        "tokens": plan.num_tokens,
        "micro_batch_tokens": plan.budget,
        "packs": len(plan),
        "fill": round(plan.fill_ratio, 4),
        "packs_per_step": plan.packs_per_step,
        "steps": plan.steps,
    }


class _Meter:
    """What reading costs one worker, from here on."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.read = _bytes_read()

    def facts(
        self, tokens: int, step_tokens: int, shards: int | None, size: int | None, mapped: int = 0
    ) -> Facts:
        """`tokens` were read since; `mapped` bytes of them from files that are memory-mapped."""
        seconds = time.perf_counter() - self.began
        read = _bytes_read() - self.read + mapped
        return {
            "shards": shards,
            "bytes": size,
            "tokens_per_s": round(tokens / seconds) if tokens else None,
            "bytes_per_step": round(read / tokens * step_tokens) if tokens and read else None,
        }


def _bytes_read() -> int:
    """Bytes that this process has read from files; where that is not known, 0."""
    file = Path("/proc/self/io")
    return int(file.read_text().split()[1]) if file.is_file() else 0


def _load_some(kit: MLLMDataKit, dataset: Any) -> Facts:
    """What it costs to load the first packs, with their media."""
    meter = _Meter()
    tokens = mapped = 0
    entries = [one.prepared.entry for one in dataset.mixture.sources if one.prepared is not None]
    stored = [size for entry in entries for _, size in entry["shards"]]
    for pack in range(min(TIMED_PACKS, len(dataset))):
        tokens += dataset[pack][0].num_tokens
        if time.perf_counter() - meter.began > TIMED_SECONDS:
            break
    if entries:
        mapped = round(sum(stored) * tokens / max(1, sum(entry["tokens"] for entry in entries)))
    step_tokens = dataset.packs_per_step * kit.settings.tokens_per_pack
    shards = len(stored) or None
    return meter.facts(tokens, step_tokens, shards, sum(stored) or None, mapped)


def _decode_all(dataset: Any) -> list[Any]:
    """Records of the rows with corrupt media. A row may be in several packs; its record is returned once."""
    records: dict[str, Any] = {}
    for index in range(len(dataset)):
        records |= {record.where: record for record in dataset[index][1]}
    return list(records.values())


def _in_turn(sources: Sequence[Source], limit: int) -> list[tuple[int, int]]:
    """(source, index) of the first row of each source, then of the second of each, and so on up to `limit`."""
    places = []
    for index in range(min(limit, max(map(len, sources)))):
        places += [(which, index) for which, source in enumerate(sources) if index < len(source)]
    return places[:limit]


def _inspect_streams(
    kit: MLLMDataKit, result: Inspection, packs: int, limit: int, row: str | None, keep: Keep
) -> Inspection:
    """Of streams, the first SAMPLE rows of each: the rest is known only once it is read."""
    most = inspect_rows.SAMPLE
    result.missing = (
        f"a packing plan: streams have none, and only the first {most:,} rows of each were read"
    )
    encoder = kit.row_encoder
    shares = kit.stream_shares(result.split)
    lengths: list[int] = []
    streams = kit.streams(result.split)
    meter = _Meter()
    for stream in streams:
        counts = SourceFacts(stream.name, tokens=0, share=round(shares[stream.name], 4))
        result.sources.append(counts)
        for place, read in islice(stream, most):
            get = _read_once(read)
            number = result.sample.rows
            is_shown = counts.rows < limit if row is None else row in (str(number), place)
            counts.rows += 1
            try:
                sequences = encoder.encode(get(), stream.format, stream.root)
                lengths.append(sum(len(sequence.ids) for sequence in sequences))
                counts.good += 1
            except BadRow as error:
                if error.reason == "overlong":
                    counts.overlong += 1
                    result.overlong.append(place)
                else:
                    counts.bad += 1
                    result.bad.append({"source": stream.name, "where": place, **bad_reason(error)})
            if is_shown:
                facts = encoded_row(encoder, get, place, stream.root, stream.format, keep)
                result.rows.append({"row": number, "source": stream.name, **facts})
            result.sample.add(get, stream.format)
        counts.tokens = sum(lengths[-counts.good :]) if counts.good else 0
    sizes = [stream.num_bytes for stream in streams]
    size = None if None in sizes else sum(filter(None, sizes))
    shards = sum(len(stream.shards) for stream in streams)
    result.loading = meter.facts(sum(lengths), packs * kit.settings.tokens_per_pack, shards, size)
    if row is not None and not result.rows:
        raise UserError(f"--row {row}: not among the first {most:,} rows of a stream")
    result.lengths = np.array(lengths, np.int64)
    return result


def _read_once(read: Callable[[], Any]) -> Callable[[], Any]:
    """A function that returns the row, or raises the BadRow that reading it raised."""
    try:
        row = read()
    except BadRow as error:
        return partial(_raise, error)
    return lambda: row


def _raise(error: BadRow) -> Any:
    raise error


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
        kit = engine_class.data_kit(config)
        kit.train = config.train
        return kit
    _, settings = data_section(config)
    folder = model or config.model.path
    if folder is None:
        raise UserError(
            f"the config has no model.path to load a processor from: {DATA_KIT_FIX}, or give --model MODEL"
        )
    kit = MLLMDataKit(settings, load_processor(folder), num_workers=config.data.num_workers)
    kit.train = config.train
    return kit


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
            "pack_tokens": pack_tokens,
            "max_bad_rows": 1.0,
            "pairs": manifest["pairs"] if (manifest := read_manifest(path)) else True,
        }
    )
    workers = os.cpu_count() or 1
    processor = load_processor(model)
    if of_kit := plugins.data_folder(resolve_source(settings.sources[0]).path):
        kit: MLLMDataKit = of_kit.data_kit(settings, processor, model, workers)
        return kit
    return MLLMDataKit(settings, processor, num_workers=workers)
