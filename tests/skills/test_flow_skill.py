"""The flow skill's check passes on the kit and fails on parts with common errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from torch import Tensor

from mvp_engine.imports import import_file
from mvp_engine.kit import flow

problems = import_file(ROOT / "skills" / "flow" / "check.py").problems


def with_part(name: str, part):
    names = ("draw", "noisy_sample", "velocity_losses", "euler_sample")
    return SimpleNamespace(**{**{one: getattr(flow, one) for one in names}, name: part})


def global_draw(seed: int, epoch: int, sample: int, shape: tuple[int, ...], draws: int):
    return flow.Draw(
        torch.randn(draws, *shape), torch.rand(draws), torch.ones(draws, dtype=torch.bool)
    )


def same_epochs(seed: int, epoch: int, sample: int, shape: tuple[int, ...], draws: int):
    return flow.draw(seed, 0, sample, shape, draws)


def mean_loss(predicted: Tensor, clean: Tensor, noise: Tensor) -> Tensor:
    return flow.velocity_losses(predicted, clean, noise).mean()


def wrong_way(velocity, noise: Tensor, steps: int) -> Tensor:
    return flow.euler_sample(lambda x, times: -velocity(x, times), noise, steps)


def test_check_of_the_kit_passes():
    assert problems(flow) == []


@pytest.mark.parametrize(
    ("name", "part", "said"),
    [
        ("draw", global_draw, "global generator"),
        ("draw", same_epochs, "do not depend on the epoch"),
        ("velocity_losses", mean_loss, "one value per entry"),
        ("euler_sample", wrong_way, "direction wrong"),
    ],
)
def test_check_of_a_wrong_part_names_the_error(name, part, said):
    assert any(said in problem for problem in problems(with_part(name, part)))
