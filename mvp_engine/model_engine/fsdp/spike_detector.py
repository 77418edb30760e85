"""Detection of loss spikes, on the device."""

from __future__ import annotations

import torch
from torch import Tensor


class SpikeDetector:
    """Finds a loss that is far above the losses before it. Its inputs are the same on all ranks, so its answers are.

    It keeps a moving mean and variance of the losses that were accepted. A spike is not added to them; but after
    `PATIENCE` spikes in a row the loss has moved for good, and the statistics restart.
    """

    PATIENCE = 5
    WARMUP = 20  # losses before the first verdict
    MEMORY = 0.98  # of the moving mean

    def __init__(self, sigmas: float, device: torch.device) -> None:
        self.sigmas = sigmas
        # losses accepted, spikes in a row, mean, variance
        self.state = torch.zeros(4, dtype=torch.float64, device=device)

    def is_spike(self, loss: Tensor) -> Tensor:
        """Judge a loss and update the statistics. A non-finite loss is no spike and changes nothing."""
        accepted, in_a_row, mean, variance = self.state.unbind()
        above = loss - mean
        limit = self.sigmas * variance.sqrt() + 1e-3 * mean.abs()
        spike = loss.isfinite() & (accepted >= self.WARMUP) & (above > limit)
        weight = (1 / (accepted + 1)).clamp(min=1 - self.MEMORY)  # a plain mean at first
        new_mean = mean + weight * above
        new_variance = (1 - weight) * (variance + weight * above**2)
        zero = torch.zeros_like(in_a_row)
        if_accepted = torch.stack([accepted + 1, zero, new_mean, new_variance])
        if_spike = torch.stack([accepted, in_a_row + 1, mean, variance])
        restart = in_a_row + 1 >= self.PATIENCE
        if_spike = torch.where(restart, torch.zeros_like(self.state), if_spike)
        updated = torch.where(spike, if_spike, if_accepted)
        self.state = torch.where(loss.isfinite(), updated, self.state)
        return spike
