"""Micro-batches of any size that are like those of a data kit, made from a few of its rows, without a packing plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.pack.plan import make_packs
from mvp_engine.kit.data.settings import MLLMData
from mvp_engine.kit.estimate.packs import MEDIA_SHARE, assumed_packs

FULL = 0.9  # of the tokens of a pack that counts as full


class SampledBatches:
    """Micro-batches by their number of tokens, without measuring all rows.

    The rows in them are few, and may have less media than most. The encoder work of more rows is measured.
    """

    def __init__(self, kit: MLLMDataKit, split: str = "train") -> None:
        self.sample = _without_values(kit.sample(split))
        self.costs = cache(lambda: kit.sample_costs(split))  # of no use without media
        # A choice asks for each size with many modes.
        self._batch = cache(lambda size: repeated(self.sample, size))
        self.heaviest = cache(self._heaviest)

    def __call__(self, size: int) -> PackedBatch:
        return self._batch(size)

    def _heaviest(self, size: int) -> float:
        """The encoder work of the heaviest of many packs of this size, as a multiple of that of `self(size)`."""
        costs = self.costs()
        tokens, encoder = costs[costs[:, 0] <= size].T
        of_batch = _media_share(self(size)) / (_media_share(self.sample) or 1.0)
        in_sample = int(np.searchsorted(np.cumsum(tokens), self.sample.num_tokens)) + 1
        density = of_batch * encoder[:in_sample].sum() / max(1, tokens[:in_sample].sum())
        if not density:
            return 1.0  # text
        shares = [float(encoder.sum() / tokens.sum())]
        for pack in make_packs(tokens, encoder, size):
            if tokens[pack].sum() >= FULL * size:  # not the last one
                shares.append(float(encoder[pack].sum() / tokens[pack].sum()))
        return max(shares) / density


def _media_share(batch: PackedBatch) -> float:
    """Values of media for each token."""
    return sum(media.values.numel() for media in batch.media.values()) / batch.num_tokens


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
