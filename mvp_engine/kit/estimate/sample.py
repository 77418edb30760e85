"""Micro-batches of any size that are like those of a data kit, made from a few of its rows, without a packing plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.settings import MLLMData
from mvp_engine.kit.estimate.packs import MEDIA_SHARE, assumed_packs


def sampled_batches(kit: MLLMDataKit, split: str = "train") -> Callable[[int], PackedBatch]:
    """Micro-batches by their number of tokens, without measuring all rows."""
    sample = _without_values(kit.sample(split))
    return cache(lambda size: repeated(sample, size))


def assumed_batches(
    model_config: Any, data: MLLMData, media_share: float = MEDIA_SHARE
) -> Callable[[int], PackedBatch]:
    """Full micro-batches of rows as long as the settings allow, where the data is not known."""

    row_tokens = data.row_tokens or data.pack_tokens

    def batch(tokens: int) -> PackedBatch:
        whole = max(row_tokens, tokens - tokens % row_tokens)
        sized = data.model_copy(update={"micro_batch_tokens": whole})
        return assumed_packs(model_config, sized, media_share).largest[0]

    return cache(batch)


def _without_values(batch: PackedBatch) -> PackedBatch:
    """The batch with media on the meta device: an estimate needs their shapes."""
    media = {name: replace(one, values=one.values.to("meta")) for name, one in batch.media.items()}
    return replace(batch, media=media)


def repeated(sample: PackedBatch, tokens: int) -> PackedBatch:
    """About `tokens` tokens of the sample, which is repeated or cut between rows."""
    copies, rest = divmod(tokens, sample.num_tokens)
    # Batches that hold the same Media object would share its items.
    batches = [
        replace(sample, media={name: replace(one) for name, one in sample.media.items()})
        for _ in range(copies)
    ]
    ends = np.cumsum(sample.host_lengths)
    rows = int(np.searchsorted(ends, rest, side="right"))
    if rows or not batches:
        batches.append(sample.select(list(range(max(1, rows)))))
    return PackedBatch.concat(batches)
