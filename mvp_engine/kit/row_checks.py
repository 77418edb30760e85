"""Rows of micro-batches: what they are called in their files, one of them alone, and checks that name the bad one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.data.protocols import KnowsSamples, implements
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


def check_rows(engine: Engine, ctx: StepContext, check: Callable[[Any], None]) -> None:
    """Call `check` on each micro-batch of a training step, in `train_pre_step`: they are on the host there.

    A `RowError` from it ends the training with the step, the micro-batch and the row's name.
    """
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
        return [[row] for row in range(_batch_size(micro_batch) or 0)]
    sequences = range(micro_batch.num_sequences)
    if "sample" not in micro_batch.sequence_fields:
        return [[sequence] for sequence in sequences]
    samples = micro_batch.sequence_fields["sample"].tolist()
    return [list(group) for _, group in groupby(sequences, key=samples.__getitem__)]


def select_rows(micro_batch: Any, rows: list[int]) -> Any:
    """The micro-batch with these rows only."""
    if isinstance(micro_batch, PackedBatch):
        return micro_batch.select(rows)
    size = _batch_size(micro_batch)

    def select(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[torch.tensor(rows)] if value.ndim and len(value) == size else value
        if isinstance(value, Mapping):
            return {key: select(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            if any(isinstance(item, Tensor | Mapping) for item in value):
                return type(value)(select(item) for item in value)
            return [value[row] for row in rows] if len(value) == size else value
        return value

    return select(micro_batch)


def _batch_size(value: Any) -> int | None:
    """The length of the first tensor with a dimension."""
    if isinstance(value, Tensor):
        return len(value) if value.ndim else None
    items = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list | tuple):
        return None
    sizes = [_batch_size(item) for item in items]
    return next((size for size in sizes if size is not None), None)
