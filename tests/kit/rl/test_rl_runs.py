"""Rewards, rollouts.jsonl, report and `mvp check` in whole runs of an RL engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from conftest import CAMPAIGN, mvp, wait_until
from run_files import printed_json
from templates.tiny import tokenizer
from test_rewards import Limit
from tiny_rl import write_recipe
from tiny_vlm import TEXT

from mvp_engine.distributed import world
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.kit.rl import RLEngine, episodes
from mvp_engine.kit.rl.rollout_log import read_rollouts
from mvp_engine.report.facts import RunFacts
from mvp_engine.runs import Run, list_runs
from mvp_engine.tools.merge import model_checkpoint

LENGTH = "return len(set(answer.tokens)) / 4"


def trained(config, *words, code=0):
    """The folder of the newest run after a training."""
    assert mvp(f"train {config}", *words) == code
    return list_runs(Path(config).parent / "outputs")[-1].dir


def records(folder, split="train"):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["split"] == split]


FAILING = {
    "raises": "assert row['answer'] != '3', 'no threes'",
    "hangs": "import pathlib, time\nif row['answer'] == '3': pathlib.Path('HANGS').touch(); time.sleep(600)",
    "nan": "if row['answer'] == '3': return float('nan')",
    "dies": "import os\nif row['answer'] == '3': os._exit(3)",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["hangs", *(pytest.param(kind, marks=CAMPAIGN) for kind in ("raises", "nan", "dies"))],
)
def test_rl_run_with_a_reward_that_fails_continues_and_names_the_row(
    tmp_path, capfd, kind, monkeypatch
):
    limit = Limit(tmp_path / "hangs")
    monkeypatch.setattr(episodes, "time", limit)
    config = write_recipe(tmp_path, f"{FAILING[kind].replace('HANGS', str(limit.file))}\n{LENGTH}")
    folder = trained(config, "reward.timeout=0.5", "reward.workers=1")
    assert sum(record["reward_errors"] for record in records(folder)) == pytest.approx(2 / 8)
    assert "reward failed: rows.jsonl:4 (source rows), answer " in capfd.readouterr().err
    completions = [
        one for record in read_rollouts(folder / "rollouts.jsonl") for one in record["completions"]
    ]
    assert len(completions) == 2 * 4 * 2  # none is lost, none is counted twice
    assert [one["reward"] for one in completions if "error" in one] == [None, None]


@CAMPAIGN
@pytest.mark.parametrize("where", ["spawn", "ray"])
def test_rl_run_on_more_ranks_than_prompts_trains_every_prompt_that_fits_once(
    tmp_path: Path, where: str
) -> None:
    """One prompt per step on two ranks, and a prompt over the budget."""
    if where == "ray":
        pytest.importorskip("ray")
    config = write_recipe(tmp_path, LENGTH)
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "long " * 300, "answer": "long"}) + "\n")
    words = ["rl.prompts_per_step=1", "train.max_steps=8"]
    words += [
        f"workers.where={where}",
        "groups.actor={ranks: 2, parallel: {shard: 2}}",
        "data.overlong=drop",
    ]
    folder = trained(config, *words)
    rollouts = [one for one in read_rollouts(folder / "rollouts.jsonl") if one["split"] == "train"]
    assert sorted(one["columns"]["answer"] for one in rollouts) == [str(i) for i in range(8)]
    assert all(len(one["completions"]) == 2 for one in rollouts)
    assert sum(record["skipped"] for record in records(folder)) == 0
    assert "rows.jsonl:9" in (folder / "overlong_rows.jsonl").read_text()


@pytest.mark.slow
def test_rl_run_reward_error_that_may_not_happen_exits_with_the_traceback(tmp_path, capfd):
    config = write_recipe(tmp_path, f"{FAILING['raises']}\n{LENGTH}")
    trained(config, "reward.max_errors=0", code=EXIT_USER_ERROR)
    error = capfd.readouterr().err
    assert "rows.jsonl:4 (source rows)" in error
    assert "AssertionError: no threes" in error
    assert "engine.py" in error


@pytest.mark.slow
def test_rl_run_resumed_has_the_rollouts_and_metrics_of_one_run(tmp_path):
    config = write_recipe(
        tmp_path, f"import random\nreturn random.random() + {LENGTH.removeprefix('return ')}"
    )
    words = "checkpoint.interval=1 eval.steps=2 eval.samples=2".split()
    whole = trained(config, *words, "train.max_steps=4", "run_id=whole")
    trained(config, *words, "train.max_steps=2", "run_id=two")
    with open(tmp_path / "outputs" / "two" / "rollouts.jsonl", "a") as file:
        file.write('{"step": 3, "split": "train"')  # as a kill leaves it
    two = tmp_path / "outputs" / "two"
    trained(config, *words, "train.max_steps=4", f"resume={two}")
    assert (two / "rollouts.jsonl").read_text() == (whole / "rollouts.jsonl").read_text()
    assert {"pass@1", "pass@2", "reward"} <= records(whole, "eval")[0].keys()
    steps = [(one["step"], one["split"]) for one in read_rollouts(whole / "rollouts.jsonl")]
    assert steps.count((2, "eval")) == 8
    assert steps.count((2, "train")) == 4


@pytest.mark.slow
def test_rl_run_several_steps_ahead_trains_each_prompt_once_also_after_a_resume(tmp_path):
    """The steps of two resumes from the middle train others in another order, and in all the same."""
    config = write_recipe(tmp_path, LENGTH)
    words = ["rl.async_steps=3", "rl.prompts_per_step=2", "train.max_steps=null", "train.epochs=2"]
    words += ["checkpoint.interval=1", "checkpoint.keep_n=9"]
    runs = [trained(config, *words, "run_id=whole")]
    for step in (2, 5):
        checkpoint = runs[0] / "checkpoints" / f"step_{step:08d}"
        runs.append(trained(config, *words, f"run_id=from_{step}", f"resume={checkpoint}"))
    hashes = []
    for folder in runs:
        found = records(folder)
        assert [one["step"] for one in found] == list(range(1, 9))
        assert max(one["staleness_max"] for one in found) <= 3
        hashes.append(sum(one["totals"]["episodes_hash"] for one in found))
    rollouts = read_rollouts(runs[0] / "rollouts.jsonl")
    answers = [one["columns"]["answer"] for one in rollouts]
    assert sorted(answers) == sorted(2 * [str(i) for i in range(8)])
    assert hashes[0] == hashes[1] == hashes[2] > 0


REFRESH = """
    def train_post_step(self, ctx):
        if ctx.step == 1:
            models = self.model_engine
            buckets = models.actor.weights(dtype=torch.float32)
            buckets = [[(name, 1.1 * value) for name, value in bucket] for bucket in buckets]
            models.reference.load_weights(buckets)  # frozen weights are other ones, too
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "checkpoint.trainable_only=true model.freeze=[*norm*]"])
def test_rl_run_resumed_has_the_reference_whose_weights_the_recipe_loaded(tmp_path, words):
    config = write_recipe(tmp_path, LENGTH)
    engine = tmp_path / "engine.py"
    engine.write_text(f"import torch\n{engine.read_text()}{REFRESH}")
    options = ["rl.kl_coef=0.5", "rl.updates=2", "checkpoint.interval=1", *words.split()]
    whole = trained(config, *options, "train.max_steps=4", "run_id=whole")
    trained(config, *options, "train.max_steps=2", "run_id=parts")
    parts = tmp_path / "outputs" / "parts"
    for steps in (3, 4):  # the second checkpoint is of weights that came from the first
        trained(config, *options, f"train.max_steps={steps}", f"resume={parts}")
    found, expected = records(parts), records(whole)
    for name in ("kl", "loss", "grad_norm"):
        assert [one[name] for one in found] == [one[name] for one in expected], name
    assert expected[-1]["kl"] > 0


