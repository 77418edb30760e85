"""The table_vla recipe: it trains and rolls out, its export acts as the engine does, and the policy learns the task."""

import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CAMPAIGN, ROOT, mvp, read_metrics, user_error
from run_files import printed_json, read_json
from test_action_model import transformers_pi0
from test_lerobot import write_folder
from tiny_pi0 import tiny_pi0

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.config.engine_class import find_engine
from mvp_engine.distributed import World
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.imports import import_file
from mvp_engine.kit import flow
from mvp_engine.kit.actions.pi0 import probe_batch
from mvp_engine.kit.actions.simulation import Observation
from mvp_engine.kit.tiny_processors import word_tokenizer
from mvp_engine.runs import Run

CONFIGS = ROOT / "recipes" / "table_vla" / "configs"
SHORT = "table.demonstrations=40 train.max_steps=2 eval.steps=2 data.num_workers=0".split()
SHORT += "simulation.episodes=4 simulation.max_steps=8 log.backends=[jsonl] log.interval=1".split()
# Needs nothing but torch, numpy and transformers: it imports the file next to the weights.
ACT = """
import json, sys
import numpy as np, torch
sys.path.insert(0, ".")
from act import Policy
assert "mvp_engine" not in sys.modules
seen = np.load("observations.npz")
policy = Policy.from_pretrained(".")
images = [{"observation.images.top": frame} for frame in seen["frames"]]
actions = policy.act_batch(images, seen["states"], [str(one) for one in seen["tasks"]], torch.from_numpy(seen["noise"]))
one = policy.act(images[0], seen["states"][0], str(seen["tasks"][0]), torch.from_numpy(seen["noise"][0]))
assert np.abs(one - actions[0]).max() < 1e-5
np.save("actions.npy", actions)
"""


@pytest.fixture(scope="module")
def world():
    return import_file(ROOT / "recipes" / "table_vla" / "world.py")


def test_table_expert_succeeds_and_a_guesser_gets_a_quarter(world):
    table = world.Table(200)
    for guesses, low, high in ((False, 1.0, 1.0), (True, 0.15, 0.35)):
        seen, _ = table.reset(seed=list(range(200)))
        named = table.plate.copy()
        if guesses:
            table.plate = np.random.default_rng(0).integers(4, size=200)
        for _ in range(40):
            seen, *_ = table.step(table.expert())
        assert table.done.all()
        on_plate = np.abs(table.block - world.PLATES[named]).max(1) < world.PLATE
        assert low <= on_plate.mean() <= high
    assert seen[world.CAMERA].shape == (200, 32, 32, 3)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    composed = compose(CONFIGS / "cpu.yaml", [*SHORT, f"output_dir={folder}"])
    made = composed.engine_class
    return made(composed.config, World.join("cpu"), Run.create(folder, "table", None))


