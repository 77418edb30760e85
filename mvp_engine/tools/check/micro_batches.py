"""Other micro-batches of the same rows, for the comparison in `splits.py`: one in two parts, or two in one.

Rows of a PackedBatch are its sequences, or all sequences of one sample (the two sides of a preference pair). Rows of
any other micro-batch are the entries of the first dimension, which all its tensors must have in common. A recipe with
other rows in its micro-batches defines `split_micro_batch(micro_batch)`, which returns parts, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.kit.row_checks import leading_sizes, row_groups, select_rows

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
        labels = [int(one.sum()) for one in has_label]
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
        joined_list = [_concat([a, b]) for a, b in zip(first, second, strict=True)]
        return type(first)(*joined_list) if hasattr(first, "_fields") else type(first)(joined_list)
    raise TypeError(f"{type(first).__name__} cannot be concatenated")
