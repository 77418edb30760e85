"""The recipe of docs/optim.md, word for word: resumed to the bit, its averages evaluated and out. The skill's check."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, read_metrics
from safetensors.torch import load_file

from mvp_engine.checkpoint.format import Reader
from mvp_engine.cli import main
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.imports import import_file
from mvp_engine.runs import list_runs


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    page = (ROOT / "docs" / "optim.md").read_text()
    for name, code in re.findall(r"`(count/[^`]+)`:\n\n```(?:python|yaml)\n(.*?)```", page, flags=re.DOTALL):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    return tmp_path / "count" / "train.yaml"


def last(folder: Path) -> Reader:
    return Reader(list_runs(folder)[-1].checkpoint_list()[-1])


def test_the_recipe_learns_and_its_averages_resume_to_the_bit_and_go_out(
    train, ranks2, recipe: Path, tmp_path: Path, capsys: Any
) -> None:
    words = ["log.interval=1", "log.backends=[jsonl]", "checkpoint.interval=10", "data.micro_batch_size=2"]
    straight, other, alone = (tmp_path / name for name in ("straight", "other", "alone"))
    shard = [*words, "parallel.shard=2"]
    assert ranks2.launch(recipe, *shard, f"project.dir={straight}") == [0, 0]
    middle = f"resume={list_runs(straight)[-1].checkpoint_list()[0]}"
    assert ranks2.launch(recipe, *shard, middle, f"project.dir={other}") == [0, 0]
    assert train(*words, middle, config=recipe, dir=alone) == 0
    records = read_metrics(straight)
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
    assert read_metrics(other)[-10:] == records[-10:]
    assert [r["loss"] for r in read_metrics(alone)[-10:]] == pytest.approx([r["loss"] for r in records[-10:]], rel=1e-3)
    saved, again = last(straight), last(other)
    for name in saved.entries:
        if name.startswith(("model.", "optim.")):
            assert torch.equal(saved.read(name), again.read(name)), name
    kept = {name.rpartition(".")[2] for name in saved.entries if name.startswith("optim.")}
    assert {"momentum_codes", "momentum_scales", "exp_avg_codes", "exp_avg_sq_codes", "exp_avg", "ema"} < kept

    run = list_runs(straight)[-1].dir
    assert main(["merge", "--ema", str(run), str(tmp_path / "out")]) == 0
    out = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(out[name], saved.read(f"optim.hf.{name}.ema"))
    assert not torch.equal(out[name], saved.read(f"model.hf.{name}"))
    # What a training evaluates is what its checkpoint's averages give, and not what its weights give.
    evaluate = ["workflow=evaluate", f"resume={run}", "log.backends=[jsonl]"]
    assert train(*evaluate, config=recipe, dir=straight) == 0
    assert train(*evaluate, "optim.ema=null", config=recipe, dir=straight) == 0
    inside = read_metrics(straight, "eval")[-1]["loss"]
    averages, weights = (json.loads(line)["loss"] for line in (run / "evaluate.jsonl").read_text().splitlines())
    assert averages == pytest.approx(inside, rel=1e-5)
    assert weights != pytest.approx(inside, rel=1e-3)

    assert train("optim.ema=null", "loop.total_steps=1", config=recipe, dir=tmp_path / "none") == 0
    capsys.readouterr()
    run = list_runs(tmp_path / "none")[-1].dir
    assert main(["merge", "--ema", str(run), str(tmp_path / "never")]) == EXIT_USER_ERROR
    assert "has no averaged weights" in capsys.readouterr().err
    assert train("workflow=evaluate", f"resume={run}", config=recipe, dir=tmp_path / "no") == EXIT_USER_ERROR
    assert "has no averaged weights: it was trained without optim.ema" in capsys.readouterr().err


def test_a_skipped_step_moves_no_average(train, recipe: Path, tmp_path: Path) -> None:
    engine = recipe.parent / "engine.py"
    bad = "loss, weight = self.loss(ctx, self.model, micro_batch)\n        "
    bad += 'return loss * (float("nan") if ctx.step == 3 and ctx.split == "train" else 1), weight'
    engine.write_text(engine.read_text().replace("return self.loss(ctx, self.model, micro_batch)", bad))
    words = ["checkpoint.interval=1", "loop.total_steps=4", "loop.eval_interval=null", "checkpoint.keep_n=null"]
    assert train(*words, config=recipe, dir=tmp_path / "run") == 0
    second, third, fourth = (Reader(path) for path in list_runs(tmp_path / "run")[-1].checkpoint_list()[1:])
    for name in (n for n in second.entries if n.startswith(("model.", "optim."))):
        assert torch.equal(second.read(name), third.read(name)), name
    name = "optim.hf.model.embed_tokens.weight.ema"
    assert not torch.equal(third.read(name), fourth.read(name))


class Everywhere(torch.optim.AdamW):
    """Decays all, and says that it skips when it does not."""

    def step(self, closure: Any = None) -> None:
        self.found_inf = None
        super().step()


class Dice(torch.optim.SGD):
    """Rounds by a generator whose state nobody saves."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad *= 1 + 0.01 * torch.rand(())
        super().step()


def test_the_skills_check_passes_the_kit_and_fails_broken_optimizers() -> None:
    check = import_file(ROOT / "skills" / "optim" / "check.py")
    for words in check.FORMS:
        assert check.problems(check.of_the_kit(**words)) == [], words
    found = "\n".join(check.problems(lambda model: Everywhere(model.parameters(), 0.01, fused=True)))
    assert "norm.weight decays" in found
    assert "table.weight decays" in found
    assert "leaves a trace" in found
    found = "\n".join(check.problems(lambda model: Dice(model.parameters(), 0.1)))
    assert "not 12 steps to the bit" in found
    assert check.problems(lambda model: torch.optim.SGD(model.parameters(), 1e-9)) != []
