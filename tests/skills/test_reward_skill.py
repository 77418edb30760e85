"""The reward skill's check passes on the kit and fails on losses with common errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import ROOT

from mvp_engine.data.batch import PackedBatch
from mvp_engine.imports import import_file
from mvp_engine.kit import RewardLossKit

problems = import_file(ROOT / "skills" / "reward" / "check.py").problems
KIT = RewardLossKit()


def first_token(ctx, model, batch: PackedBatch):
    values_T = model(batch, ["values"])["values"]
    return KIT(ctx, lambda *_: {"values": values_T.roll(-1)}, batch)


def wrong_sign(ctx, model, batch: PackedBatch):
    values_T = -model(batch, ["values"])["values"]
    return KIT(ctx, lambda *_: {"values": values_T}, batch)


def mean(ctx, model, batch: PackedBatch):
    loss_sum, pairs = KIT(ctx, model, replace(batch))
    return loss_sum / pairs, 1.0


def test_check_of_the_kit_passes():
    assert problems(KIT) == []


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (first_token, "other tokens than the last"),
        (wrong_sign, "does not raise"),
        (mean, "in two micro-batches"),
    ],
)
def test_check_of_a_wrong_loss_names_the_error(loss, said):
    assert any(said in problem for problem in problems(loss))
