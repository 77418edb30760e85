"""Other micro-batches of the same rows, for the comparison in `splits.py`: one in two parts, or two in one.

Rows of a PackedBatch are its sequences, or all sequences of one sample (the two sides of a preference pair). Rows of
any other micro-batch are the entries of the first dimension, which all its tensors must have in common. A recipe whose
micro-batches have other rows defines `split_micro_batch(micro_batch)`, which returns parts, or None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE, PackedBatch

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
    if isinstance(micro_batch, PackedBatch):
        return _split_packed(micro_batch)
    sizes = set(_leading_sizes(micro_batch))
    if len(sizes) != 1 or max(sizes) < 2:
        return None
    (size,) = sizes
    cut = max(1, size // 3)
    rows = torch.arange(size)
    return [_take(micro_batch, rows[:cut], size), _take(micro_batch, rows[cut:], size)]


def _split_packed(batch: PackedBatch) -> Parts:
    rows: dict[int, list[int]] = {}
    samples = batch.sequence_fields.get("sample", torch.arange(batch.num_sequences))
    for sequence, sample in enumerate(samples.tolist()):
        rows.setdefault(sample, []).append(sequence)
    if len(rows) < 2:
        return None
    has_label = (batch.labels != IGNORE).split(batch.lengths.tolist())
    labels = [int(one.sum()) for one in has_label]
    by_labels = sorted(rows.values(), key=lambda sequences: sum(labels[s] for s in sequences))
    cut = max(1, len(rows) // 3)
    return [batch.select(sorted(chain(*part))) for part in (by_labels[:cut], by_labels[cut:])]


def _leading_sizes(value: Any) -> Iterator[int]:
    """The first dimension of each tensor; 0 for a value that cannot be split."""
    if isinstance(value, Tensor):
        if value.ndim:
            yield len(value)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _leading_sizes(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leading_sizes(one)
    elif dataclasses.is_dataclass(value):
        yield from _leading_sizes(vars(value))
    elif not isinstance(value, str | bytes | int | float | None):
        yield 0


def _take(value: Any, rows: Tensor, size: int) -> Any:
    """The rows of all tensors, and of lists that have one entry per row; anything else as it is."""
    if isinstance(value, Tensor):
        return value[rows] if value.ndim else value
    if isinstance(value, Mapping):
        taken = {name: _take(one, rows, size) for name, one in value.items()}
        return taken if type(value) is dict else type(value)(taken)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        has_tensors = bool(list(_leading_sizes(value)))
        if not has_tensors and len(value) == size:
            return type(value)([value[row] for row in rows.tolist()])
        taken_list = [_take(one, rows, size) for one in value]
        return type(value)(*taken_list) if hasattr(value, "_fields") else type(value)(taken_list)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **_take(vars(value), rows, size))
    return value


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
        if not list(_leading_sizes(first)):
            return first + second
        joined_list = [_concat([a, b]) for a, b in zip(first, second, strict=True)]
        return type(first)(*joined_list) if hasattr(first, "_fields") else type(first)(joined_list)
    raise TypeError(f"{type(first).__name__} cannot be concatenated")