@pytest.mark.slow
def test_rl_run_with_a_reference_and_no_kl_coef_has_its_log_probs(tmp_path):
    config = write_recipe(tmp_path, LENGTH)
    engine = tmp_path / "engine.py"
    more = """
    def start_models(self, models):
        models.start_actor()
        self.started = models.start_copy("reference")

    def train_pre_step(self, ctx):
        assert self.started is self.model_engine.reference
        fields = ctx.micro_batches[0].token_fields
        ctx.log("reference", -fields["reference_log_probs"].sum(), 1)
"""
    engine.write_text(engine.read_text() + more)
    assert records(trained(config))[0]["reference"] > 0
    words = ["lora.rank=2", "train.max_steps=1"]  # the actor without its adapters
    engine.write_text(engine.read_text().replace("is self.model_engine.reference", "is None"))
    assert records(trained(config, *words))[0]["reference"] > 0


@pytest.mark.slow
def test_rl_run_scored_by_a_reward_model_alone_and_refused_without_any(tmp_path, capfd):
    config = write_recipe(tmp_path, LENGTH)
    (tmp_path / "engine.py").write_text(
        "from mvp_engine.kit.rl import RLEngine\n\nclass Scored(RLEngine):\n    pass\n"
    )
    assert mvp(f"train {config}") == EXIT_USER_ERROR
    assert (
        "Scored has no reward: define reward(self, row, answer) or episode(self, row, chat), or set reward.model"
        in capfd.readouterr().err
    )
    torch.manual_seed(1)
    hf.Qwen3ForSequenceClassification(hf.Qwen3Config(**TEXT, num_labels=1)).save_pretrained(
        tmp_path / "scorer"
    )
    tokenizer("qwen2_5").save_pretrained(tmp_path / "scorer")
    words = [f"reward.model={tmp_path / 'scorer'}", "model.freeze=[*embed*]"]
    folder = trained(config, *words)
    part = RunFacts(Run(folder)).part_rows()[1]
    assert (part[0], part[4]) == ("llm", "0.001")
    assert part[1] != part[2]  # without the frozen embeddings
    assert model_checkpoint(folder).parts[-2:] == ("step_00000002", "actor")
    for record in records(folder):
        assert record["reward"] == pytest.approx(record["reward_model"])
        assert record["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "reward, warning",
    [
        ("return -float(answer.text == row['answer'])", "is the sign of the reward wrong"),
        pytest.param("return 0.5", "have the same reward in 4 steps (mean 0.5)", marks=CAMPAIGN),
        pytest.param(
            "return float(answer.text == row['answer']) + len(set(answer.tokens)) / 32",
            None,
            marks=CAMPAIGN,
        ),
    ],
    ids=["sign", "constant", "good"],
)
def test_check_of_an_rl_config_warns_of_rewards_that_teach_nothing(
    tmp_path, capsys, reward, warning
):
    config = write_recipe(tmp_path, reward)
    assert mvp(f"check {config} --json train.max_steps=20 generation.max_new_tokens=6") == 0
    found = printed_json(capsys)
    names = [stage["name"] for stage in found["stages"]]
    assert names == ["config", "data", "model", "step", "rollouts", "evaluation"]
    about_rewards = [text for text in found["warnings"] if "reward" in text]
    assert any(warning in text for text in about_rewards) if warning else not about_rewards
    assert len(found["rollouts"]["reward"]) == 4
    assert max(found["rollouts"]["gap"]) < 1e-5
    assert found["rollouts"]["gap_by_modality"]["text"] < 1e-5


