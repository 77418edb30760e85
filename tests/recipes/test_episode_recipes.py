"""The recipes calculator_rl and grid_rl: several turns learn, repeat and resume bit for bit."""

import json

import pytest
from conftest import CAMPAIGN, ROOT, read_metrics

from mvp_engine.kit.rl.rollout_log import read_rollouts
from mvp_engine.launch import launch

pytestmark = pytest.mark.slow
RECIPES = {"calculator_rl": "reward_exact", "grid_rl": "reward_goal"}
SFT_STEPS = {"calculator_rl": 70, "grid_rl": 3}  # until some answers call the tool
SMALL = "made.rows=100 log.interval=1 log.backends=[jsonl] eval.steps=null".split()
TINY = "rl.prompts_per_step=6 rl.updates=2 checkpoint.interval=1 reward.workers=6".split()


@pytest.fixture(scope="module", params=RECIPES)
def base(request, tmp_path_factory):
    """The configs of a recipe, and a folder with its data and the export of a short SFT."""
    folder = tmp_path_factory.mktemp(request.param)
    configs = ROOT / "recipes" / request.param / "configs"
    words = [*SMALL, f"output_dir={folder}", f"train.max_steps={SFT_STEPS[request.param]}"]
    assert launch(str(configs / "sft.yaml"), words) == 0
    return configs, folder


def trained(base, run, steps, *more):
    configs, folder = base
    words = [*SMALL, *TINY, f"output_dir={folder}", "export_link=null", f"train.max_steps={steps}"]
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


def test_recipe_of_an_agent_has_the_turns_of_a_loop_bit_for_bit(base):
    """The program that knows the address alone draws the same tokens as the engine's own loop."""
    configs, folder = base
    if configs.parent.name != "grid_rl":
        pytest.skip("calculator_rl has no agent")
    trained(base, "loop", 1, "run_id=loop")
    words = [
        *SMALL,
        *TINY,
        f"output_dir={folder}",
        "export_link=null",
        "train.max_steps=1",
        "run_id=agent",
    ]
    assert launch(str(configs / "agent.yaml"), words) == 0
    texts = []
    for run in ("loop", "agent"):
        records = read_rollouts(folder / run / "rollouts.jsonl")
        texts.append([one["completions"][0]["text"] for one in records])
    assert texts[0] == texts[1]
    record = json.loads((folder / "agent" / "metrics.jsonl").read_text().splitlines()[0])
    assert record["reward_errors"] == 0
    assert record["gap/turn2+"] < 2e-5


def test_report_of_episodes_shows_who_wrote_what(base):
    _, folder = base
    trained(base, "shown", 2, "run_id=shown", "log.backends=[jsonl,plot]", "eval.steps=2")
    page = (folder / "shown" / "report.html").read_text()
    assert "<span class=policy>" in page
    assert "<span class=environment>" in page


def test_check_of_episodes_prints_turns_and_what_the_template_writes(base, capsys):
    from conftest import mvp

    configs, folder = base
    words = [f"output_dir={folder}", "made.rows=100", *TINY[:1], "rl.updates=2", "reward.workers=6"]
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
    assert shares[-1] >= 0.7
