"""The check of the rl skill passes on a correct recipe and fails on common errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from mvp_engine.imports import import_file

CHECK: Any = import_file(ROOT / "skills" / "rl" / "check.py")
CONFIGS = ROOT / "recipes" / "reverse_rl" / "configs"
ENGINES = """
import torch

from mvp_engine.data.batch import PackedBatch
from reverse_rl.engine import ReverseEngine


class Right(ReverseEngine):
    def reward(self, row, answer):  # random weights have some of it
        return len(set(answer.text) & set(row["answer"])) / len(set(row["answer"]))


class WrongSign(Right):
    def reward(self, row, answer):
        return -super().reward(row, answer)


class WrongMask(Right):
    def train_pre_step(self, ctx):
        batch = ctx.micro_batches[0]
        batch.labels[:-1] = batch.input_ids[1:]


class TokenizedAgain(Right):
    def train_pre_step(self, ctx):
        batch = ctx.micro_batches[0]
        has_loss = batch.labels != -100
        old = batch.labels[has_loss].tolist()
        new = self.tokenizer.encode(self.tokenizer.decode(old), add_special_tokens=False)
        new = torch.tensor((new + old)[: len(old)])
        batch.input_ids[1:][has_loss[:-1]] = new
        batch.labels[has_loss] = new


class WrongAdvantages(Right):
    def train_pre_step(self, ctx):
        ctx.micro_batches[0].token_fields["advantages"].neg_()


class Shifted(Right):
    def train_pre_step(self, ctx):
        fields = ctx.micro_batches[0].token_fields
        fields["old_log_probs"] = fields["old_log_probs"].roll(1)
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("rl_skill")
    (folder / "engines.py").write_text(ENGINES)
    import_file(ROOT / "recipes" / "reverse_rl" / "engine.py")  # as the package reverse_rl
    config = yaml.safe_load((CONFIGS / "sft.yaml").read_text())["model"]["config"]
    small = [f"model.config.{key}={value}" for key, value in config.items()]
    return [*small, "model.path=null", f"project.dir={folder}", "made.rows=40", "reward.workers=0", "rl.prompts=4"]


def test_rl_check_of_a_correct_recipe_passes(words: list[str]) -> None:
    assert CHECK.problems(str(CONFIGS / "grpo.yaml"), [*words, engine(words, "Right")]) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("WrongSign", "the reward does not prefer a row's own answer"),
        ("WrongMask", "the loss covers tokens of the prompt"),
        ("TokenizedAgain", "it was tokenized again"),
        ("WrongAdvantages", "lowers the log-probs of answers with a higher reward"),
        ("Shifted", "old log-probs are not those of the sampler"),
    ],
)
def test_rl_check_of_a_recipe_with_an_error_names_it(name: str, said: str, words: list[str]) -> None:
    found = CHECK.problems(str(CONFIGS / "grpo.yaml"), [*words, engine(words, name)])
    assert any(said in problem for problem in found), found


def engine(words: list[str], name: str) -> str:
    folder = next(word for word in words if word.startswith("project.dir="))
    return f"engine={Path(folder.removeprefix('project.dir=')) / 'engines.py'}:{name}"


def test_rl_check_of_a_config_with_an_error_prints_it_without_a_traceback(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["check.py", str(CONFIGS / "grpo.yaml"), "rl.group=1"])
    with pytest.raises(SystemExit) as exited:
        CHECK.main()
    assert exited.value.code == 2
    assert capsys.readouterr().err.startswith("check.py: error: rl.algorithm=grpo compares the completions")
