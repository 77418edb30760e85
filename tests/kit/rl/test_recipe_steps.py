"""The step of the RL recipes: as that of RLEngine, a loss for other processes, and the changes of docs/rl.md."""

from __future__ import annotations

import pickle
import re
import shutil
import subprocess
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, read_metrics
from test_policy_loss import alone, engines_on, fields, packed, step

from mvp_engine.checkpoint.format import Reader
from mvp_engine.config import compose
from mvp_engine.imports import import_file
from mvp_engine.kit.rl import (
    ALGORITHMS,
    PolicyLoss,
    RLEngine,
    Updates,
    reinforce_pp,
    token_rewards,
)
from mvp_engine.launch import launch
from mvp_engine.runs import list_runs

RECIPES = {"reverse_rl": "ReverseEngine", "digits_rl": "DigitsEngine"}
OPTIONS = [
    "",
    "rl.kl_coef=0.1 rl.entropy=0.01",
    "rl.kl_coef=0.1 rl.clip=[0.1,0.3]",
]
OPTIONS += ["rl.correction={} rl.clip=[0.2,0.2,6]"]


def engine_class(name):
    return getattr(import_file(ROOT / "recipes" / name / "engine.py"), RECIPES[name])


def config_of(name, *words):
    return compose(
        ROOT / "recipes" / name / "configs" / "grpo.yaml", ["model.path=x", *words]
    ).config


def batch_of(config):
    """Sequences of three prompts, with every field that a step has."""
    batch = packed([0, 1, 2, 3, 5], fields())
    batch.sequence_fields["group"] = torch.tensor([0, 0, 0, 1, 1])
    batch.sequence_fields["source"] = torch.tensor([0, 0, 0, 0, 0])
    batch.sequence_fields["baseline"] = torch.tensor([0.5, 0.5, 0.5, 0.75, 0.75])
    batch.sequence_fields["reward"] = torch.tensor([1.0, 0.0, 0.5, 0.25, 1.0], dtype=torch.float64)
    batch.token_fields["old_values"] = batch.token_fields["reference_log_probs"] / 7
    if config.rl.correction is None:
        del batch.token_fields["importance"]
    if not config.rl.kl_coef:
        del batch.token_fields["reference_log_probs"]
    return batch


def default_step(engine, batch):
    """The batch and the loss that `RLEngine.train_step` hands to the update."""
    found = {}

    def update(ctx, batch, policy_loss, value_loss):
        found.update(fields=batch.token_fields, loss=policy_loss, value_loss=value_loss)
        return Updates()

    engine.prepare_batch = lambda ctx, experience: batch
    engine.update = update
    engine._is_distillation = False
    engine.gamma = getattr(engine, "gamma", RLEngine.gamma)
    engine._policy_loss = partial(RLEngine._policy_loss, engine)
    RLEngine.train_step(engine, SimpleNamespace(), SimpleNamespace())
    return found


