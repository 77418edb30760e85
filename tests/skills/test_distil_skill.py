"""The distil skill's check passes on the kit and fails on losses with common errors."""

import pytest
from conftest import ROOT

from mvp_engine.imports import import_file

check = import_file(ROOT / "skills" / "distil" / "check.py")
problems, KIT = check.problems, check.kit_loss


def kl_of(logits_TV, teacher_TV):
    log_p, log_q = logits_TV.log_softmax(-1), teacher_TV.log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def wrong_sign(logits_TV, teacher_TV, batch):
    loss_sum, weight = KIT(logits_TV, teacher_TV, batch)
    return -loss_sum, weight


def with_prompts(logits_TV, teacher_TV, batch):
    return kl_of(logits_TV, teacher_TV.detach()).sum(), batch.num_tokens


def trained_teacher(logits_TV, teacher_TV, batch):
    return kl_of(logits_TV, teacher_TV)[batch.labels != -100].sum(), batch.num_loss_tokens


def cross_entropy(logits_TV, teacher_TV, batch):
    terms_T = -(teacher_TV.detach().softmax(-1) * logits_TV.log_softmax(-1)).sum(-1)
    return terms_T[batch.labels != -100].sum(), batch.num_loss_tokens


def mean(logits_TV, teacher_TV, batch):
    loss_sum, weight = KIT(logits_TV, teacher_TV, batch)
    return loss_sum / weight, 1.0


def test_check_of_the_kit_passes():
    assert problems(KIT) == []


@pytest.mark.parametrize(
    "loss, said",
    [
        (wrong_sign, "does not bring the student closer"),
        (with_prompts, "tokens without a label"),
        (trained_teacher, "with respect to the teacher"),
        (cross_entropy, "not 0, where student and teacher agree"),
        (mean, "in two micro-batches"),
    ],
)
def test_check_of_a_wrong_loss_names_the_error(loss, said):
    assert any(said in problem for problem in problems(loss))
