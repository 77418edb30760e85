"""The reverse_rl recipe: algorithms, resume, workers, one-step-off and faults; learning in the campaign."""

import json
import multiprocessing
import os
import shutil
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import CAMPAIGN, ROOT, mvp, read_metrics, user_error
from kill_resume import ForkedJob, compare
from safetensors.torch import load_file

from mvp_engine.config import compose
from mvp_engine.config.engine_class import find_engine
from mvp_engine.distributed import World
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.launch import launch
from mvp_engine.runs import list_runs
from mvp_engine.tools.push import model_card

pytestmark = pytest.mark.slow
CONFIGS = ROOT / "recipes" / "reverse_rl" / "configs"
SMALL = "made.rows=40 log.interval=1 log.backends=[jsonl] export_link=null".split()
SHORT = "train.max_steps=3 eval.steps=3 eval.batches=1 rl.prompts_per_step=4 rl.num_generations=4".split()
SHORT += ["reward.workers=0", "optim.lr=3e-3"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the data and the export of a short SFT."""
    folder = tmp_path_factory.mktemp("reverse")
    words = [*SMALL[:-1], f"output_dir={folder}", "train.max_steps=16", "eval.steps=null"]
    words += ["data.pack_tokens=512", "optim.warmup=0"]
    assert launch(str(CONFIGS / "sft.yaml"), words) == 0
    return folder


def words_of(base, name, *more):
    words = [*SMALL, *SHORT, f"output_dir={base / name}", f"made.folder={base}/reverse_data"]
    return [*words, f"model.path={base}/reverse_base", *more]


def trained(base, name, *more, config="grpo"):
    """The records of a short training in a folder of its own."""
    assert launch(str(CONFIGS / f"{config}.yaml"), words_of(base, name, *more)) == 0
    return read_metrics(base / name) + read_metrics(base / name, "eval")


def weights(base, name, model="actor"):
    folder = list_runs(base / name)[-1].checkpoint_list()[-1] / model
    return {
        k: v
        for k, v in load_file(folder / "rank_00000.safetensors").items()
        if k.startswith("model.")
    }


def assert_same_bits(one, two):
    assert one.keys() == two.keys()
    assert one
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_rl_grpo_step_logs_rewards_gap_and_rollouts_and_exports(base):
    records = trained(base, "grpo", "log.backends=[jsonl,plot]", f"export_link={base}/model")
    first = records[0]
    assert first["gap"] < 2e-5
    assert first["gap/text"] < 2e-5
    assert first["loss"] is not None
    assert first["with_signal"] > 0
    assert records[-1]["split"] == "eval"
    assert records[-1]["pass@1"] is not None
    run = list_runs(base / "grpo")[-1]
    rollouts = [json.loads(line) for line in (run.dir / "rollouts.jsonl").read_text().splitlines()]
    assert {one["step"] for one in rollouts if one["split"] == "train"} == {1, 2, 3}
    assert len(rollouts[0]["completions"]) == 4
    assert (base / "model" / "tokenizer.json").is_file()
    assert "rollouts" in (run.dir / "report.html").read_text().lower()
    card = model_card(run, base / "model", "me/reverse")
    assert "by reinforcement learning (grpo; fine-tuning of all weights)" in card
    assert "| `rl.num_generations` | 4 |" in card
    assert "global_batch_size" not in card


def test_rl_single_update_between_gap_steps_equals_one_with_old_log_probs(base, monkeypatch):
    words = ["rl.updates=1", "eval.steps=null"]
    skipped = trained(base, "single", *words)
    monkeypatch.setattr("mvp_engine.kit.rl.engine.GAP_INTERVAL", 1)
    measured = trained(base, "measured", *words)
    assert "gap/text" in skipped[0]
    assert "gap/text" not in skipped[1]
    assert skipped[1]["gap"] < 2e-5
    for one, two in zip(skipped, measured, strict=True):
        for name in ("loss", "grad_norm", "ratio", "reward"):
            assert one[name] == pytest.approx(two[name], abs=1e-5)


@CAMPAIGN
def test_rl_report_of_a_finished_run_evaluates_it_again_with_the_same_result(base):
    words = ["evaluation={samples: 2, temperature: 1.0}", "eval.steps=3"]
    before = trained(base, "report", *words)
    run = list_runs(base / "report")[-1]
    rollouts = (run.dir / "rollouts.jsonl").read_text()
    after = trained(base, "report", *words, "workflow=report", "resume=auto")
    assert after == before  # the log is of the training
    assert (run.dir / "rollouts.jsonl").read_text() == rollouts
    assert (run.dir / "report.html").is_file()
    assert (run.dir / "hf_step_3" / "model.safetensors").is_file()
    assert mvp(f"check {run.dir} --step 2") == EXIT_USER_ERROR


@pytest.mark.parametrize(
    "config, words",
    [
        pytest.param(
            "grpo",
            ["rl.async_steps=1", "rl.dynamic_sampling=1", "rl.kl_coef=0.1"],
            marks=CAMPAIGN,
        ),  # see also tests/kit/rl/test_rl_runs.py
        (
            "ppo",
            "rl.prompts_per_step=6 rl.num_generations=1 rl.updates=2 rl.critic_warmup=1".split(),
        ),
    ],
)
def test_rl_run_resumed_from_a_checkpoint_is_bit_equal(base, config, words):
    words = [*words, "checkpoint.interval=1", "checkpoint.keep_n=null"]
    name = f"resume_{config}"
    undisturbed = trained(base, name, *words, config=config)
    # Step 1 is on-policy; after it the sampler is one step behind, and the ratio is to its log-probs.
    gaps = [record.get("gap", 0.0) > 1e-3 for record in undisturbed if record["split"] == "train"]
    # PPO compares no completions of a prompt.
    assert ("with_signal" in undisturbed[0]) == (config == "grpo")
    assert gaps == [False, config == "grpo", config == "grpo"]
    models = ["actor", "critic"] if config == "ppo" else ["actor"]
    before = [weights(base, name, model) for model in models]
    run = list_runs(base / name)[-1]
    rollouts = (run.dir / "rollouts.jsonl").read_text()
    for later in run.checkpoint_list()[1:]:
        shutil.rmtree(later)
    assert trained(base, name, *words, "resume=auto", config=config) == undisturbed
    assert len(run.checkpoint_list()) == 3
    for model, tensors in zip(models, before, strict=True):
        assert_same_bits(weights(base, name, model), tensors)
    assert (run.dir / "rollouts.jsonl").read_text() == rollouts


@CAMPAIGN
@pytest.mark.parametrize(
    "algorithm", ["dr_grpo", "rloo", "reinforce_pp", "gspo", "gmpo", "cispo", "sapo"]
)
def test_rl_algorithms_train_a_step(base, algorithm):
    words = "train.max_steps=1 eval.steps=null rl.clip=null rl.kl_coef=0.01 rl.updates=1".split()
    (record,) = trained(base, algorithm, *words, f"rl.algorithm={algorithm}")
    assert record["skipped"] == 0
    assert record["grad_norm"] > 0
    # Before the first update the policy is the reference.
    assert record["kl"] == pytest.approx(0.0, abs=1e-4)


@CAMPAIGN
def test_rl_adapters_off_is_the_reference_of_lora(base):
    words = "lora.rank=4 lora.target_modules=[llm] rl.kl_coef=0.1 eval.steps=null train.max_steps=2".split()
    off = trained(base, "lora_off", *words)
    copy = trained(base, "lora_copy", *words, "groups.reference={}")
    assert off[1]["kl"] > 0
    for one, two in zip(off, copy, strict=True):
        assert one["kl"] == pytest.approx(two["kl"], abs=1e-6)
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)


@CAMPAIGN
def test_rl_separate_sampler_group_gives_the_same_training(base):
    words = ["eval.steps=null", "rl.async_steps=1"]
    shared = trained(base, "shared", *words)
    assert trained(base, "apart", *words, "groups.rollout={}") == shared


def test_rl_under_torchrun_is_refused_with_the_fix():
    from mvp_engine.kit.rl import RLEngine

    world = World(0, 2, 0, 2, torch.device("cpu"))
    with user_error(r"workers.where=spawn groups.actor.ranks=2"):
        RLEngine(None, world)


@pytest.mark.parametrize(
    "word, text",
    [
        ("groups.actor.ranks=2", "workers.where=spawn"),
        ("parallel.shard=2", "groups.actor.parallel"),
        ("rl.num_generations=1", "rl.num_generations to 2 or more"),
        ("generation.backend=vllm", "generation.urls"),
        ("eval.generation.max_new_tokens=3", "eval.samples"),
        ("generation.max_new_tokens=5000", "data.pack_tokens"),
        (
            "workers.where=spawn groups.actor.ranks=3 groups.actor.parallel.shard=2",
            "groups.actor.parallel (shard=2) does not divide groups.actor.ranks=3: set groups.actor.ranks=2",
        ),
        (
            "groups.critic.parallel.tensor=2",
            "does not divide groups.actor.ranks=1: set groups.actor.ranks=2",
        ),
    ],
)
def test_rl_config_errors_name_the_fix(base, word, text, capsys):
    words = words_of(base, "errors", *word.split())
    assert mvp(f"train {CONFIGS}/grpo.yaml", *words) == EXIT_USER_ERROR
    assert text in capsys.readouterr().err


def test_rl_gap_above_the_limit_stops_before_the_first_update(base, capsys):
    words = words_of(base, "gap", "generation.max_gap=1e-12", "rl.correction={cap:2}")
    assert mvp(f"train {CONFIGS}/grpo.yaml", *words) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert "generation.max_gap=1e-12: log-probs of sampler and trainer differ by " in error
    assert "assistant" in error  # the text before the worst tokens
    assert read_metrics(base / "gap") == []


@pytest.mark.parametrize("algorithm, steps", [("grpo", 40), ("ppo", 34)])
def test_rl_schedule_of_the_actor_leaves_out_the_warm_up_of_a_critic_alone(
    algorithm, steps, monkeypatch
):
    from mvp_engine.kit.rl.model_groups import ModelGroups

    started = {}

    def start(self, name, group, spec):
        started[name] = spec
        return nullcontext()

    monkeypatch.setattr(ModelGroups, "_start", start)
    words = f"model.path=x rl.algorithm={algorithm} rl.critic_warmup=3 rl.updates=2".split()
    config = compose(CONFIGS / "gpu8.yaml", words).config
    start_models = find_engine("reverse_rl", CONFIGS)[0].start_models
    start_all = partial(start_models, SimpleNamespace(config=config))
    groups = ModelGroups(config, "fp32", 20, Path("files"), torch.device("cuda"), start_all)
    groups.initialize(optimizer=object())
    assert started["actor"].total_steps == steps
    assert ("critic" in started) == (algorithm == "ppo")
    assert (groups.world.size, groups.world.device.type) == (8, "cuda")  # as the log names them


def test_reference_of_a_checkpoint_that_a_resumed_run_does_not_start_is_named(tmp_path):
    from mvp_engine.kit.rl.check import _warnings
    from mvp_engine.kit.rl.model_groups import ModelGroups

    groups: Any = ModelGroups.__new__(ModelGroups)
    groups.is_training = True
    (tmp_path / "reference").mkdir()
    assert groups._without_group(tmp_path) == ["reference"]
    groups.left_out = ["reference"]
    config = compose(CONFIGS / "ppo.yaml", [f"made.folder={tmp_path}"]).config
    engine: Any = SimpleNamespace(
        config=config, model_engine=groups, episodes=SimpleNamespace(chat=None, has_read_last=True)
    )
    facts = {"reward": [1.0], "with_signal": [1], "own_answers": None, "finished": [1.0]}
    facts |= {"seconds": {"reward": 0.0}, "gap_by_modality": {}, "teacher_kl": {}}
    assert any("the checkpoint has a reference" in one for one in _warnings(engine, facts))
    groups.reference = object()
    assert groups._without_group(tmp_path) == []


@pytest.mark.parametrize("name", ["gpu1", "gpu8", "vllm_gpu1"])
def test_rl_gpu_configs_compose(name):
    config = compose(CONFIGS / f"{name}.yaml", ["model.path=x"]).config
    assert config.rl.algorithm == "grpo"
    assert (config.groups.actor.ranks or 1) == (8 if name == "gpu8" else 1)
    assert (config.generation.backend, len(config.generation.urls)) == (
        ("vllm", 1) if name == "vllm_gpu1" else ("packed", 0)
    )


def assert_close(found, wanted):
    assert len(found) == len(wanted)
    for one, two in zip(found, wanted, strict=True):
        assert one.keys() == two.keys()
        for name in two:
            if isinstance(two[name], float) and name != "gap":
                assert one[name] == pytest.approx(two[name], rel=1e-4, abs=2e-5), (
                    name,
                    two["step"],
                )


@CAMPAIGN
@pytest.mark.parametrize("config", ["grpo", "ppo"])
def test_rl_spawned_ranks_train_as_the_local_process(base, config):
    words = ["rl.prompts_per_step=6", "rl.updates=2", "rl.kl_coef=0.05"]
    words += ["rl.num_generations=1", "rl.critic_warmup=1"] if config == "ppo" else []
    local = trained(base, f"local_{config}", *words, config=config)
    spawn = [*words, "workers.where=spawn"]
    assert trained(base, f"spawn_{config}", *spawn, config=config) == local
    assert_same_bits(weights(base, f"spawn_{config}"), weights(base, f"local_{config}"))
    two = [*spawn, "groups.actor={ranks: 2, parallel: {shard: 2}}", "groups.critic={ranks: 1}"]
    assert_close(trained(base, f"two_{config}", *two, config=config), local)


@CAMPAIGN
@pytest.mark.parametrize(
    "words", [["rl.async_steps=1", "rl.dynamic_sampling=1"], ["rl.algorithm=ppo", "rl.clip=null"]]
)
def test_rl_run_killed_at_20_moments_and_resumed_is_bit_equal(base, tmp_path, words):
    settings = [word for word in words_of(base, "x", *words) if not word.startswith("output_dir")]
    settings += "train.max_steps=70 eval.steps=20 checkpoint.interval=1 reward.workers=2".split()
    settings += ["log.backends=[file,jsonl]", "optim.lr=1e-3"]
    found = compare(20, 1, settings, tmp_path, config=CONFIGS / "grpo.yaml", start=ForkedJob)
    print(found)
    assert found["kills"] == 20
    ends = []
    for folder in ("straight", "killed"):
        (file,) = (tmp_path / folder).glob(
            "*/checkpoints/step_00000070/actor/rank_00000.safetensors"
        )
        ends.append(
            {k: v for k, v in load_file(file).items() if k.startswith(("model.", "optim."))}
        )
    assert_same_bits(*ends)


def kill_a_worker_once(marker):
    """Kill the first child process that is a worker of the group."""
    if marker.exists():
        return
    marker.touch()
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGKILL)
        return


@CAMPAIGN
def test_rl_training_after_the_death_of_a_worker_restarts_from_the_newest_checkpoint(
    base, monkeypatch
):
    from mvp_engine.kit.rl import RLEngine

    words = "workers.where=spawn groups.actor.ranks=2 checkpoint.interval=1 eval.steps=null".split()
    undisturbed = trained(base, "alive", *words, "log.backends=[file,jsonl]")
    original = RLEngine.train_pre_step

    def train_pre_step(self, ctx):
        original(self, ctx)
        if ctx.step == 3:
            kill_a_worker_once(base / "killed_once")

    monkeypatch.setattr(RLEngine, "train_pre_step", train_pre_step)
    assert trained(base, "died", *words, "log.backends=[file,jsonl]") == undisturbed
    log = (list_runs(base / "died")[-1].dir / "log.txt").read_text()
    assert "restart 1 of 2: continuing" in log
    assert "step_00000002" in log
    assert not multiprocessing.active_children()


@CAMPAIGN
def test_rl_readme_commands_learn_from_half_right_to_right(tmp_path):
    """On two idle cores: GRPO in under 3 minutes, PPO in under 4."""
    shown = {}
    for config, metric in (("sft", "exact_held_out"), ("grpo", "pass@1"), ("ppo", "pass@1")):
        words = [f"output_dir={tmp_path}", "log.backends=[jsonl]"]
        assert mvp(f"train {CONFIGS}/{config}.yaml", *words) == 0
        shown[config] = read_metrics(tmp_path, "eval")[-1][metric]
    assert shown["sft"] <= 0.5
    assert min(shown["grpo"], shown["ppo"]) >= 0.95
