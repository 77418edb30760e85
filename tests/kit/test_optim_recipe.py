"""The recipe of docs/optim.md as printed there: resume, EMA evaluation and export. The check script of the skill."""

import json
import re

import pytest
import torch
from conftest import ROOT, mvp, read_metrics
from safetensors.torch import load_file

from mvp_engine.checkpoint.format import Reader
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.imports import import_file
from mvp_engine.runs import list_runs


@pytest.fixture
def recipe(tmp_path):
    page = (ROOT / "docs" / "optim.md").read_text()
    for name, code in re.findall(
        r"`(count/[^`]+)`:\n\n```(?:python|yaml)\n(.*?)```", page, flags=re.DOTALL
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    return tmp_path / "count" / "train.yaml"


def last_checkpoint(folder):
    return Reader(list_runs(folder)[-1].checkpoint_list()[-1])


@pytest.mark.slow
def test_docs_recipe_resumed_and_resharded_gives_equal_losses_and_its_ema_is_evaluated_and_exported(
    train, ranks2, recipe, tmp_path, capsys
):
    options = (
        "log.interval=1 log.backends=[jsonl] checkpoint.interval=5 data.micro_batch_size=2".split()
    )
    options += ["train.max_steps=10", "eval.steps=5"]
    uninterrupted = tmp_path / "uninterrupted"
    resumed = tmp_path / "resumed"
    on_one_rank = tmp_path / "on_one_rank"
    shard = [*options, "parallel.shard=2"]
    assert ranks2.launch(recipe, *shard, f"output_dir={uninterrupted}") == [0, 0]
    middle = f"resume={list_runs(uninterrupted)[-1].checkpoint_list()[0]}"
    assert ranks2.launch(recipe, *shard, middle, f"output_dir={resumed}") == [0, 0]
    assert train(*options, middle, config=recipe, dir=on_one_rank) == 0
    records = read_metrics(uninterrupted)
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
    assert read_metrics(resumed)[-5:] == records[-5:]
    losses = [record["loss"] for record in records[-5:]]
    assert [record["loss"] for record in read_metrics(on_one_rank)[-5:]] == pytest.approx(
        losses, rel=1e-3
    )
    saved, again = last_checkpoint(uninterrupted), last_checkpoint(resumed)
    for name in saved.entries:
        if name.startswith(("model.", "optim.")):
            assert torch.equal(saved.read(name), again.read(name)), name
    kept = {name.rpartition(".")[2] for name in saved.entries if name.startswith("optim.")}
    assert {
        "momentum_codes",
        "momentum_scales",
        "exp_avg_codes",
        "exp_avg_sq_codes",
        "exp_avg",
        "ema",
    } < kept

    run = list_runs(uninterrupted)[-1].dir
    assert mvp(f"export --ema {run} {tmp_path}/out") == 0
    out = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(out[name], saved.read(f"optim.hf.{name}.ema"))
    assert not torch.equal(out[name], saved.read(f"model.hf.{name}"))
    # An evaluation during training and one of its checkpoint use the EMA weights, not the weights.
    evaluate = ["workflow=evaluate", f"resume={run}", "log.backends=[jsonl]"]
    assert train(*evaluate, config=recipe, dir=uninterrupted) == 0
    assert train(*evaluate, "optim.ema=null", config=recipe, dir=uninterrupted) == 0
    during_training = read_metrics(uninterrupted, "eval")[-1]["loss"]
    with_ema, without_ema = (
        json.loads(line)["loss"] for line in (run / "evaluate.jsonl").read_text().splitlines()
    )
    assert with_ema == pytest.approx(during_training, rel=1e-5)
    assert without_ema != pytest.approx(during_training, rel=1e-3)

    assert train("optim.ema=null train.max_steps=1", config=recipe, dir=tmp_path / "none") == 0
    capsys.readouterr()
    run = list_runs(tmp_path / "none")[-1].dir
    assert mvp(f"export --ema {run} {tmp_path}/never") == EXIT_USER_ERROR
    assert "has no averaged weights" in capsys.readouterr().err
    assert (
        train(f"workflow=evaluate resume={run}", config=recipe, dir=tmp_path / "no")
        == EXIT_USER_ERROR
    )
    assert "has no EMA weights: it was trained without optim.ema" in capsys.readouterr().err


class DecaysEverything(torch.optim.AdamW):
    """Decays all parameters, and ignores `found_inf` although it declares support for it."""

    def step(self, closure=None):
        self.found_inf = None
        super().step()


class UsesGenerator(torch.optim.SGD):
    """Draws from a random generator that no checkpoint saves."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad *= 1 + 0.01 * torch.rand(())
        super().step()


def test_skill_check_passes_the_kit_and_reports_broken_optimizers():
    check = import_file(ROOT / "skills" / "optim" / "check.py")
    for options in check.SETTINGS:
        assert check.problems(check.kit_optimizer(**options)) == [], options
    found = "\n".join(
        check.problems(lambda model: DecaysEverything(model.parameters(), 0.01, fused=True))
    )
    assert "norm.weight decays" in found
    assert "table.weight decays" in found
    assert "a step with found_inf set changes weights or state" in found
    found = "\n".join(check.problems(lambda model: UsesGenerator(model.parameters(), 0.1)))
    assert "do not equal 12 steps bit by bit" in found
    assert check.problems(lambda model: torch.optim.SGD(model.parameters(), 1e-9)) != []
