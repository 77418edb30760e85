"""Rows of micro-batches: what they are called in their files, one of them alone, and checks that name the bad one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE, WEIGHT, PackedBatch
from mvp_engine.data.loader import KnowsSamples, implements
from mvp_engine.engine import Engine, StepContext
from mvp_engine.errors import RowError, UserError


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Raise for a label that is neither a class nor -100 (none). Labels are (B,) or (B, ...), one row per sample.

    It reads the values: give it host tensors in training. On a GPU such a label ends in a device assert otherwise.
    """
    is_bad = ((labels < 0) | (labels >= num_classes)) & (labels != IGNORE)
    if not bool(is_bad.any()):
        return
    place = is_bad.nonzero()[0].tolist()
    value = int(labels[tuple(place)])
    raise RowError(f"label {value} is outside of the {num_classes} classes", place[0])


def check_rows(
    engine: Engine, ctx: StepContext, check: Callable[[Any], None] | None = None
) -> None:
    """Call `check` on each micro-batch of a training step, in `train_pre_step`: they are on the host there.

    By default it is the model's own `check`, if it has one. A `RowError` from it ends the training with the step, the
    micro-batch and the row's name.
    """
    check = check or getattr(engine.model, "check", None)
    if check is None:
        return
    first = engine.feed.used - len(ctx.micro_batches)
    for index, micro_batch in enumerate(ctx.micro_batches):
        try:
            check(micro_batch)
        except RowError as error:
            name = row_name(engine.feed.loader, first + index, error.row, micro_batch)
            place = (
                f"step {ctx.step}, rank {engine.world.rank}, micro-batch {index + 1}, row {name}"
            )
            raise UserError(f"{place}: {error}") from None


def refuse_preference_rows(batch: PackedBatch) -> None:
    """Raise for rows of preference training, in a loss that would train on all of their answers."""
    if "side" in batch.sequence_fields:
        raise UserError(
            "data.pairs: this loss would train on rejected answers too. Set it to false, or train with "
            "engine: preference (docs/preference.md)"
        )
    if "label" in batch.sequence_fields:
        raise UserError(
            "data.fields has label: this loss would train on the answers of all rows, whatever their label. "
            "Remove it, or train with engine: preference and preference.loss=kto"
        )


def refuse_weights(batch: PackedBatch) -> None:
    """Raise for rows with weights, in a loss that does not read them."""
    if WEIGHT in batch.token_fields:
        raise UserError(
            "rows have weights (the column weight, or a number as the loss of a message), and this loss does not read "
            "them: drop the column by `columns: {weight: null}` of the source, or remove them"
        )


def log_fill(
    ctx: StepContext,
    pack_tokens: int,
    num_positions: Callable[[PackedBatch], int] = attrgetter("num_tokens"),
) -> None:
    """Log which share of the packs is no free space; of a stream also count the rows, which a plan knows otherwise."""
    num_tokens = sum(map(num_positions, ctx.micro_batches))
    ctx.log("fill", num_tokens, pack_tokens * len(ctx.micro_batches))
    if ctx.plan is None:
        ctx.count("samples", sum(len(row_groups(batch)) for batch in ctx.micro_batches))


def log_end_report(engine: Engine) -> None:
    """Warn of rows that the training left out. Loaders of the data kit have such a report, others may not."""
    end_report = getattr(engine.feed.loader, "end_report", None)
    report = end_report() if end_report and engine.world.is_main else None
    if report:
        engine.logger.warning("%s", report)


def row_name(loader: Any, number: int, row: int, micro_batch: Any) -> Any:
    """What a loader calls a row of this rank's micro-batch `number`, counted from the loader's cursor.

    `row` is its index in the micro-batch; in a packed batch, the index of one of its sequences. It stays an index if
    the loader does not know its samples.
    """
    fields = micro_batch.sequence_fields if isinstance(micro_batch, PackedBatch) else {}
    if "sample" in fields and hasattr(loader, "row_name"):
        return loader.row_name(int(fields["source"][row]), int(fields["sample"][row]))
    ids = loader.sample_ids(number, number + 1) if implements(loader, KnowsSamples) else []
    return ids[row] if row < len(ids) else row


def row_groups(micro_batch: Any) -> list[list[int]]:
    """The indices of each row, for `select_rows`. The sequences of one row of a packed batch belong together.

    Empty if the micro-batch is neither packed nor made of tensors with one entry per sample.
    """
    if not isinstance(micro_batch, PackedBatch):
        return [[row] for row in range(_batch_size(micro_batch))]
    sequences = range(micro_batch.num_sequences)
    fields = micro_batch.sequence_fields
    if "sample" not in fields:
        return [[sequence] for sequence in sequences]
    samples = fields["sample"].tolist()
    sources = fields["source"].tolist() if "source" in fields else [0] * len(samples)
    rows: dict[tuple[int, int], list[int]] = {}
    for sequence in sequences:
        rows.setdefault((sources[sequence], samples[sequence]), []).append(sequence)
    return list(rows.values())


