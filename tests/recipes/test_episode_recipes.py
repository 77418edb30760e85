"""Recipes with episodes of several turns: they learn, repeat and resume bit for bit."""

import json

import pytest
from conftest import CAMPAIGN, ROOT, read_metrics, user_error

from mvp_engine.config import compose
from mvp_engine.kit.rl.rollout_log import read_rollouts
from mvp_engine.launch import launch

pytestmark = pytest.mark.slow
RECIPES = {
    "calculator_rl": "reward_exact",
    "grid_rl": "reward_goal",
    "zoom_rl": "reward_right",
    "agent_rl": "reward_goal",
}
# Until some answers call the tool; an environment and a program read any answer.
SFT_STEPS = {"calculator_rl": 70, "grid_rl": 3, "zoom_rl": 25, "agent_rl": 3}
SMALL = "log.interval=1 log.backends=[jsonl] eval.steps=null".split()
TINY = "rl.prompts_per_step=6 rl.updates=2 checkpoint.interval=1 reward.workers=6".split()


def few_rows(configs):
    return "made.chats=100" if configs.parent.name == "agent_rl" else "made.rows=100"


def few_episodes(configs):
    return TINY + ["rl.num_generations=2"] * (configs.parent.name == "agent_rl")  # programs


@pytest.fixture(scope="module", params=RECIPES)
def base(request, tmp_path_factory):
    """The configs of a recipe, and a folder with its data and the export of a short SFT."""
    folder = tmp_path_factory.mktemp(request.param)
    configs = ROOT / "recipes" / request.param / "configs"
    words = [*SMALL, f"output_dir={folder}", f"train.max_steps={SFT_STEPS[request.param]}"]
    assert launch(str(configs / "sft.yaml"), [*words, few_rows(configs)]) == 0
    return configs, folder


def trained(base, run, steps, *more):
    configs, folder = base
    words = [*SMALL, *few_episodes(configs), f"output_dir={folder}", "export_link=null"]
    words += [f"train.max_steps={steps}", few_rows(configs)]
    assert launch(str(configs / "rl.yaml"), [*words, *more]) == 0
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [
        {name: value for name, value in one.items() if name not in ("perf", "time")}
        for one in records
    ]


def test_recipe_of_episodes_repeats_and_resumes_bit_for_bit(base):
    _, folder = base
    whole = trained(base, "whole", 3, "run_id=whole")
    assert all(record["reward_errors"] == 0 for record in whole)
    assert all(record["turns"] > 1 for record in whole)
    assert all(record["gap/turn2+"] < 2e-5 for record in whole if "gap/turn2+" in record)
    assert any("gap/turn2+" in record for record in whole)
    # Images that a tool returns are read by sampler and trainer alike.
    assert all(record.get("gap/image", 0.0) < 1e-6 for record in whole)
    assert ("gap/image" in whole[0]) == (base[0].parent.name == "zoom_rl")
    # One process plays one episode after another: other rounds, the same tokens.
    trained(base, "parts", 1, "run_id=parts")
    assert trained(base, "parts", 3, f"resume={folder / 'parts'}") == whole
    texts = [(folder / run / "rollouts.jsonl").read_text() for run in ("whole", "parts")]
    assert texts[0] == texts[1]
    first = next(iter(read_rollouts(folder / "whole" / "rollouts.jsonl")))["completions"][0]
    assert [turn["by"] for turn in first["turns"]][:3] in (
        ["policy"],
        ["policy", "environment", "policy"],
    )


def test_recipe_of_episodes_several_steps_ahead_resumes_with_each_prompt_once(base):
    _, folder = base
    words = ["rl.async_steps=4", "checkpoint.keep_n=9"]
    whole = trained(base, "ahead", 5, "run_id=ahead", *words)
    checkpoint = folder / "ahead" / "checkpoints" / "step_00000002"
    resumed = trained(base, "again", 5, "run_id=again", f"resume={checkpoint}", *words)
    hashes = [[record["totals"]["episodes_hash"] for record in run] for run in (whole, resumed)]
    assert sum(hashes[0]) == sum(hashes[1])
    assert hashes[0][:2] == hashes[1][:2]
    for run in (whole, resumed):
        assert len(run) == 5
        staleness = max(record["staleness_max"] for record in run)
        # The programs of agent_rl take so long to start that a step may have waited for all of them.
        assert (0 if base[0].parent.name == "agent_rl" else 1) <= staleness <= 4
        assert all(record["gap/turn2+"] < 2e-5 for record in run if "gap/turn2+" in record)


def test_turns_of_an_agent_are_those_of_a_loop_in_the_engine_bit_for_bit(base):
    """The program that knows the address alone draws the same tokens as an episode with its loop."""
    configs, folder = base
    if configs.parent.name != "agent_rl":
        pytest.skip("its episodes start no program")
    metrics = {
        "agent": trained(base, "agent", 2, "run_id=agent"),
        "loop": trained(
            base, "loop", 2, "run_id=loop", f"engine={ROOT}/tests/recipes/agent_loop.py"
        ),
    }
    assert metrics["agent"] == metrics["loop"]
    texts = [(folder / run / "rollouts.jsonl").read_text() for run in metrics]
    assert texts[0] == texts[1]


def test_report_of_episodes_shows_who_wrote_what(base):
    _, folder = base
    trained(base, "shown", 2, "run_id=shown", "log.backends=[jsonl,plot]", "eval.steps=2")
    page = (folder / "shown" / "report.html").read_text()
    assert "<div class=policy>" in page
    assert "<div class=environment>" in page
    # The tool's image has a mark.
    assert ("[image]" in page) == (base[0].parent.name == "zoom_rl")


def test_check_of_episodes_prints_turns_and_what_the_template_writes(base, capsys):
    from conftest import mvp

    configs, folder = base
    words = [f"output_dir={folder}", few_rows(configs), *few_episodes(configs)]
    words.remove("checkpoint.interval=1")
    capsys.readouterr()
    mvp(f"check {configs / 'rl.yaml'}", *words)
    printed = capsys.readouterr().out
    assert "the chat template writes messages of user and tool" in printed
    assert "turn2+" in printed


@CAMPAIGN
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_of_episodes_learns(tmp_path, recipe):
    configs = ROOT / "recipes" / recipe / "configs"
    for name in ("sft", "rl"):
        assert (
            launch(
                str(configs / f"{name}.yaml"), [f"output_dir={tmp_path}", "log.backends=[jsonl]"]
            )
            == 0
        )
    run = sorted(tmp_path.glob(f"{recipe}-*"))[-1]
    shares = [record[RECIPES[recipe]] for record in read_metrics(run, "eval")]
    assert shares[-1] >= (0.8 if recipe == "agent_rl" else 0.9)


@pytest.mark.parametrize(
    "words", ["calculator_rl/rl rl.algorithm=ppo", "grid_rl/rl rl.algorithm=grpo"]
)
def test_algorithm_that_the_step_of_a_recipe_is_not_is_refused(words):
    config, word = words.split()
    with user_error(f"{word}: the step of this recipe is that of"):
        compose(config, [word])
