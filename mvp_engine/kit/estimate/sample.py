"""Micro-batches of any size that are like those of a data kit, made from a few of its rows, without a packing plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.pack.mixture import Mixture
from mvp_engine.kit.data.pack.packs import PackDataset
from mvp_engine.kit.data.settings import MLLMData
from mvp_engine.kit.estimate.packs import MEDIA_SHARE, assumed_packs

SAMPLED_TOKENS = 16384  # of the rows that are read
SAMPLED_ROWS = 256  # at most


def sampled_batches(kit: MLLMDataKit, split: str = "train") -> Callable[[int], PackedBatch]:
    """Micro-batches by their number of tokens. Rows without media are not read: their lengths are measured already."""
    mixture, costs = kit.measured(split)
    order = mixture.order(0, 0)
    first = np.cumsum([0, *(len(source) for source in mixture.sources)])
    ids = first[order[:, 0]] + order[:, 1]
    tokens = np.concatenate([cost.tokens for cost in costs])[ids]
    encoder = np.concatenate([cost.encoder for cost in costs])[ids]
    good = np.flatnonzero(tokens > 0)
    fitting = np.searchsorted(np.cumsum(tokens[good]), SAMPLED_TOKENS) + 1
    chosen = good[: min(fitting, SAMPLED_ROWS)]
    if encoder[good].any():
        rows = _Rows(mixture, order[chosen])
        budget = int(tokens[chosen].sum())
        dataset = PackDataset(
            rows,  # type: ignore[arg-type]
            kit.row_formats(split),
            costs,
            kit.row_encoder,
            budget=budget,
            packs_per_step=1,
            shuffle=False,
        )
        sample = _without_values(dataset[0][0])
    else:
        lengths = tokens[chosen].tolist()
        ids_of_rows = [torch.zeros(length, dtype=torch.long) for length in lengths]
        sample = PackedBatch.from_sequences(ids_of_rows)
    return cache(lambda size: _repeated(sample, size))


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


class _Rows:
    """Some rows of a mixture, in their order."""

    def __init__(self, mixture: Mixture, order: np.ndarray) -> None:
        self.names = mixture.names
        self.sources = mixture.sources
        self._order = order

    def order(self, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
        return self._order


def _without_values(batch: PackedBatch) -> PackedBatch:
    """The batch with media on the meta device: an estimate needs their shapes."""
    media = {name: replace(one, values=one.values.to("meta")) for name, one in batch.media.items()}
    return replace(batch, media=media)


def _repeated(sample: PackedBatch, tokens: int) -> PackedBatch:
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
