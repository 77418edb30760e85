"""Padded prompts and responses in, padded results out: for RL loops that hold (B, L) tensors.

Legend: B rows, L columns, R columns of the response. A row is `[pad, prompt, response, pad]`; responses begin at column
L - R. The pads are removed before anything is sent to a group, and zeros are put back in their places afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mvp_engine.data.batch import IGNORE, Media, PackedBatch
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
    padded = {}
    for name, value in found.items():
        short = responses(value, batch)  # it has the columns of the longest response only
        padded[name] = F.pad(short, (0, response_length - short.shape[1])).to(device)
    return padded


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


# Between padded prompt-response tensors, as reinforcement learning hands them around, and PackedBatch.
#
# Legend: B rows, L columns, R columns of the response. A row is `[pad, prompt, response, pad]`: prompts end, and
# responses begin, at column L - R. A padded field over the response alone, such as old log-probs, has R columns.
#
# In a padded (B, R) tensor, column j is about response token j itself; in a packed one, entry t is about `labels[t]`,
# the *next* token. `about_tokens` and `from_responses` shift between the two, inside each sequence.

PROMPT_LENS = "prompt_lens"  # the per-sequence field that remembers where responses begin


def from_padded(
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    response_length: int | None = None,
    loss_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    token_fields: dict[str, Tensor] | None = None,
    sequence_fields: dict[str, Tensor] | None = None,
    media: dict[str, Media] | None = None,
) -> PackedBatch:
    """Pack padded rows.

    `response_length` is R; `loss_mask` and `token_fields` have L columns, or R of them. `loss_mask` marks the tokens to
    learn, not the positions that predict them. By default the response is learned, or everything without a
    `response_length`. The items of `media` belong to rows by their `sequence_ids`.
    """
    rows, columns = input_ids.shape
    mask = attention_mask.bool()
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}, input_ids is {tuple(input_ids.shape)}"
        )
    if response_length is not None and not 0 < response_length <= columns:
        raise ValueError(
            f"response_length={response_length} is none of 1 to {columns}, the columns of input_ids"
        )
    if position_ids is not None and position_ids.shape[-2:] != input_ids.shape:
        raise ValueError(
            f"position_ids is {tuple(position_ids.shape)}, input_ids is {tuple(input_ids.shape)}"
        )
    counts = mask.sum(1)
    first = mask.int().argmax(1)
    column = torch.arange(columns, device=mask.device)
    contiguous = (column >= first[:, None]) & (column < (first + counts)[:, None])
    for row in range(rows):
        if not counts[row]:
            raise ValueError(f"row {row} has no token: its attention_mask is all zero")
        if not torch.equal(mask[row], contiguous[row]):
            raise ValueError(
                f"row {row}: attention_mask has a hole; only padding at the two ends can be taken out"
            )
    begin = columns if response_length is None else columns - response_length
    if loss_mask is None:
        loss_mask = mask if response_length is None else mask & (column >= begin)
    fields = {
        name: _full(value, rows, columns, response_length, name)
        for name, value in (token_fields or {}).items()
    }
    extra = dict(sequence_fields or {})
    if response_length is not None:
        extra[PROMPT_LENS] = mask[:, :begin].sum(1)
    full_mask = _full(loss_mask, rows, columns, response_length, "loss_mask")
    return PackedBatch.from_sequences(
        [input_ids[row, mask[row]] for row in range(rows)],
        [full_mask[row, mask[row]] for row in range(rows)],
        position_ids=None
        if position_ids is None
        else [position_ids[..., row, mask[row]] for row in range(rows)],
        token_fields={
            name: [value[row, mask[row]] for row in range(rows)] for name, value in fields.items()
        },
        sequence_fields=extra,
        media=media,
    )


def to_padded(batch: PackedBatch, pad_id: int = 0) -> dict[str, Tensor]:
    """Tensors of (B, L, ...), pads being zero: `input_ids`, `attention_mask`, `labels`, `loss_mask`, `position_ids` and
    all per-token fields; and the per-sequence fields, (B, ...).

    `from_padded` takes them back, with the batch's own `media`, since rows are in the order of its sequences. `labels`
    are shifted as in the batch; `loss_mask`, as there, marks the tokens that are learned themselves.

    With the per-sequence field `prompt_lens` rows are `[pad, prompt, response, pad]`; without it, `[tokens, pad]`.
    """
    prompts = batch.sequence_fields.get(PROMPT_LENS)
    lengths = batch.lengths
    left = torch.zeros_like(lengths) if prompts is None else prompts.max() - prompts
    columns = int((left + lengths).max())
    row = torch.repeat_interleave(torch.arange(batch.num_sequences, device=lengths.device), lengths)
    column = (
        torch.arange(batch.num_tokens, device=lengths.device)
        - batch.cu_seqlens[:-1].long()[row]
        + left[row]
    )

    def spread(value: Tensor, pad: float = 0) -> Tensor:
        out = value.new_full((batch.num_sequences, columns, *value.shape[1:]), pad)
        out[row, column] = value
        return out

    positions = batch.position_ids
    out = {
        "input_ids": spread(batch.input_ids, pad_id),
        "attention_mask": spread(torch.ones_like(batch.input_ids)),
        "labels": spread(batch.labels, IGNORE),
        "position_ids": spread(positions)
        if positions.ndim == 1
        else torch.stack([spread(p) for p in positions]),
    }
    out["loss_mask"] = spread(about_tokens(batch.labels != IGNORE, batch))
    names = [*out, *batch.token_fields, *batch.sequence_fields]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"two fields would be called {twice[0]!r} in the padded batch; rename one of them"
        )
    return (
        out
        | {name: spread(value) for name, value in batch.token_fields.items()}
        | batch.sequence_fields
    )


def about_tokens(values: Tensor, batch: PackedBatch) -> Tensor:
    """From "entry t is about the next token" to "entry t is about token t"; each first token gets 0."""
    moved = torch.zeros_like(values)
    moved[1:] = values[:-1]
    moved[batch.cu_seqlens[:-1].long()] = 0
    return moved


def responses(values: Tensor, batch: PackedBatch) -> Tensor:
    """Per-token outputs about the responses' tokens, as padded (B, R): column j is about response token j."""
    columns = int((batch.lengths - batch.sequence_fields[PROMPT_LENS]).max())
    there, index = _response_tokens(batch, columns)
    out = values.new_zeros((batch.num_sequences, columns, *values.shape[1:]))
    out[there] = about_tokens(values, batch)[index]
    return out


