"""Flow matching: noisy samples, velocities, Euler sampling and guidance, as plain functions of tensors.

The path is a straight line between a sample and noise: `x_t = t * noise + (1 - t) * clean`, with time 1 at the noise.
Its velocity is `noise - clean`. Nothing here draws random numbers: noise and times are arguments, because they are data
(`mvp_engine.kit.flow` draws them).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# (x, times (B,)) -> the velocity at x, of the same shape
Velocity = Callable[[Tensor, Tensor], Tensor]


def noisy_sample(clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """The point of the path at `times`, which has the leading dimensions of the sample."""
    t = times.view(*times.shape, *[1] * (clean.ndim - times.ndim)).to(clean.dtype)
    return t * noise + (1 - t) * clean


def target_velocity(clean: Tensor, noise: Tensor) -> Tensor:
    """The velocity of the path, which is the same at all times."""
    return noise - clean


def velocity_losses(
    predicted: Tensor, clean: Tensor, noise: Tensor, mask: Tensor | None = None
) -> Tensor:
    """The squared error of each entry, in float32; 0 where `mask` is False."""
    losses = (predicted.float() - target_velocity(clean, noise).float()).square()
    # where, not a multiplication: a masked entry must not turn an infinity into NaN.
    return losses if mask is None else torch.where(mask, losses, 0.0)


def euler_times(steps: int) -> list[float]:
    """The times at which Euler's method asks for velocities: from 1, in equal steps."""
    if steps < 1:
        raise ValueError(f"steps={steps}: Euler's method needs at least one step")
    return [1.0 - step / steps for step in range(steps)]


def euler_sample(velocity: Velocity, noise: Tensor, steps: int) -> Tensor:
    """Integrate from the noise at time 1 to a sample at time 0. `noise` has one entry per sample in dimension 0."""
    x = noise
    for time in euler_times(steps):
        times_B = torch.full((len(noise),), time, dtype=torch.float32, device=noise.device)
        x = x - velocity(x, times_B) / steps
    return x


def guided_velocity(with_condition: Tensor, without: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance: scale 1 is the conditional velocity, 0 the unconditional one, larger ones exceed it."""
    return without + scale * (with_condition - without)
