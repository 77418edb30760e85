"""Which sequences of a batch go into which optimizer step, and to which data-parallel rank.

Everything here depends on the batch and the number of ranks alone, so the same call gives the same bits again.
"""

from __future__ import annotations

import math
from itertools import chain

import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.kit.data.pack.plan import ENCODER_VALUES_PER_TOKEN


def check_budget(batch: PackedBatch, budget: int) -> None:
    """Refuse a sequence over the budget here, where its index is that of the caller's batch."""
    if batch.max_seqlen > budget:
        sequence = int(batch.lengths.argmax())
        raise UserError(
            f"sequence {sequence} has {batch.max_seqlen} tokens, more than the budget of {budget}: raise the budget or "
            "shorten the sequence"
        )


def balanced(costs: list[int], parts: int) -> list[list[int]]:
    """The items of each part: from the largest, an item goes to the part with the lowest cost. Parts may be empty."""
    members: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        lowest = min(range(parts), key=totals.__getitem__)
        members[lowest].append(item)
        totals[lowest] += costs[item]
    return [sorted(part) for part in members]


def by_data_rank(batch: PackedBatch, ranks: int) -> list[list[int]]:
    """The sequences of each data-parallel rank, with about as much work each: tokens, and values that encoders read.

    Sequences that share media are on one rank, up to a quarter of its tokens: it reads the media once.
    """
    units: dict[int, list[int]] = {}
    for sequence, unit in enumerate(batch.media_units(batch.num_tokens // (4 * ranks))):
        units.setdefault(unit, []).append(sequence)
    members = list(units.values())
    lengths = batch.lengths.tolist()
    encoded = encoder_work(batch, members)
    work = [sum(lengths[s] for s in unit) + own for unit, own in zip(members, encoded, strict=True)]
    parts = balanced(work, ranks)
    return [sorted(chain.from_iterable(members[unit] for unit in part)) for part in parts]


def encoder_work(batch: PackedBatch, units: list[list[int]]) -> list[int]:
    """The work of encoders for each unit of sequences, in tokens of the language model as packs count it.

    Media that sequences of a unit share count once.
    """
    values = [0] * len(units)
    for media in batch.media.values():
        each = math.prod(media.values.shape[1:])
        of_sequence = torch.zeros(batch.num_sequences, dtype=torch.long)
        of_sequence.index_add_(0, media.sequence_ids, media.row_counts * each)
        owner = media.shared_with
        own = list(range(batch.num_sequences)) if owner is None else owner.tolist()
        for unit, sequences in enumerate(units):
            values[unit] += sum(int(of_sequence[s]) for s in {own[s] for s in sequences})
    return [value // ENCODER_VALUES_PER_TOKEN for value in values]


def select(batch: PackedBatch, sequences: list[int]) -> PackedBatch | None:
    return batch.select(sequences) if sequences else None


def merged(
    batch: PackedBatch, members: list[list[int]], results: list[dict[str, Tensor] | None]
) -> dict[str, Tensor]:
    """Per-token results of the data-parallel ranks, in the order of the batch."""
    lengths = batch.lengths.tolist()
    by_sequence: dict[str, dict[int, Tensor]] = {}
    for part, found in zip(members, results, strict=True):
        for name, value in (found or {}).items():
            values = value.split([lengths[sequence] for sequence in part])
            by_sequence.setdefault(name, {}).update(zip(part, values, strict=True))
    sequences = range(batch.num_sequences)
    return {name: torch.cat([own[s] for s in sequences]) for name, own in by_sequence.items()}


def cut(batch: PackedBatch, cuts: int, together: str | None) -> list[list[int]]:
    """The sequences of each optimizer step: in the order of the batch, steps with about as many sequences each.

    Sequences with the same value of the per-sequence field `together` are in one step. There are fewer steps than
    `cuts` if there are fewer such groups.
    """
    groups: dict[int, list[int]] = {}
    own_groups = list(range(batch.num_sequences))
    keys = own_groups if together is None else _together(batch, together)
    for sequence, key in enumerate(keys):
        groups.setdefault(key, []).append(sequence)
    units = list(groups.values())
    steps = min(cuts, len(units))
    members = []
    for step in range(steps):
        mine = units[step * len(units) // steps : (step + 1) * len(units) // steps]
        members.append(sorted(chain.from_iterable(mine)))
    return members


def _together(batch: PackedBatch, name: str) -> list[int]:
    if name not in batch.sequence_fields:
        known = ", ".join(sorted(batch.sequence_fields)) or "none"
        raise UserError(
            f"together={name!r}: the batch has no such per-sequence field; it has: {known}"
        )
    return batch.sequence_fields[name].tolist()
