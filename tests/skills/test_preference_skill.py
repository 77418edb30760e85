"""The preference skill's check passes on the recipe and fails on losses with common errors."""

import pytest
import torch
from conftest import ROOT

from mvp_engine.imports import import_file
from mvp_engine.kit.loss import sequence_log_probs
from mvp_engine.kit.preference import sigmoid_loss

check = import_file(ROOT / "skills" / "preference" / "check.py")
problems = check.problems
PairsEngine = import_file(ROOT / "recipes" / "preference" / "engine.py").PairsEngine
DPO = check.loss_of(PairsEngine)


def wrong_sign(ctx, model, batch, reference_S):
    batch.sequence_fields["side"] = -batch.sequence_fields["side"].roll(1)
    scores_S = sequence_log_probs(model(batch, [])["log_probs"], batch) - reference_S
    is_chosen_S = torch.arange(len(scores_S)) % 2 == 0
    return sigmoid_loss(0.1 * (scores_S.roll(-1) - scores_S))[is_chosen_S].sum(), is_chosen_S.sum()


def with_prompts(ctx, model, batch, reference_S):
    log_probs_T = model(batch, [])["log_probs"] * 1.0
    loss_sum, pairs = DPO(ctx, lambda *_: {"log_probs": log_probs_T}, batch, reference_S)
    return loss_sum + 0.1 * (log_probs_T - log_probs_T.detach()).sum(), pairs


def without_reference(ctx, model, batch, reference_S):
    return DPO(ctx, model, batch, None)


def mean(ctx, model, batch, reference_S):
    loss_sum, pairs = DPO(ctx, model, batch, reference_S)
    return loss_sum / pairs, 1.0


def swapped(margin_S):
    return sigmoid_loss(-0.1 * margin_S)


def test_check_of_the_recipe_passes_and_of_a_changed_engine_names_the_error():
    assert problems(PairsEngine) == []
    changed = type(
        "Changed", (PairsEngine,), {"pair_losses": lambda self, margin_S: swapped(margin_S)}
    )
    assert any("does not raise" in problem for problem in problems(changed))


@pytest.mark.parametrize(
    "loss, said",
    [
        (wrong_sign, "does not raise the log-probs of chosen answers"),
        (with_prompts, "gradient at prompt tokens"),
        (without_reference, "not ln 2"),
        (mean, "in two micro-batches"),
    ],
)
def test_check_of_a_wrong_loss_names_the_error(loss, said):
    assert any(said in problem for problem in problems(loss))
