"""Media: the images, videos or audio clips of a packed batch, as flat rows with item boundaries."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

IGNORE = -100  # the label of what carries no loss


@dataclass(eq=False)
class Media:
    """Items of one kind, such as the images of a batch: item i has `row_counts[i]` rows of `values`.

    Sequences with the same prompt share its items: they are held once, by the first of these sequences.
    """

    values: Tensor  # (sum of row counts, ...), such as flattened patches
    row_counts: Tensor  # (N,) int64
    sequence_ids: Tensor  # (N,) int64: the sequence that each item belongs to, never decreasing
    fields: dict[str, Tensor] = field(default_factory=dict)  # (N, ...) each, such as grids
    # (S,) int64: the sequence whose items each sequence uses, an earlier one or itself. None: all use their own.
    shared_with: Tensor | None = None
    # The column of integer `values` with labels, of items that a model predicts; None: inputs of an encoder.
    label_column: int | None = None

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
        shared = self.shared_with
        if shared is not None and not torch.equal(shared[self.sequence_ids], self.sequence_ids):
            raise ValueError("media items belong to a sequence that uses those of another one")

    @property
    def is_target(self) -> bool:
        """Whether a model predicts the items: no encoder reads them, and a prompt has none."""
        return self.label_column is not None

    def without_labels(self) -> Media:
        """The same items without loss, for dummy sequences."""
        if self.label_column is None:
            return self
        values = self.values.clone()
        values[:, self.label_column] = IGNORE
        return dataclasses.replace(self, values=values)

    def items_of(self, sequence: int) -> list[int]:
        """The items that a sequence uses."""
        if self.shared_with is not None:
            sequence = int(self.shared_with[sequence])
        return (self.sequence_ids == sequence).nonzero()[:, 0].tolist()

    def select(self, sequences: list[int], *, share: bool = True) -> Media:
        """The items of these sequences, which are numbered from 0 in the given order.

        With `share`, items that several of them use are held once.
        """
        items: list[int] = []
        sequence_ids: list[int] = []
        shared_with: list[int] = []
        first: dict[int, int] = {}  # item -> the first of the sequences that uses it
        for new, old in enumerate(sequences):
            found = self.items_of(old)
            user = first.setdefault(found[0], new) if share and found else new
            shared_with.append(user)
            if user == new:
                items += found
                sequence_ids += [new] * len(found)
        index = torch.tensor(items, dtype=torch.long)
        rows = self.values.split(self.row_counts.tolist())
        return Media(
            torch.cat([rows[item] for item in items]) if items else self.values[:0],
            self.row_counts[index],
            torch.tensor(sequence_ids, dtype=torch.long),
            {name: value[index] for name, value in self.fields.items()},
            _unless_own(torch.tensor(shared_with)),
            self.label_column,
        )


def concat_media(kind: str, parts: list[Media], num_sequences: list[int]) -> Media:
    """The items of several batches; `num_sequences` are the numbers of sequences of those batches.

    Batches that hold the same Media object share its items.
    """
    names = [sorted(media.fields) for media in parts]
    if any(other != names[0] for other in names):
        raise ValueError(f"cannot concatenate {kind} with different fields: {names}")
    offset = 0
    first: dict[int, int] = {}  # id of a Media -> the offset of the first batch with it
    kept: list[Media] = []
    sequence_ids: list[Tensor] = []
    shared_with: list[Tensor] = []
    for media, count in zip(parts, num_sequences, strict=True):
        start = first.setdefault(id(media), offset) if len(media.row_counts) else offset
        own = torch.arange(count) if media.shared_with is None else media.shared_with
        shared_with.append(own + start)
        if start == offset:
            kept.append(media)
            sequence_ids.append(media.sequence_ids + offset)
        offset += count
    return Media(
        _concat_values([media.values for media in kept]),
        torch.cat([media.row_counts for media in kept]),
        torch.cat(sequence_ids),
        {name: cat_padded([media.fields[name] for media in kept]) for name in parts[0].fields},
        _unless_own(torch.cat(shared_with)),
        parts[0].label_column,
    )


def _unless_own(shared_with: Tensor) -> Tensor | None:
    own = torch.arange(len(shared_with))
    return None if torch.equal(shared_with, own) else shared_with


def cat_padded(
    parts: list[Tensor], out: Callable[[tuple[int, ...]], Tensor] | None = None
) -> Tensor:
    """`torch.cat` of items; where their sizes differ, zeros follow the smaller ones, as in image processors.

    `out` returns an empty tensor of a shape, for the result.
    """
    filled = [part for part in parts if len(part)] or parts[:1]
    row = tuple(max(sizes) for sizes in zip(*(part.shape[1:] for part in filled), strict=True))
    padded = []
    for part in filled:
        if part.shape[1:] != row:
            larger = part.new_zeros((len(part), *row))
            larger[(slice(None), *map(slice, part.shape[1:]))] = part
            part = larger
        padded.append(part)
    if out is None:
        return torch.cat(padded)
    return torch.cat(padded, out=out((sum(map(len, padded)), *row)))


def _concat_values(parts: list[Tensor]) -> Tensor:
    """In a DataLoader worker, concatenate into shared memory: torch would copy the result there anyway."""
    if get_worker_info() is None:
        return cat_padded(parts)

    def shared(shape: tuple[int, ...]) -> Tensor:
        storage = parts[0]._typed_storage()._new_shared(math.prod(shape), device=parts[0].device)
        return parts[0].new(storage).resize_(shape)

    return cat_padded(parts, shared)
