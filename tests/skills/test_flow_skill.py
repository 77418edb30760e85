"""The flow skill's check passes on the kit and fails on parts with common errors."""

from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from mvp_engine.imports import import_file
from mvp_engine.kit import flow

problems = import_file(ROOT / "skills" / "flow" / "check.py").problems


def with_part(name, part):
    names = ("draw", "noisy_sample", "velocity_losses", "euler_sample")
    return SimpleNamespace(**{**{one: getattr(flow, one) for one in names}, name: part})


def global_draw(seed, epoch, sample, shape, draws):
    return flow.Draw(
        torch.randn(draws, *shape), torch.rand(draws), torch.ones(draws, dtype=torch.bool)
    )


def same_epochs(seed, epoch, sample, shape, draws):
    return flow.draw(seed, 0, sample, shape, draws)


def mean_loss(predicted, clean, noise):
    return flow.velocity_losses(predicted, clean, noise).mean()


def wrong_way(velocity, noise, steps):
    return flow.euler_sample(lambda x, times: -velocity(x, times), noise, steps)


def test_check_of_the_kit_passes():
    assert problems(flow) == []


@pytest.mark.parametrize(
    "name, part, said",
    [
        ("draw", global_draw, "global generator"),
        ("draw", same_epochs, "do not depend on the epoch"),
        ("velocity_losses", mean_loss, "one value per entry"),
        ("euler_sample", wrong_way, "direction wrong"),
    ],
)
def test_check_of_a_wrong_part_names_the_error(name, part, said):
    assert any(said in problem for problem in problems(with_part(name, part)))
