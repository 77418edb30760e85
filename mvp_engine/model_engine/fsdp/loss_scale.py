"""The loss scale of fp16 training, on the device."""

from __future__ import annotations

import torch
from torch import Tensor


class LossScale:
    """fp16's dynamic loss scale: halved on overflow, doubled after `interval` good steps.

    It multiplies a *sum* over hundreds to many thousands of tokens, so it starts low and may have to go below 1.
    """

    LOWEST = 2.0**-24

    def __init__(self, device: torch.device, start: float = 2.0**6, interval: int = 2000) -> None:
        self.value = torch.tensor(start, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.interval = interval

    def update(self, overflow: Tensor) -> None:
        self.good_steps = torch.where(overflow, 0, self.good_steps + 1)
        grow = self.good_steps >= self.interval
        halved = (self.value / 2).clamp(min=self.LOWEST)
        grown = torch.where(grow, self.value * 2, self.value)
        self.value = torch.where(overflow, halved, grown)
        self.good_steps = torch.where(grow, 0, self.good_steps)

    def state(self) -> list[float]:
        return [float(self.value), int(self.good_steps)]

    def load_state(self, state: list[float]) -> None:
        self.value.fill_(state[0])
        self.good_steps.fill_(int(state[1]))
