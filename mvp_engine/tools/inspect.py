"""`mvp data inspect` with a processor: what a data kit makes of the rows, as facts that `inspect_page.py` prints.

Its keys are those of `inspect_file.py`; they are documented in docs/data.md and do not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.pack.plan import Plan
from mvp_engine.kit.data.read.sources import Source
from mvp_engine.tools.inspect_rows import encoded_row, find_row
from mvp_engine.tools.inspect_stats import count_bad, length_stats, sample_rows
from mvp_engine.tools.inspect_streams import inspect_streams

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