def from_responses(padded: Tensor, batch: PackedBatch) -> Tensor:
    """The way back: (B, R) about the responses' tokens -> (T,) with entry t about the next token; 0 elsewhere."""
    empty = (batch.sequence_fields[PROMPT_LENS] == 0).nonzero()
    if len(empty):
        raise ValueError(
            f"sequence {int(empty[0])} has no prompt: nothing predicts its first token"
        )
    there, index = _response_tokens(batch, padded.shape[1])
    out = padded.new_zeros((batch.num_tokens, *padded.shape[2:]))
    out[index - 1] = padded[there]
    return out


def _response_tokens(batch: PackedBatch, columns: int) -> tuple[Tensor, Tensor]:
    """Which entries of a (B, R) tensor are tokens of responses, and the index of each of these in the batch."""
    prompts = batch.sequence_fields[PROMPT_LENS]
    column = torch.arange(columns, device=prompts.device)
    there = column < (batch.lengths - prompts)[:, None]
    index = (batch.cu_seqlens[:-1].long() + prompts)[:, None] + column
    return there, index[there]


def _full(value: Tensor, rows: int, columns: int, response_length: int | None, name: str) -> Tensor:
    """A field of R columns, with zeros for the prompt's columns in front."""
    if value.ndim < 2 or len(value) != rows:
        raise ValueError(f"{name} is {tuple(value.shape)} for {rows} rows")
    if value.shape[1] == columns:
        return value
    if value.shape[1] != response_length:
        known = (
            f"{columns}"
            if response_length is None
            else f"{columns} or response_length={response_length}"
        )
        raise ValueError(f"{name} has {value.shape[1]} columns; it must have {known}")
    front = value.new_zeros((len(value), columns - response_length, *value.shape[2:]))
    return torch.cat([front, value], dim=1)
