"""Check the parts of flow matching: draws as data, the loss by entry, a sampler that ends at the sample.

check.py [FILE.py:NAME]        # see SKILL.md
"""

from __future__ import annotations

from typing import Any

import torch

from mvp_engine.kit import flow
from mvp_engine.tools.skill_check import check_loss

SHAPE = (3, 4)
DRAWS = 64


def problems(parts: Any) -> list[str]:
    """The problems of an object with `draw`, `noisy_sample`, `velocity_losses` and `euler_sample`."""
    return [*_problems_of_draws(parts), *_problems_of_path(parts)]


def _problems_of_draws(parts: Any) -> list[str]:
    def drawn(seed: int = 0, epoch: int = 0, sample: int = 0) -> Any:
        return parts.draw(seed, epoch, sample, SHAPE, DRAWS)

    found = []
    torch.manual_seed(0)
    first = drawn()
    torch.manual_seed(1)  # another rank, or a resumed process
    second = drawn()
    if not (torch.equal(first.noise, second.noise) and torch.equal(first.times, second.times)):
        found.append("draws depend on the global generator: ranks and resumes would train on another loss")
    for name, other in {"seed": drawn(seed=1), "epoch": drawn(epoch=1), "sample": drawn(sample=1)}.items():
        if torch.equal(first.noise, other.noise) or torch.equal(first.times, other.times):
            found.append(f"draws do not depend on the {name}")
    times = torch.cat([drawn(sample=sample).times for sample in range(20)])
    if not bool(((times > 0) & (times <= 1)).all()):
        found.append("times lie outside of (0, 1]")
    return found


def _problems_of_path(parts: Any) -> list[str]:
    found = []
    g = torch.Generator().manual_seed(0)
    clean = torch.randn(5, *SHAPE, generator=g)
    noise = torch.randn(5, *SHAPE, generator=g)
    for time, wanted in ((0.0, clean), (1.0, noise)):
        if not torch.allclose(parts.noisy_sample(clean, noise, torch.full((5,), time)), wanted, atol=1e-5):
            found.append(f"the noisy sample at time {time:g} is not the {'sample' if time == 0 else 'noise'}")
    losses = parts.velocity_losses(noise - clean, clean, noise)
    if losses.shape != clean.shape:
        shape = tuple(losses.shape)
        return [*found, f"the loss of {tuple(clean.shape)} entries has the shape {shape}: return one value per entry"]
    if float(losses.abs().max()) > 1e-6:
        found.append("the true velocity, noise - clean, has a loss")
    if float(parts.velocity_losses(clean - noise, clean, noise).min()) < 0:
        found.append("the loss of a wrong velocity is negative")
    sampled = parts.euler_sample(lambda x, times: noise - clean, noise, 8)
    if not torch.allclose(sampled, clean, atol=1e-4):
        found.append("the sampler with the true velocity does not end at the sample: is its direction wrong?")
    return found


if __name__ == "__main__":
    check_loss(problems, flow)
