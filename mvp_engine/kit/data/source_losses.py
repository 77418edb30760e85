"""The loss of each source of a batch, for the log."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE, PackedBatch


def source_losses(
    names: list[str], log_probs_T: Tensor, batch: PackedBatch
) -> dict[str, tuple[Any, Any]]:
    """The (summed loss, tokens) of each source by metric name; without a host sync."""
    source_T = batch.sequence_fields["source"].repeat_interleave(
        batch.lengths, output_size=batch.num_tokens
    )
    has_loss_T = (batch.labels != IGNORE).float()
    zeros = torch.zeros(len(names), device=has_loss_T.device)
    loss_T = -log_probs_T.detach().float() * has_loss_T
    sums = zeros.index_add(0, source_T, loss_T)
    weights = zeros.index_add(0, source_T, has_loss_T)
    return {f"loss_{name}": (sums[i], weights[i]) for i, name in enumerate(names)}
