"""The preference skill's check passes on the kit and fails on losses with common errors."""

from __future__ import annotations

import pytest
import torch
from conftest import ROOT
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.imports import import_file
from mvp_engine.kit import PreferenceLossKit
from mvp_engine.kit.loss import sequence_log_probs

problems = import_file(ROOT / "skills" / "preference" / "check.py").problems
KIT = PreferenceLossKit()


def wrong_sign(ctx, model, batch: PackedBatch, reference_S: Tensor):
    batch.sequence_fields["side"] = -batch.sequence_fields["side"].roll(1)
    scores_S = sequence_log_probs(model(batch, [])["log_probs"], batch) - reference_S
    is_chosen_S = torch.arange(len(scores_S)) % 2 == 0
    return KIT.pair_losses(scores_S.roll(-1) - scores_S)[is_chosen_S].sum(), is_chosen_S.sum()


def with_prompts(ctx, model, batch: PackedBatch, reference_S: Tensor):
    log_probs_T = model(batch, [])["log_probs"] * 1.0
    loss_sum, pairs = KIT(ctx, lambda *_: {"log_probs": log_probs_T}, batch, reference_S)
    return loss_sum + 0.1 * (log_probs_T - log_probs_T.detach()).sum(), pairs


def without_reference(ctx, model, batch: PackedBatch, reference_S: Tensor):
    return KIT(ctx, model, batch, None)


def mean(ctx, model, batch: PackedBatch, reference_S: Tensor):
    loss_sum, pairs = KIT(ctx, model, batch, reference_S)
    return loss_sum / pairs, 1.0


def test_check_of_the_kit_passes():
    assert problems(KIT) == []


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (wrong_sign, "does not raise the log-probs of chosen answers"),
        (with_prompts, "gradient at prompt tokens"),
        (without_reference, "not ln 2"),
        (mean, "in two micro-batches"),
    ],
)
def test_check_of_a_wrong_loss_names_the_error(loss, said):
    assert any(said in problem for problem in problems(loss))
