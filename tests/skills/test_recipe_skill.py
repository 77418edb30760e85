"""The check of the skill recipe-from-scratch passes a correct recipe and fails on common errors."""

import pytest
from conftest import ROOT

from mvp_engine.config import compose
from mvp_engine.imports import import_file

CHECK = import_file(ROOT / "skills" / "recipe-from-scratch" / "check.py")
CONFIG = str(ROOT / "recipes" / "digits_vlm" / "configs" / "train.yaml")
SMALL = [
    "text_config.num_hidden_layers=1",
    "vision_config.depth=1",
    "vision_config.deepstack_visual_indexes=[0]",
]
SMALL = [f"model.config.{key}" for key in SMALL]
SMALL += (
    "data.num_workers=0 digits.drawings=1 digits.count=40 data.global_batch_size=1 "
    "eval.generation.max_samples=4"
).split()
BROKEN = """
import torch

from digits_vlm.engine import DigitsEngine


class Blank(DigitsEngine):
    def export(self):
        torch.manual_seed(1)
        with torch.no_grad():
            for param in self.model.parameters():
                param.add_(0.02 * torch.randn_like(param))  # as if from another step
        return super().export()


class Bare(DigitsEngine):
    def before_train(self):
        super().before_train()
        if self.checkpoint is not None:  # differs from what was saved
            with torch.no_grad():
                next(self.model.parameters()).mul_(1.5)

    def export(self):
        folder = super().export()
        for file in [*folder.glob("*token*"), *folder.glob("*processor*"), *folder.glob("*.jinja")]:
            file.unlink()
        return folder
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    compose(CONFIG)  # makes its package importable
    return [*SMALL, f"digits.folder={tmp_path_factory.mktemp('digits') / 'data'}"]


@pytest.mark.slow
def test_check_of_a_correct_recipe_passes(small):
    assert CHECK.problems(CONFIG, small) == []


MEAN = """
from magic_transformer.engine import MagicEngine


class Mean(MagicEngine):
    def forward_step(self, ctx, micro_batch):
        loss_sum, weight = super().forward_step(ctx, micro_batch)
        return loss_sum / weight, 1
"""


def test_check_of_recipes_without_packs_passes_or_names_the_mean(tmp_path):
    magic = str(ROOT / "recipes" / "magic_transformer" / "configs" / "train.yaml")
    compose(magic)  # makes its package importable
    small = "data.global_batch_size=8 task.train_problems=100 task.eval_problems=10 model.layers=1".split()
    assert CHECK.problems(magic, small) == []
    (tmp_path / "mean.py").write_text(MEAN)
    [problem] = CHECK.problems(magic, [*small, f"engine={tmp_path / 'mean.py'}:Mean"])
    assert problem.startswith("forward_step does not return sums")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, more, expected",
    [
        ("Blank", [], ["the export differs from the trained model"]),
        (
            "Bare",
            ["eval.generation=null"],
            ["the export does not load", "a resumed training differs", "no metric of the task"],
        ),
    ],
)
def test_check_of_a_broken_engine_names_the_problem(small, tmp_path, name, more, expected):
    (tmp_path / "broken.py").write_text(BROKEN)
    found = CHECK.problems(CONFIG, [*small, *more, f"engine={tmp_path / 'broken.py'}:{name}"])
    assert len(found) == len(expected), found
    for words in expected:
        assert any(words in problem for problem in found), found


@pytest.mark.slow
def test_check_of_training_rows_in_the_eval_split_fails(small):
    folder = small[-1].partition("=")[2]
    source = f"path: {folder}/train_one.jsonl, name: one"
    sources = f"[{{{source}}},{{{source}, split: eval}}]"
    found = CHECK.problems(CONFIG, [*small, f"data.sources={sources}"])
    assert any("held-out rows of one are training rows" in problem for problem in found), found
