"""Media: the images, videos or audio clips of a packed batch, as flat rows with item boundaries."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from mvp_engine.renamed import raise_renamed

RENAMED = {"rows": "row_counts", "owner": "sequence_ids"}


@dataclass(eq=False)
class Media:
    """Items of one kind, such as the images of a batch: item i has `row_counts[i]` rows of `values`."""

    values: Tensor  # (sum of row counts, ...), such as flattened patches
    row_counts: Tensor  # (N,) int64
    sequence_ids: Tensor  # (N,) int64: the sequence that each item belongs to, never decreasing
    fields: dict[str, Tensor] = field(default_factory=dict)  # (N, ...) each, such as grids

    def __post_init__(self) -> None:
        total = int(self.row_counts.sum())
        if total != len(self.values):
            raise ValueError(
                f"media row_counts add up to {total}, but values has {len(self.values)} rows"
            )
        items = len(self.row_counts)
        wrong = [name for name, value in self.fields.items() if len(value) != items]
        if len(self.sequence_ids) != items or wrong:
            raise ValueError(
                f"media has {items} items, but {wrong or 'sequence_ids'} has another length"
            )
        if bool((self.sequence_ids.diff() < 0).any()):
            raise ValueError("media items must be in the order of their sequences")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> None:
            raise_renamed(self, name, RENAMED)

    def select(self, sequences: list[int]) -> Media:
        """The items of these sequences, which are numbered from 0 in the given order."""
        items: list[int] = []
        sequence_ids: list[int] = []
        for new, old in enumerate(sequences):
            found = (self.sequence_ids == old).nonzero()[:, 0].tolist()
            items += found
            sequence_ids += [new] * len(found)
        index = torch.tensor(items, dtype=torch.long)
        rows = self.values.split(self.row_counts.tolist())
        return Media(
            torch.cat([rows[item] for item in items]) if items else self.values[:0],
            self.row_counts[index],
            torch.tensor(sequence_ids, dtype=torch.long),
            {name: value[index] for name, value in self.fields.items()},
        )


def concat_media(kind: str, parts: list[Media], num_sequences: list[int]) -> Media:
    """The items of several batches; `num_sequences` are the numbers of sequences of those batches."""
    first = parts[0]
    names = [sorted(media.fields) for media in parts]
    if any(other != names[0] for other in names):
        raise ValueError(f"cannot concatenate {kind} with different fields: {names}")
    offsets = torch.tensor([0, *num_sequences]).cumsum(0).tolist()
    ids = [media.sequence_ids + offset for media, offset in zip(parts, offsets, strict=False)]
    return Media(
        _concat_values([media.values for media in parts]),
        torch.cat([media.row_counts for media in parts]),
        torch.cat(ids),
        {name: torch.cat([media.fields[name] for media in parts]) for name in first.fields},
    )


def _concat_values(parts: list[Tensor]) -> Tensor:
    """In a DataLoader worker, concatenate into shared memory: torch would copy the result there anyway."""
    if get_worker_info() is None:
        return torch.cat(parts)
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    storage = parts[0]._typed_storage()._new_shared(math.prod(shape), device=parts[0].device)
    return torch.cat(parts, out=parts[0].new(storage).resize_(shape))