@pytest.mark.slow
def test_table_vla_export_acts_as_the_engine(engine, world, tmp_path):
    with engine:
        engine.train()
        metrics = read_metrics(engine.run.dir.parent, "eval")[-1]
        assert {"success", "success_without_instruction"} <= metrics.keys()
        engine.write_page(engine.eval_metrics, (), None)
        page = (engine.run.dir / "report.html").read_text()
        strips = re.findall(r"(?:success|failure) after \d+ steps", page)
        assert page.count("<img") >= len(strips) == 4  # one of each episode
        export = engine.export()
        table = world.Table(3)
        seen, _ = table.reset(seed=[7, 8, 9])
        shape = (engine.data.spec.chunk, engine.data.spec.action_dim)
        noise = torch.cat([flow.draw(11, 0, index, shape).noise for index in range(3)])
        tasks = ["put the block on the red plate", "move it", ""]
        observations = []
        for at in range(3):
            images = {world.CAMERA: seen[world.CAMERA][at]}
            observations.append(Observation(images, seen[world.STATE][at], tasks[at]))
        expected = engine.act(observations, 11, [(0, 0), (1, 0), (2, 0)])
    arrays = {"frames": seen[world.CAMERA], "states": seen[world.STATE]}
    np.savez(export / "observations.npz", **arrays, tasks=np.array(tasks), noise=noise.numpy())
    done = subprocess.run(
        [sys.executable, "-I", "-c", ACT], cwd=export, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    acted = np.load(export / "actions.npy")
    assert acted.shape == (3, 8, 3)
    np.testing.assert_allclose(acted, expected, rtol=1e-5, atol=1e-5)
    # The comparison notices other statistics, and a checkpoint has them too.
    spec = read_json(export / "normalization.json")
    assert np.abs(expected - spec["action"]["mean"]).max() > 1e-2
    checkpoint = next(engine.run.dir.glob("checkpoints/step_*"))
    assert read_json(next(checkpoint.rglob("normalization.json"))) == spec


@CAMPAIGN  # three trainings
def test_table_vla_resume_with_another_normalization_is_a_user_error(tmp_path, capsys):
    words = [
        str(CONFIGS / "cpu.yaml"),
        *SHORT,
        f"output_dir={tmp_path}",
        "simulation=null",
        "eval.steps=null",
    ]
    assert main(["train", *words, "table.version=v2.1", "table.codec=libx264"]) == 0
    words += "table.version=v2.1 table.codec=libx264 resume=auto train.max_steps=3".split()
    capsys.readouterr()
    assert main(["train", *words, "actions.normalize=min_max"]) == EXIT_USER_ERROR
    assert "another normalization (mode)" in capsys.readouterr().err
    # An evaluation uses the statistics of the checkpoint.
    losses = []
    for mode in ("mean_std", "min_max"):
        capsys.readouterr()
        assert (
            main(["evaluate", *words, f"actions.normalize={mode}", "log.backends=[terminal]"]) == 0
        )
        losses.append(re.search(r"eval step .* loss (\S+)", capsys.readouterr().out))
    assert losses[0]
    assert losses[1]
    assert losses[0][1] == losses[1][1]
    assert main(["train", *words]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("words", [["gpu1"], ["gpu8", "parallel.shard=1"]], ids=str)
def test_table_vla_gpu_configs_train_a_folder_of_pi0(words, tmp_path, capsys):
    transformers_pi0(tiny_pi0()).save_pretrained(tmp_path / "pi0")
    word_tokenizer(["task", "0", "1"]).save_pretrained(tmp_path / "pi0")
    root = write_folder(tmp_path / "robot", "v3.0", "libx264")
    given = [
        f"model.path={tmp_path / 'pi0'}",
        f"data.sources.robot.path={root}",
        "data.sources.robot.hold_out=0.34",
    ]
    given += f"output_dir={tmp_path} data.cache={tmp_path} data.num_workers=0 train.precision=fp32".split()
    name, *others = words
    assert mvp(f"check {CONFIGS}/{name}.yaml", *given, *others, "--json") == 0
    facts = printed_json(capsys)
    assert facts["ok"], facts


def test_rollouts_of_a_robot_without_an_environment_are_a_user_error():
    engine_class, _ = find_engine("table_vla", CONFIGS / "cpu.yaml")
    engine = SimpleNamespace(config=SimpleNamespace(table=None))
    with user_error(
        "only the demonstrations of `table` have this environment. Set simulation=null"
    ):
        engine_class.make_env(engine, 2)


def test_noisy_actions_of_a_recipe_are_what_velocities_are_computed_at():
    model = tiny_pi0()
    row = probe_batch(model, 1, 3, seed=0)
    fields = row.sequence_fields
    clean, noise = fields["action_chunk"][:, None], fields["action_noise"]
    on_line = flow.noisy_sample(clean.expand_as(noise), noise, fields["action_times"])
    with torch.no_grad():
        velocities = [
            model(row, ["velocity"], noisy=noisy)["velocity"]
            for noisy in (None, on_line, on_line + 1)
        ]
    assert torch.equal(velocities[0], velocities[1])
    assert not torch.allclose(velocities[0], velocities[2], atol=1e-3)


@CAMPAIGN
def test_table_vla_readme_command_learns_the_task(tmp_path):
    words = [str(CONFIGS / "cpu.yaml"), f"output_dir={tmp_path}", "log.backends=[jsonl]"]
    assert main(["train", *words]) == 0
    assert main(["evaluate", *words, "resume=auto", "simulation.episodes=200"]) == 0
    metrics = read_metrics(tmp_path, "eval")[-1]
    assert metrics["success"] >= 0.8
    assert metrics["success_without_instruction"] <= 0.35
