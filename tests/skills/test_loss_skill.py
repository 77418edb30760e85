"""The check of the skill change-the-loss passes the kit and right losses, and names common errors of others."""

import pytest
from conftest import ROOT, run_process

from mvp_engine.imports import import_file
from mvp_engine.kit import TokenNormedLossKit

SKILL = "skills/change-the-loss/check.py"
FILE = """
import torch.nn.functional as F


def scores(model, batch):
    return model(batch, ["log_probs"])["log_probs"]


def mean(ctx, model, batch):
    return -scores(model, batch).sum() / batch.num_loss_tokens, 1.0


def dft(ctx, model, batch):
    log_p_T = scores(model, batch)
    return -(log_p_T.detach().exp() * log_p_T).sum(), batch.num_loss_tokens


def dft_without_detach(ctx, model, batch):
    log_p_T = scores(model, batch)
    return -(log_p_T.exp() * log_p_T).sum(), batch.num_loss_tokens


def all_tokens(ctx, model, batch):
    return -scores(model, batch).sum(), batch.num_tokens


def host_sync(ctx, model, batch):
    loss = -scores(model, batch).sum()
    if loss > 1e6:
        loss = 0 * loss
    return loss, batch.num_loss_tokens


def not_finite(ctx, model, batch):
    return (scores(model, batch) ** 0.5).sum(), batch.num_loss_tokens


def formula(logits, labels):
    nll = F.cross_entropy(logits, labels, reduction="none")
    return (-nll).detach().exp() * nll
"""


@pytest.fixture
def said(tmp_path):
    """said(LOSS, FORMULA=None): exit code and output of the check."""
    (tmp_path / "mine.py").write_text(FILE)

    def run(*names):
        return run_process(SKILL, *(f"{tmp_path}/mine.py:{name}" for name in names))

    return run


@pytest.mark.slow
def test_check_of_the_kit_and_of_a_loss_with_its_formula_passes(said):
    assert import_file(ROOT / SKILL).problems(TokenNormedLossKit()) == []
    code, output = said("dft", "formula")
    assert (code, output.strip()) == (0, "ok")


@pytest.mark.slow
@pytest.mark.parametrize(
    "names, expected",
    [
        (["mean"], "with micro-batches of at most 11 tokens the loss is"),
        (["all_tokens"], "its formula on full logits is"),
        (["dft"], "Without FORMULA it is the cross-entropy"),
        (["dft_without_detach", "formula"], "does one of them lack a detach()?"),
        (["host_sync"], "if loss > 1e6: reads the value of a tensor"),
        (["not_finite"], "the gradient is not finite"),
    ],
)
def test_check_of_a_broken_loss_names_the_error(said, names, expected):
    code, output = said(*names)
    assert code == 1
    assert expected in output
