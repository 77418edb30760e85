"""Single rows for `mvp data inspect`: as the model sees them, or as they are read where no model is given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import MEDIA, BadRow, Row
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.tools.inspect_stats import Rows

if TYPE_CHECKING:  # they import torch
    from mvp_engine.kit.data.encode.row_encoder import RowEncoder
    from mvp_engine.kit.data.encode.sequences import EncodedSequence

# Of a sequence without targets (`RowPart.facts`).
NO_TARGETS: dict[str, Any] = {"spoken": [], "talker": 0}


def find_row(sources: Sequence[Rows], row: str) -> tuple[int, int]:
    """The source and the index in it of `row`: an index over all sources, or a place such as `rows.jsonl:17`."""
    if row.isdecimal():
        index = int(row)
        for which, source in enumerate(sources):
            if index < len(source):
                return which, index
            index -= len(source)
        total = sum(len(source) for source in sources)
        raise UserError(f"--row {row}: the data has {total} rows, counted from 0")
    for which, source in enumerate(sources):
        for index in range(len(source)):
            if source.where(index) == row:
                return which, index
    example = sources[0].where(0)
    raise UserError(f"--row {row}: not found; give the row's index, or its place such as {example}")


def encoded_row(
    row_encoder: RowEncoder, source: Rows, index: int, row_format: RowFormat | str | None
) -> dict[str, Any]:
    """A row as the model sees it. Media are decoded too, so that a shown row is one that can be trained on."""
    facts: dict[str, Any] = {
        "where": source.where(index),
        "format": None,
        "bad": None,
        "sequences": [],
    }
    try:
        raw = source[index]
        facts["format"] = read_row(raw, row_format).format
        sequences = row_encoder.encode(raw, row_format, source.root)
        row_encoder.load(sequences, source.root, {})
    except BadRow as error:
        return {**facts, "bad": bad_reason(error)}
    sides = (1, -1) if len(sequences) == 2 else (0,)  # chosen and rejected, or a single one
    for sequence, side in zip(sequences, sides, strict=True):
        facts["sequences"].append(_sequence(row_encoder, sequence, side))
    return facts


def bad_reason(error: BadRow) -> dict[str, Any]:
    return {"reason": error.reason, "detail": error.detail}


def _sequence(row_encoder: RowEncoder, sequence: EncodedSequence, side: int) -> dict[str, Any]:
    media = []
    for info, (start, end) in zip(sequence.infos, sequence.spans, strict=True):
        item: dict[str, Any] = {"kind": info.kind}
        if info.kind != "audio":
            item |= {"width": info.width, "height": info.height}
        if info.kind == "video":
            item |= {"frames": info.num_frames}
        if info.kind != "image":
            item |= {"seconds": round(info.seconds, 3)}
        item |= {"tokens": end - start, "encoder": row_encoder.item_cost(info)}
        media.append(item)
    facts = {
        "side": side,
        "tokens": len(sequence.ids),
        "learnt": sum(sequence.loss[1:]),  # no token predicts the first one
        "media": media,
        "text": _segments(row_encoder, sequence),
        **NO_TARGETS,
    }
    if row_encoder.row_part is not None:
        facts |= row_encoder.row_part.facts(sequence)
    actions_shown = getattr(sequence, "actions_shown", None)  # of a frame of a LeRobot folder
    return facts if actions_shown is None else {**facts, **actions_shown()}


def _segments(row_encoder: RowEncoder, sequence: EncodedSequence) -> list[dict[str, Any]]:
    """The text in segments with loss, without loss, and of media, decoded from the token ids themselves."""
    media_index = np.full(len(sequence.ids), -1)
    for item, (start, end) in enumerate(sequence.spans):
        media_index[start:end] = item
    has_loss = [False, *sequence.loss[1:]]
    kinds = []
    for item, loss in zip(media_index.tolist(), has_loss, strict=True):
        kinds.append((item, bool(loss) and item < 0))
    changes = [i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]]
    tokenizer = row_encoder.media.tokenizer
    segments = list[dict[str, Any]]()
    decoded = ""
    for start, end in pairwise([0, *changes, len(kinds)] if kinds else [0]):
        # Decoded from the beginning each time: a segment decoded alone may lose its leading blank.
        text = tokenizer.decode(sequence.ids[:end], clean_up_tokenization_spaces=False)
        item, loss = kinds[start]
        if item >= 0:
            segments.append({"media": item})
        else:
            segments.append({"text": text[len(decoded) :], "learnt": loss})
        decoded = text
    return segments


def plain_row(row: Row) -> list[dict[str, Any]]:
    """The sequences of a row before any chat template, with the messages that have loss by default."""
    if row.rejected:
        return [_plain_sequence(row, 1), _plain_sequence(row, -1)]
    return [_plain_sequence(row, 0)]


def _plain_sequence(row: Row, side: int) -> dict[str, Any]:
    segments = list[dict[str, Any]]()
    media = list[dict[str, Any]]()
    if row.text is not None:
        segments.append({"text": row.text, "learnt": True})
    for message in row.rejected if side < 0 else row.messages:
        segments.append({"text": f"{message.role}: ", "learnt": False})
        has_loss = message.role == "assistant" if message.loss is None else message.loss
        for part in message.parts:
            if part.kind in MEDIA:
                segments.append({"media": len(media)})
                media.append({"kind": part.kind})
            else:
                segments.append({"text": part.value, "learnt": has_loss})
        if message.target is not None:
            segments.append({"media": len(media)})
            media.append({"kind": "speech"})
        calls = message.extra.get("tool_calls")
        if calls:
            segments.append({"text": f"{calls}", "learnt": has_loss})
        segments.append({"text": "\n", "learnt": False})
    facts: dict[str, Any] = {"side": side, "tokens": None, "learnt": None}
    return {**facts, "media": media, **NO_TARGETS, "text": segments}