def assert_equal_with_nan(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ratio_to", ["old", "sampler"])
@pytest.mark.parametrize(
    "name, algorithm",
    [("reverse_rl", name) for name in ALGORITHMS if ALGORITHMS[name].advantages != "teacher"]
    + [("digits_rl", name) for name in ("grpo", "dapo", "dr_grpo")],
)
def test_recipe_step_has_the_advantages_and_losses_of_rl_engine(name, algorithm, ratio_to):
    policy, _ = engines_on(alone())
    for words in OPTIONS:
        if "clip=[0.2,0.2,6]" in words and algorithm in ("cispo", "gmpo", "sapo"):
            continue
        if "clip" in words and algorithm == "sapo":
            continue
        if "correction" in words and ratio_to == "sampler":  # no such step
            continue
        if name == "digits_rl":  # its loss has neither
            words = re.sub(r"rl\.entropy=\S+|,6(?=])", "", words)
        config = config_of(name, f"rl.algorithm={algorithm}", "rl.clip=null", *words.split())
        engine: Any = SimpleNamespace(config=config, ratio_to=lambda _: ratio_to)
        wanted = default_step(engine, batch_of(config))
        recipe = engine_class(name)
        batch = batch_of(config)
        advantages = recipe.advantages(engine, batch)
        batch.token_fields |= (
            advantages if isinstance(advantages, dict) else {"advantages": advantages}
        )
        for field, values in wanted["fields"].items():
            assert_equal_with_nan(batch.token_fields[field], values)
        assert wanted["loss"] == PolicyLoss.of(config, ratio_to)
        loss = partial(recipe.policy_loss, config, ratio_to)
        one, two = step(policy, wanted["loss"], [batch]), step(policy, loss, [batch])
        assert one[0] == two[0], words
        assert one[2] == two[2], words
        assert all(torch.equal(one[1][name], two[1][name]) for name in one[1]), words


def test_recipe_loss_is_sent_to_processes_by_its_name():
    engine = engine_class("reverse_rl")
    sent = pickle.dumps(partial(engine.policy_loss, config_of("reverse_rl"), "old"))
    assert b"ReverseEngine.policy_loss" in sent
    assert pickle.loads(sent).func is engine.policy_loss


# A reward that a random policy gets, and what the advantages of a step are.
MINE = """
from .engine import ReverseEngine


class Mine(ReverseEngine):
    def reward(self, row, answer):
        return 1.0 if row["answer"][0] in "13579" else len(set(answer.tokens)) / 100

    def train_pre_step(self, ctx):
        batch = ctx.micro_batches[0]
        ctx.log("trained_prompts", len(batch.sequence_fields["group"].unique()), 1)
        first_T = batch.cu_seqlens[1:] - 2  # the last label of each sequence
        ctx.log("deviation", batch.token_fields["advantages"][first_T].std(), 1)
"""


@pytest.mark.slow
def test_docs_changes_to_the_step_apply_to_the_recipe_and_train(tmp_path):
    page = (ROOT / "docs" / "rl.md").read_text().partition("## Changes to the step")[2]
    diffs = re.findall(r"```diff\n(.*?)```", page.partition("\n## ")[0], flags=re.DOTALL)
    assert len(diffs) == 4
    sizes = yaml.safe_load((ROOT / "recipes/reverse_rl/configs/sft.yaml").read_text())["model"][
        "config"
    ]
    words = [f"model.config.{key}={value}" for key, value in sizes.items()]
    words += f"model.path=null made.rows=40 made.folder={tmp_path}/data reward.workers=0".split()
    words += "rl.prompts_per_step=6 rl.num_generations=4 rl.updates=2 train.max_steps=2".split()
    words += "eval.steps=null export_link=null optim.lr=1e-2 optim.warmup=0".split()
    records = []
    for number, diff in enumerate(["", *diffs]):
        assert len(diff.splitlines()) <= 25
        folder = tmp_path / f"change_{number}"
        shutil.copytree(ROOT / "recipes" / "reverse_rl", folder)
        if diff:
            subprocess.run(["git", "apply"], cwd=folder, input=diff.encode(), check=True)
            engine = (folder / "engine.py").read_text()
            (folder / "engine.py").write_text(engine.replace("ctx.step % 20", "ctx.step % 1"))
        (folder / "mine.py").write_text(MINE)
        own = [
            f"engine={folder}/mine.py:Mine",
            f"output_dir={folder}/out",
            "log.backends=[jsonl]",
            "log.interval=1",
            f"rl.kl_coef={1.0 if 'kl_coef' in diff else 0.0}",
        ]
        assert launch(str(folder / "configs" / "grpo.yaml"), [*words, *own]) == 0
        records.append(read_metrics(folder / "out"))
    plain, penalty, deviation, filtered, annealed = records
    assert "kl_old" not in plain[0]
    assert penalty[0]["kl_old"] > 0
    assert penalty[0]["grad_norm"] != plain[0]["grad_norm"]
    assert deviation[0]["deviation"] == pytest.approx(1, abs=0.01)
    assert plain[0]["deviation"] != pytest.approx(1, abs=0.05)
    assert plain[0]["trained_prompts"] == 6
    assert 0 < filtered[0]["trained_prompts"] == 6 * filtered[0]["kept_prompts"] < 6
    assert "kl" not in plain[0]
    assert annealed[0]["kl"] > 0
    checkpoint = list_runs(folder / "out")[-1].checkpoint_list()[-1]
    actor, reference = (Reader(checkpoint / name) for name in ("actor", "reference"))
    names = [name for name in reference.entries if name.startswith("model.")]
    assert names
    assert all(torch.equal(actor.read(name), reference.read(name)) for name in names)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_step_discounts_what_comes_after_a_token_by_gamma_of_the_engine(gamma):
    config = config_of("reverse_rl", "rl.algorithm=reinforce_pp")
    engine: Any = SimpleNamespace(config=config, ratio_to=lambda _: "old", gamma=gamma)
    batch = batch_of(config)
    rewards_T = token_rewards(batch.sequence_fields["reward"], batch)
    wanted_T = reinforce_pp(rewards_T, batch, gamma)
    assert torch.equal(default_step(engine, batch)["fields"]["advantages"], wanted_T)
