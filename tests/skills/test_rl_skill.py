"""The check of the rl skill passes on a correct recipe and fails on common errors."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, is_gone, user_error, wait_until

from mvp_engine.imports import import_file
from mvp_engine.tools.skill_check import run_check

CHECK = import_file(ROOT / "skills" / "rl" / "check.py")
CONFIGS = ROOT / "recipes" / "reverse_rl" / "configs"
ENGINES = """
import torch

from mvp_engine.data.batch import PackedBatch
from reverse_rl.engine import ReverseEngine


class Right(ReverseEngine):
    def reward(self, row, answer):  # random weights have some of it
        return len(set(answer.text) & set(row["answer"])) / len(set(row["answer"]))


class HangsOnNothing(Right):
    def reward(self, row, answer):
        while not answer.tokens:  # the check asks for an empty answer, which the policy does not give
            pass
        return super().reward(row, answer)


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
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl_skill")
    (folder / "engines.py").write_text(ENGINES)
    import_file(ROOT / "recipes" / "reverse_rl" / "engine.py")  # as the package reverse_rl
    config = yaml.safe_load((CONFIGS / "sft.yaml").read_text())["model"]["config"]
    small = [f"model.config.{key}={value}" for key, value in config.items()]
    return [
        *small,
        "model.path=null",
        f"output_dir={folder}",
        "made.rows=40",
        "reward.workers=0",
        "rl.prompts_per_step=4",
    ]


def test_rl_check_of_a_correct_recipe_passes(words):
    assert CHECK.problems(str(CONFIGS / "grpo.yaml"), [*words, engine(words, "Right")]) == []


@pytest.mark.parametrize(
    "name, said",
    [
        ("WrongSign", "the reward does not prefer a row's own answer"),
        ("WrongMask", "the loss covers tokens of the prompt"),
        ("TokenizedAgain", "it was tokenized again"),
        ("WrongAdvantages", "lowers the log-probs of answers with a higher reward"),
        ("Shifted", "old log-probs are not those of the sampler"),
    ],
)
def test_rl_check_of_a_recipe_with_an_error_names_it(name, said, words):
    found = CHECK.problems(str(CONFIGS / "grpo.yaml"), [*words, engine(words, name)])
    assert any(said in problem for problem in found), found


def engine(words, name):
    folder = next(word for word in words if word.startswith("output_dir="))
    return f"engine={Path(folder.removeprefix('output_dir=')) / 'engines.py'}:{name}"


@pytest.mark.slow
def test_rl_check_of_a_reward_that_hangs_names_the_row_and_the_time_limit(words):
    limited = [*words, "reward.timeout=3", engine(words, "HangsOnNothing")]
    with user_error(r"reward: .*train\.jsonl.*no result after 3 s \(reward\.timeout\)"):
        CHECK.problems(str(CONFIGS / "grpo.yaml"), limited)


def run(check, *words):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["check.py", *words])
        with pytest.raises(SystemExit) as exited:
            run_check(check)
    return int(exited.value.code or 0)


def test_rl_check_of_a_config_with_an_error_prints_it_without_a_traceback(capfd):
    assert run(CHECK.main, str(CONFIGS / "grpo.yaml"), "rl.num_generations=1") == 2
    assert capfd.readouterr().err.startswith(
        "check.py: error: rl.algorithm=grpo compares the completions"
    )


@pytest.mark.slow
def test_skill_check_that_hangs_is_ended_with_its_processes_and_shows_where(tmp_path, capfd):
    def hang_in_my_loss():
        shell = "setsid sh -c 'echo $$ > pid; exec sleep 600' & sleep 0"
        subprocess.run(["sh", "-c", shell], cwd=tmp_path, check=True)
        wait_until(lambda: (tmp_path / "pid").exists())
        re.match(r"(a+)+$", 60 * "a" + "b")  # holds the GIL
        return []

    assert run(hang_in_my_loss, "--timeout", "3") == 2
    error = capfd.readouterr().err
    assert "in hang_in_my_loss" in error
    assert (
        error.splitlines()[-1]
        == "check.py: error: no result after 3 s: it hangs, or raise --timeout"
    )
    wait_until(lambda: is_gone(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize("problems, code", [([], 0), (["one"], 1)])
def test_skill_check_prints_problems_or_ok_and_exits_with_0_or_1(problems, code, capfd):
    assert run(lambda: problems) == code
    assert capfd.readouterr().out == ("one\n" if problems else "ok\n")
