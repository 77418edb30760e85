"""Runs over episodes of several turns: killed and resumed, and with models in other processes, they have the same bits.

The tests with Ray run where it is installed: `make test-ray`.
"""

import os
import signal
from importlib.util import find_spec

import pytest
from conftest import CAMPAIGN, mvp
from kill_resume import ForkedJob, compare
from safetensors.torch import load_file
from test_episode_recipes import SMALL, TINY, trained
from test_episode_recipes import base as base

from mvp_engine.config import compose
from mvp_engine.kit.rl import RLEngine
from mvp_engine.kit.rl.rollout_log import read_rollouts

GRID = pytest.mark.parametrize("base", ["grid_rl"], indirect=True, scope="module")
NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: make test-ray")
LAUNCHERS = pytest.mark.parametrize("where", ["spawn", pytest.param("ray", marks=NEEDS_RAY)])
pytestmark = pytest.mark.slow


def final_weights(folder):
    (file,) = sorted(folder.glob("**/checkpoints/step_*/actor/rank_00000.safetensors"))[-1:]
    named = load_file(file)
    return {name: value for name, value in named.items() if name.startswith(("model.", "optim."))}


def assert_same_bits(one, two):
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)


@GRID
@pytest.mark.campaign
def test_run_of_episodes_killed_and_resumed_is_bit_equal(base, tmp_path, campaign_size):
    configs, folder = base
    kills = campaign_size(1, 20)
    settings = [*SMALL, *TINY, "export_link=null", f"train.max_steps={8 + 10 * kills}"]
    settings += [f"model.path={folder}/grid_base", f"made.folder={folder}/grid_data"]
    settings += ["made.rows=100", "log.backends=[file,jsonl]"]
    found = compare(kills, 1, settings, tmp_path, config=configs / "rl.yaml", start=ForkedJob)
    print(found)
    assert found["kills"] == kills
    assert_same_bits(*(final_weights(tmp_path / name) for name in ("straight", "killed")))
    texts = {file.read_text() for file in tmp_path.glob("*/*/rollouts.jsonl")}
    assert len(texts) == 1


@GRID
@pytest.mark.parametrize("is_unread", [False, True])
def test_check_prints_the_share_of_tools_and_warns_of_answers_that_nothing_reads(
    base, is_unread, capsys, monkeypatch
):
    configs, folder = base
    if is_unread:
        engine = compose(configs / "rl.yaml").engine_class
        monkeypatch.setattr(engine, "episode", lambda self, row, chat: float(not chat.answer()))
    mvp(f"check {configs / 'rl.yaml'}", f"output_dir={folder}", "made.rows=100", *TINY)
    printed = capsys.readouterr().out
    assert "% of the step time is user code between answers; rounds wait" in printed
    assert ("no episode reads the last answer of the policy" in printed) == is_unread


@GRID
@LAUNCHERS
def test_run_of_three_turns_in_other_processes_has_the_bits_of_the_local_one(base, where):
    _, folder = base
    words = ["generation.max_turns=3", "rl.updates=2"]
    local = trained(base, "local", 3, "run_id=local", *words)
    assert {record["turns"] for record in local} != {1.0}
    other = trained(base, where, 3, f"run_id={where}", f"workers.where={where}", *words)
    assert other == local
    assert_same_bits(final_weights(folder / where), final_weights(folder / "local"))
    rollouts = [list(read_rollouts(folder / run / "rollouts.jsonl")) for run in ("local", where)]
    assert rollouts[0] == rollouts[1]


@GRID
@CAMPAIGN
@LAUNCHERS
def test_run_of_episodes_after_the_death_of_an_actor_continues_from_its_checkpoint(
    base, where, monkeypatch
):
    _, folder = base
    words = ["generation.max_turns=3", "log.backends=[file,jsonl]"]
    expected = trained(base, f"calm_{where}", 4, f"run_id=calm_{where}", *words)
    killed = []
    original = RLEngine.train_pre_step

    def train_pre_step(self, ctx):
        original(self, ctx)
        if ctx.step == 3 and not killed:
            (rank,) = self.model_engine.actor.processes.ranks
            killed.append(rank.process.pid if where == "spawn" else rank.home.pid)
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(RLEngine, "train_pre_step", train_pre_step)
    run = f"died_{where}"
    assert trained(base, run, 4, f"run_id={run}", f"workers.where={where}", *words) == expected
    log = (folder / run / "log.txt").read_text()
    assert "rank 0 of group actor died" in log
    assert "restart 1 of 2: continuing" in log
    assert "step_00000002" in log
