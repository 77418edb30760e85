"""The KL term of KTO: prompts with answers of other rows, which the policy should find as likely as its reference does.

Each row of a step gets the last answer of the next one, in the order of the samples of all ranks. So the term does not
depend on how the rows are packed, split into micro-batches or divided among ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.distributed import Layout


@dataclass(frozen=True)
class LastAnswer:
    """The tokens of a row's last answer, and where they start in its sequence."""

    sample: int
    start: int
    ids: Tensor
    token_fields: dict[str, Tensor]


def mismatched_batches(
    batches: list[PackedBatch], layout: Layout, budget: int
) -> tuple[list[PackedBatch], int]:
    """This rank's rows with answers of other rows, in micro-batches of at most `budget` tokens; rows of all ranks.

    All ranks call it. `batches` are on the host.
    """
    rows: list[tuple[PackedBatch, LastAnswer]] = []
    for batch in batches:
        for sequence, sample in enumerate(batch.sequence_fields["sample"].tolist()):
            one = batch.select([sequence])
            if sample >= 0 and bool((one.labels != IGNORE).any()):
                rows.append((one, last_answer(one, sample)))
    gathered = layout.world.all_gather([answer for _, answer in rows])
    everyone: list[LastAnswer] = []
    for answers in layout.of_data_ranks(gathered):
        everyone += answers
    everyone.sort(key=lambda answer: answer.sample)
    following = dict(
        zip([one.sample for one in everyone], everyone[1:] + everyone[:1], strict=True)
    )
    swapped = [with_answer(row, own, following[own.sample], budget) for row, own in rows]
    parts = PackedBatch.concat(swapped).split(budget).parts if swapped else []
    return parts, len(everyone)


def last_answer(row: PackedBatch, sample: int) -> LastAnswer:
    """The last run of labels of a batch of one sequence."""
    places = (row.labels != IGNORE).nonzero()[:, 0]
    gaps = (places.diff() > 1).nonzero()[:, 0]
    first = int(places[gaps[-1] + 1 if len(gaps) else 0])
    tokens = slice(first + 1, int(places[-1]) + 2)  # a label is the next token
    fields = {name: value[tokens] for name, value in row.token_fields.items()}
    return LastAnswer(sample, first + 1, row.input_ids[tokens], fields)


def with_answer(row: PackedBatch, own: LastAnswer, other: LastAnswer, budget: int) -> PackedBatch:
    """The prompt of a row, media included, with another row's answer, which is cut to fit the budget."""
    ids = other.ids[: budget - own.start]
    count = len(ids)
    labels = torch.full_like(row.labels[:1], IGNORE).repeat(own.start + count)
    labels[own.start - 1 : own.start - 1 + count] = ids
    positions = row.position_ids
    answer_positions = positions[..., own.start : own.start + 1] + torch.arange(count)
    fields = {}
    for name, value in row.token_fields.items():
        fields[name] = torch.cat([value[: own.start], other.token_fields[name][:count]])
    return PackedBatch(
        torch.cat([row.input_ids[: own.start], ids]),
        labels,
        torch.cat([positions[..., : own.start], answer_positions], dim=-1),
        torch.tensor([0, own.start + count], dtype=torch.int32),
        fields,
        row.sequence_fields,
        row.media,
    )
