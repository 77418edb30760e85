"""Padded prompts and responses in, padded results out: for RL loops that hold (B, L) tensors.

Legend: B rows, L columns, R columns of the response. A row is `[pad, prompt, response, pad]`; responses begin at column
L - R. The pads are removed before anything is sent to a group, and zeros are put back in their places afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.data.padded import from_padded, from_responses, responses
from mvp_engine.errors import UserError
from mvp_engine.worker.group import WorkerGroup
from mvp_engine.worker.worker import Loss, UpdateNumbers

INPUTS = ("input_ids", "attention_mask", "position_ids", "loss_mask")


def infer(
    group: WorkerGroup,
    rows: Mapping[str, Tensor],
    outputs: list[str],
    *,
    response_length: int,
    budget: int,
    media: dict[str, Media] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Outputs about the tokens of the responses, (B, R) each, 0 at pads; on the device of `rows`.

    Column j is about response token j: its log-prob, or the value of what comes before it. `options` are those of
    `WorkerGroup.infer`. What else `rows` holds is not read.
    """
    inputs = {name: rows[name] for name in INPUTS if name in rows}
    batch = pack(inputs, response_length, media)
    found = group.infer(batch, outputs, budget=budget, **options)
    device = rows["input_ids"].device
    return {
        name: _widened(responses(value, batch), response_length).to(device)
        for name, value in found.items()
    }


def update(
    group: WorkerGroup,
    rows: Mapping[str, Tensor],
    loss: Loss,
    *,
    response_length: int,
    budget: int,
    media: dict[str, Media] | None = None,
    **options: Any,
) -> list[UpdateNumbers]:
    """Train on padded rows; `options` are those of `WorkerGroup.update`.

    All other tensors in `rows` are fields of the loss: (B, R) about the tokens of the responses, such as
    `old_log_probs` and `advantages`, or one value per row, (B,).
    """
    batch = pack(rows, response_length, media)
    return group.update(batch, loss, budget=budget, **options)


def pack(
    rows: Mapping[str, Tensor], response_length: int, media: dict[str, Media] | None = None
) -> PackedBatch:
    """A packed batch of `input_ids` (B, L), `attention_mask`, and what is given of `position_ids` (B, L) or (A, B, L),
    `loss_mask` (B, R), and fields.
    """
    for name in ("input_ids", "attention_mask"):
        if name not in rows:
            raise UserError(f"padded rows need {name}; these have: {', '.join(sorted(rows))}")
    rows = {name: value.cpu() for name, value in rows.items()}
    batch_size = len(rows["input_ids"])
    per_token: dict[str, Tensor] = {}
    per_row: dict[str, Tensor] = {}
    for name, value in rows.items():
        shape = tuple(value.shape)
        if name in INPUTS:
            continue
        if shape == (batch_size, response_length):
            per_token[name] = value
        elif shape == (batch_size,):
            per_row[name] = value
        else:
            raise UserError(
                f"{name} is {shape}: a field of padded rows is ({batch_size}, {response_length}), which is (B, R), "
                f"or ({batch_size},)"
            )
    batch = from_padded(
        rows["input_ids"],
        rows["attention_mask"],
        response_length=response_length,
        loss_mask=rows.get("loss_mask"),
        position_ids=rows.get("position_ids"),
        sequence_fields=per_row,
        media=media,
    )
    batch.token_fields |= {n: from_responses(value, batch) for n, value in per_token.items()}
    return batch


def _widened(value: Tensor, columns: int) -> Tensor:
    """(B, R) of a (B, C) tensor, which has the columns of the longest response only."""
    return F.pad(value, (0, columns - value.shape[1]))
