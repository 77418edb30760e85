"""Flow matching for recipes: draws of noise and time as data, velocity loss, Euler sampling, guidance.

Noise and times are data. They are drawn in the loader's worker from (seed, epoch, sample id), so a training step is a
function of its batch: ranks, micro-batches, workers and resumes do not change what is learnt.

    draw = flow.draw(seed, epoch, index, shape=(64,), draws=4)     # in the dataset
    x = flow.noisy_sample(clean, noise, times)                     # in forward_step
    loss = flow.velocity_losses(model(x, times), clean, noise).sum()
    images = flow.euler_sample(velocity, noise, steps=20)          # in evaluations
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mvp_engine.data.loader import derived_seed
from mvp_engine.errors import UserError
from mvp_engine.kit.flow import Flow, FlowTimes


class Draw(NamedTuple):
    """The random numbers of one sample in one epoch."""

    noise: Tensor  # (N, *shape) float32, standard normal
    times: Tensor  # (N,) float32
    keep: Tensor  # (N,) bool: draws that keep their condition


def draw(
    seed: int,
    epoch: int,
    sample: int,
    shape: tuple[int, ...],
    draws: int = 1,
    times: FlowTimes | None = None,
    drop_condition: float = 0.0,
) -> Draw:
    """`draws` of noise and time for one sample: a function of (seed, epoch, sample id) and nothing else."""
    generator = torch.Generator().manual_seed(derived_seed("flow", seed, epoch, sample))
    noise = torch.randn(draws, *shape, generator=generator)
    drawn = _times(times or FlowTimes(), draws, generator)
    keep = torch.rand(draws, generator=generator) >= drop_condition
    return Draw(noise, drawn, keep)


def start_noise(seed: int, samples: list[int] | range, shape: tuple[int, ...]) -> Tensor:
    """Noise (B, *shape) to generate from: each sample has its own, whatever the others of its batch are."""
    return torch.cat([draw(seed, -1, sample, shape).noise for sample in samples])


def _times(settings: FlowTimes, count: int, generator: torch.Generator) -> Tensor:
    if settings.scale + settings.offset > 1.0 + 1e-6:
        raise UserError(
            f"times: scale={settings.scale} + offset={settings.offset} is above 1, and noise is at time 1: "
            "set scale to at most 1 - offset"
        )
    if settings.kind == "uniform":
        t = torch.rand(count, generator=generator)
    elif settings.kind == "logit_normal":
        t = torch.randn(count, generator=generator).sigmoid()
    else:
        # Of two gamma variates, g / (g + h) is a beta variate. torch's Beta has no generator argument.
        shapes = torch.tensor([settings.alpha, settings.beta]).expand(count, 2).contiguous()
        g = torch._standard_gamma(shapes, generator=generator)
        t = g[:, 0] / g.sum(1)
    return t * settings.scale + settings.offset


def times_of_config(config: Any) -> FlowTimes:
    """The distribution of times that the config of a pi0 folder names."""
    return FlowTimes(
        kind="beta",
        alpha=config.time_sampling_beta_alpha,
        beta=config.time_sampling_beta_beta,
        scale=config.time_sampling_scale,
        offset=config.time_sampling_offset,
    )


class FlowDataset(Dataset[dict[str, Tensor]]):
    """Samples with their conditions and this epoch's draws, as a `SampleLoader` reads them.

    `items[i]` is a dict with `clean`, the tensor to generate, and whatever the recipe needs. To it come `noise` (N,
    *shape), `times` (N,) and `keep` (N,).
    """

    def __init__(self, items: list[dict[str, Tensor]], settings: Flow, seed: int) -> None:
        self.items = items
        self.settings = settings
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = self.items[index]
        settings = self.settings
        shape = tuple(item["clean"].shape)
        drawn = draw(
            self.seed,
            self.epoch,
            index,
            shape,
            settings.draws,
            settings.times,
            settings.drop_condition,
        )
        return {**item, **drawn._asdict()}
