"""The contrastive skill's check passes on the kit and fails on losses with common errors."""

import pytest
from conftest import ROOT

from mvp_engine.imports import import_file
from mvp_engine.kit.preference import siglip

check = import_file(ROOT / "skills" / "contrastive" / "check.py")
problems, KIT = check.problems, check.kit_loss


def mean(views_B2D):
    return KIT(views_B2D).mean()


def no_negatives(views_B2D):
    return 1 - (views_B2D[:, 0] * views_B2D[:, 1]).sum(-1)


def wrong_sign(views_B2D):
    return -KIT(views_B2D)


def siglip_loss(views_B2D):
    return siglip(views_B2D[:, 0] @ views_B2D[:, 1].T / 0.3 - 1)


@pytest.mark.parametrize("loss", [KIT, siglip_loss])
def test_check_of_the_kit_passes(loss):
    assert problems(loss) == []


@pytest.mark.parametrize(
    "loss, said",
    [(mean, "no mean"), (no_negatives, "no negatives"), (wrong_sign, "does not lower the loss")],
)
def test_check_of_a_wrong_loss_names_the_error(loss, said):
    assert any(said in problem for problem in problems(loss))
