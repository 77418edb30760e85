"""What is left out of a plan: bad rows by reason, over-long rows by name, columns that no row has."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter

from mvp_engine.errors import UserError, count
from mvp_engine.kit.data.pack.cost_cache import Costs
from mvp_engine.kit.data.pack.mixture import Mixture
from mvp_engine.kit.data.read.bad_rows import BadRecord
from mvp_engine.kit.data.read.row_types import BadRow, RowFormat
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.data.read.sources import Source

LOGGER = logging.getLogger("mvp_engine")
_OUTCOMES = {"truncate": "truncated", "shrink": "shrunk"}
_SHOWN = 3  # names in a message
_FIRST_ROWS = 100  # their columns are compared with the settings


def overlong_records(
    mixture: Mixture, costs: list[Costs], max_tokens: int, dropped: bool = True
) -> list[BadRecord]:
    """The over-long rows of all sources that are dropped, or the others, which were made to fit."""
    detail = f"more than {max_tokens} tokens"
    records = []
    for name, source, cost in zip(mixture.names, mixture.sources, costs, strict=True):
        for row in cost.long.tolist():
            if row not in cost.bad and (cost.tokens[row] == 0) == dropped:
                records.append(BadRecord(name, source.where(row), "overlong", detail))
    return records


def refuse_overlong(mixture: Mixture, costs: list[Costs], max_tokens: int) -> None:
    found = overlong_records(mixture, costs, max_tokens)
    if found:
        raise UserError(
            f"data: {count(len(found), 'row')} of more than {max_tokens} tokens, such as {_names(found)}: raise "
            "mllm.micro_batch_tokens or mllm.row_tokens, or set mllm.overlong to drop, truncate or shrink"
        )


def no_source(split: str) -> UserError:
    """The error for a split that the config gives no rows."""
    fix = f"give a source split: {split}"
    if split == "eval":
        fix += " or hold_out, a share of its rows; or set loop.eval_interval=null"
    return UserError(f"data: no source has split: {split}. To fix it, {fix}")


def no_rows(
    split: str, left_out: str, bad: list[BadRecord], long: list[BadRecord], max_tokens: int
) -> UserError:
    """The error for a split of which every row is left out: the first bad row, and what to do about over-long ones."""
    text = f"data: no row of {split} can be trained on. {left_out}"
    if bad:
        text += f". Such as {bad[0].where}: {bad[0].reason}: {bad[0].detail}"
    if long:
        text += (
            f". Over-long rows have more than {max_tokens} tokens: raise mllm.micro_batch_tokens or "
            "mllm.row_tokens, or set mllm.overlong"
        )
    return UserError(text)


def describe_left_out(mixture: Mixture, costs: list[Costs], overlong: str) -> str:
    """Bad rows by reason, and the number of over-long rows with the first of them."""
    reasons = Counter[str]()
    for cost in costs:
        reasons.update(reason for reason, _ in cost.bad.values())
    bad = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or "none"
    outcomes = ["dropped"]
    if overlong in _OUTCOMES:
        outcomes.insert(0, _OUTCOMES[overlong])
    parts = []
    for outcome in outcomes:
        long = overlong_records(mixture, costs, 0, outcome == "dropped")
        parts.append(f"{outcome}: {len(long):,}" + (f" ({_names(long)})" if long else ""))
    return f"Bad rows: {bad}. Over-long rows {', '.join(parts)}"


def refuse_no_pairs(split: str, sources: list[Source], formats: list[RowFormat]) -> None:
    """Raise if the first rows of the sources are no preference pairs: nothing would be trained."""
    seen = None
    for source, row_format in zip(sources, formats, strict=True):
        for index in range(min(len(source), _FIRST_ROWS)):
            with contextlib.suppress(BadRow):
                if read_row(source[index], row_format).rejected:
                    return
                seen = seen or source.where(index)
    if seen:
        raise UserError(
            f"data: no preference pairs among the first rows of {split}, such as {seen}: rows need chosen and rejected"
        )


def warn_of_missing_columns(name: str, source: Source, row_format: RowFormat) -> None:
    """Warn if `columns` renames a column that none of the first rows has: it may be misspelt."""
    if not row_format.columns:
        return
    found: set[str] = set()
    for index in range(min(len(source), _FIRST_ROWS)):
        with contextlib.suppress(BadRow):
            found |= source[index].keys()
    missing = [old for old in row_format.columns if old not in found]
    if missing:
        LOGGER.warning(
            "%s: columns names %s, but the first rows have only %s",
            name,
            ", ".join(missing),
            ", ".join(sorted(found)),
        )


def _names(records: list[BadRecord]) -> str:
    more = ", ..." if len(records) > _SHOWN else ""
    return ", ".join(record.where for record in records[:_SHOWN]) + more