def select_rows(micro_batch: Any, rows: list[int]) -> Any:
    """The micro-batch with these rows only: of all its tensors and lists that have one entry per row."""
    if isinstance(micro_batch, PackedBatch):
        return micro_batch.select(rows)
    return _select(micro_batch, rows, _batch_size(micro_batch))


def leading_sizes(value: Any) -> Iterator[int]:
    """The first dimension of each tensor in nested containers; 0 for a value that has no rows to select."""
    if isinstance(value, Tensor):
        if value.ndim:
            yield len(value)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from leading_sizes(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from leading_sizes(one)
    elif _is_dataclass(value):
        yield from leading_sizes(vars(value))
    elif not isinstance(value, str | bytes | int | float | None):
        yield 0


def _batch_size(micro_batch: Any) -> int:
    """The length of the first tensor with a dimension; 0 without one."""
    return next((size for size in leading_sizes(micro_batch) if size), 0)


def _select(value: Any, rows: list[int], size: int) -> Any:
    if isinstance(value, Tensor):
        return value[torch.tensor(rows)] if value.ndim and len(value) == size else value
    if isinstance(value, Mapping):
        selected = {name: _select(one, rows, size) for name, one in value.items()}
        return selected if type(value) is dict else type(value)(selected)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        is_named_tuple = hasattr(value, "_fields")
        has_tensors = any(True for _ in leading_sizes(value))
        if len(value) == size and not has_tensors and not is_named_tuple:
            return type(value)([value[row] for row in rows])
        items = [_select(one, rows, size) for one in value]
        return type(value)(*items) if is_named_tuple else type(value)(items)
    if _is_dataclass(value):
        return dataclasses.replace(value, **_select(vars(value), rows, size))
    return value


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


# Other micro-batches of the same rows: one in two parts, or two in one.
#
# Rows of a PackedBatch are its sequences, or all sequences of one sample (the two sides of a preference pair). Rows of
# any other micro-batch are the entries of the first dimension, which all its tensors must have in common. A recipe with
# other rows in its micro-batches defines `split_micro_batch(micro_batch)`, which returns parts, or None.

Parts = list[Any] | None


def split_each(micro_batches: list[Any], own_split: Callable[[Any], Parts] | None) -> Parts:
    """All micro-batches in parts; None if none of them has several rows."""
    split = own_split or split_micro_batch
    parts = []
    for micro_batch in micro_batches:
        parts += split(micro_batch) or [micro_batch]
    return parts if len(parts) > len(micro_batches) else None


def merge_pairs(micro_batches: list[Any]) -> Parts:
    """Each two micro-batches in one; None if no two of them fit together."""
    merged = []
    for first in range(0, len(micro_batches), 2):
        pair = micro_batches[first : first + 2]
        try:
            merged.append(_concat(pair) if len(pair) == 2 else pair[0])
        except (ValueError, TypeError, RuntimeError):  # other fields, shapes or types
            merged += pair
    return merged if len(merged) < len(micro_batches) else None


def split_micro_batch(micro_batch: Any) -> Parts:
    """A third of the rows, those with the fewest labels, and the others; None for a single row.

    Parts of unequal sizes and lengths: a mean of means over equal parts would be the mean.
    """
    is_packed = isinstance(micro_batch, PackedBatch)
    if not is_packed and len(set(leading_sizes(micro_batch))) != 1:
        return None
    groups = row_groups(micro_batch)
    if len(groups) < 2:
        return None
    if is_packed:
        has_label = (micro_batch.labels != IGNORE).split(micro_batch.lengths.tolist())
        labels = [int(of_sequence.sum()) for of_sequence in has_label]
        groups.sort(key=lambda sequences: sum(labels[s] for s in sequences))
    cut = max(1, len(groups) // 3)
    return [select_rows(micro_batch, sorted(chain(*part))) for part in (groups[:cut], groups[cut:])]


def _concat(pair: list[Any]) -> Any:
    """Two micro-batches as one; raises where they do not fit together."""
    first, second = pair
    if isinstance(first, PackedBatch):
        return PackedBatch.concat(pair)
    if isinstance(first, Tensor):
        return torch.cat(pair) if first.ndim else first
    if isinstance(first, Mapping):
        joined = {name: _concat([first[name], second[name]]) for name in first}
        return joined if type(first) is dict else type(first)(joined)  # type: ignore[call-arg]
    if isinstance(first, list | tuple):
        if not list(leading_sizes(first)):
            return first + second
        items = [_concat([a, b]) for a, b in zip(first, second, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    raise TypeError(f"{type(first).__name__} cannot be concatenated")