@pytest.mark.slow
def test_rl_training_reports_the_part_of_a_step_that_hangs(tmp_path, monkeypatch):
    """See also tests/engine/test_hang.py."""
    update = RLEngine.update
    warnings: list[str] = []

    def is_reported():
        return any(text.startswith("update of step 1 takes longer") for text in warnings)

    def slow(self, *args):
        wait_until(is_reported)
        return update(self, *args)

    monkeypatch.setattr(RLEngine, "update", slow)
    monkeypatch.setattr(
        world.LOGGER, "log", lambda level, text, *words: warnings.append(text % words)
    )
    trained(write_recipe(tmp_path, LENGTH), "train.max_steps=1", "parallel.timeout=1")
    [text] = [
        text
        for text in warnings
        if text.startswith("update of step 1 takes longer than 0.5 s, half of parallel.timeout")
    ]
    assert "wait_until(is_reported)" in text


@CAMPAIGN
def test_profile_of_an_rl_config_in_one_process_writes_its_page(tmp_path: Path) -> None:
    config = write_recipe(tmp_path, LENGTH)
    words = f"--out {tmp_path}/profile --steps 2 --first 2 train.max_steps=8".split()
    assert mvp(f"profile {config}", *words) == 0
    assert (tmp_path / "profile" / "profile.json").is_file()


@pytest.mark.slow
def test_rl_run_with_our_own_decode_needs_no_other_sync_of_adapters(tmp_path):
    config = write_recipe(tmp_path, LENGTH)
    words = ["lora={}", "generation.sync=adapter", "optim.lr=0.1"]
    for groups in ("groups.rollout=null", "groups.rollout={}"):
        found = records(trained(config, *words, groups))
        assert len(found) == 2
        assert all(record["gap"] < 1e-5 for record in found), groups


TURNS = """
from mvp_engine.kit.rl import RLEngine

class Tiny(RLEngine):
    def episode(self, row, chat):
        first = chat.answer()
        chat.user("again")
        return float(sum(token % 2 for token in first.tokens + chat.answer().tokens))
"""


@pytest.mark.slow
def test_rl_run_of_turns_with_experts_resumes_its_pending_step_bit_for_bit(tmp_path):
    config = write_recipe(tmp_path, LENGTH)
    (tmp_path / "engine.py").write_text(TURNS)
    torch.manual_seed(0)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes = hf.Qwen3MoeConfig(**TEXT, **experts, initializer_range=0.5)
    hf.Qwen3MoeForCausalLM(sizes).save_pretrained(tmp_path / "model")
    words = ["rl.async_steps=1", "train.precision=bf16", "train.max_steps=3", "rl.updates=2"]
    words += ["checkpoint.interval=1", "reward.workers=8", "data.pack_tokens=512"]
    whole = trained(config, *words, "run_id=whole")
    checkpoint = whole / "checkpoints" / "step_00000002"
    again = trained(config, *words, "run_id=again", f"resume={checkpoint}")
    last, found = (records(run)[-1] for run in (whole, again))
    for name in ("loss", "grad_norm", "ess", "gap/turn2+", "reward"):
        assert found[name] == last[name], name
