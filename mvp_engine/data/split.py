"""Splitting a packed batch into micro-batches under a hard token budget, and merging what they computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mvp_engine.errors import UserError

if TYPE_CHECKING:
    from mvp_engine.data.batch import PackedBatch


@dataclass(frozen=True)
class Split:
    """Micro-batches of one batch, and the sequences of it that each holds."""

    parts: list[PackedBatch]
    members: list[list[int]]

    def merge_tokens(self, outputs: list[Tensor]) -> Tensor:
        """One (T_part, ...) tensor for each part -> (T, ...) in the order of the batch."""
        by_sequence: dict[int, Tensor] = {}
        for members, part, output in zip(self.members, self.parts, outputs, strict=True):
            by_sequence |= zip(members, output.split(part.host_lengths), strict=True)
        return torch.cat([by_sequence[sequence] for sequence in sorted(by_sequence)])


def fit_groups(sizes: list[int], ids: list[int], budget: int) -> list[list[int]]:
    """The sequences of each micro-batch; those with equal ids stay together."""
    groups: dict[int, list[int]] = {}
    for sequence, group in enumerate(ids):
        groups.setdefault(group, []).append(sequence)
    members = list(groups.values())
    totals = [sum(sizes[sequence] for sequence in group) for group in members]
    total, largest = max(zip(totals, members, strict=True), key=lambda one: one[0])
    if total > budget:
        what = f"sequence {largest[0]} costs"
        if len(largest) > 1:
            what = f"sequences {largest}, which stay together, cost"
        raise UserError(
            f"{what} {total} tokens, more than the budget of {budget}: raise the budget or shorten the sequence"
        )
    bins = best_fit(totals, budget)
    return [sorted(sequence for group in part for sequence in members[group]) for part in bins]


def sharing_units(shared_with: list[int], sizes: list[int], limit: int) -> list[int]:
    """Ids of sequences: equal for those that share media, as long as these cost at most `limit` together."""
    ids: list[int] = []
    open_units: dict[int, tuple[int, int]] = {}  # by the sequence with the items: an id, and a cost
    for sequence, source in enumerate(shared_with):
        unit, cost = open_units.get(source, (sequence, 0))
        if cost + sizes[sequence] > limit:
            unit, cost = sequence, 0
        open_units[source] = unit, cost + sizes[sequence]
        ids.append(unit)
    return ids


def best_fit(sizes: list[int], budget: int) -> list[list[int]]:
    """Best-fit decreasing bin packing: each item goes into the fullest bin that has room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fits = [b for b in range(len(bins)) if room[b] >= sizes[item]]
        if fits:
            best = min(fits, key=room.__getitem__)
            bins[best].append(item)
            room[best] -= sizes[item]
        else:
            bins.append([item])
            room.append(budget - sizes[item])
    return [sorted(members) for members in bins]
