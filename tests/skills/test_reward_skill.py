"""The reward skill's check passes on the recipe and fails on losses with common errors."""

from dataclasses import replace

import pytest
from conftest import ROOT

from mvp_engine.imports import import_file

check = import_file(ROOT / "skills" / "reward" / "check.py")
problems = check.problems
ReviewsEngine = import_file(ROOT / "recipes" / "reward_model" / "engine.py").ReviewsEngine
BRADLEY_TERRY = check.loss_of(ReviewsEngine)


def first_token(ctx, model, batch):
    values_T = model(batch, ["values"])["values"]
    return BRADLEY_TERRY(ctx, lambda *_: {"values": values_T.roll(-1)}, batch)


def wrong_sign(ctx, model, batch):
    values_T = -model(batch, ["values"])["values"]
    return BRADLEY_TERRY(ctx, lambda *_: {"values": values_T}, batch)


def mean(ctx, model, batch):
    loss_sum, pairs = BRADLEY_TERRY(ctx, model, replace(batch))
    return loss_sum / pairs, 1.0


def test_check_of_the_recipe_passes():
    assert problems(ReviewsEngine) == []


@pytest.mark.parametrize(
    "loss, said",
    [
        (first_token, "other tokens than the last"),
        (wrong_sign, "does not raise"),
        (mean, "in two micro-batches"),
    ],
)
def test_check_of_a_wrong_loss_names_the_error(loss, said):
    assert any(said in problem for problem in problems(loss))
