"""The export of a chunk regressor acts as the engine does, with transformers alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_files import read_json, write_json
from test_action_cotrain import TEXTS, regressor_config
from transformers import AutoProcessor

from mvp_engine.config import compose
from mvp_engine.distributed import World
from mvp_engine.imports import import_file
from mvp_engine.kit.actions import act
from mvp_engine.kit.actions.simulation import Observation
from mvp_engine.kit.actions.write import LeRobotWriter
from mvp_engine.kit.tiny_processors import make_qwen3_vl_processor
from mvp_engine.runs import Run

CAMERAS = {"observation.images.top": (48, 64), "observation.images.wrist": (32, 32)}


def write_robot(root):
    dice = np.random.default_rng(0)
    sizes = {"observation.state": 4, "action": 3}
    with LeRobotWriter(root, fps=10, sizes=sizes, cameras=CAMERAS, codec=None) as writer:
        for episode in range(2):
            columns = {
                key: dice.normal(3, 2, (6, size)).astype(np.float32) for key, size in sizes.items()
            }
            images = {
                name: dice.integers(0, 255, (6, *size, 3), np.uint8)
                for name, size in CAMERAS.items()
            }
            writer.add(columns, images, f"task {episode}")
    return str(root)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """After two steps at a high learning rate, on relative actions."""
    folder = tmp_path_factory.mktemp("regressor")
    processor = make_qwen3_vl_processor(TEXTS, 300)
    processor.save_pretrained(folder / "processor")
    values = {
        "engine": "table_vla",
        "processor": str(folder / "processor"),
        "run_name": "regressor",
        "cpu_threads": 1,
        "model": {
            "type": "action_model",
            "config": {"model_type": "qwen3_vl", **regressor_config(processor)},
        },
        "actions": {"relative": [1]},
        "data": {
            "sources": {"robot": {"path": write_robot(folder / "robot")}},
            "pack_tokens": 256,
            "global_batch_size": 2,
            "num_workers": 0,
        },
        "train": {"max_steps": 2},
        "optim": {"lr": 1e-2, "schedule": "constant"},
        "log": {"interval": 1, "backends": ["jsonl"]},
        "checkpoint": {"interval": None},
    }
    write_json(folder / "train.yaml", values)
    composed = compose(folder / "train.yaml", [])
    made: Any = composed.engine_class(
        composed.config, World.join("cpu"), Run.create(folder, "regressor", None)
    )
    with made:
        made.train()
        yield made


def observations():
    """With one and two cameras, prompts of different lengths, and a frame of another size."""
    dice = np.random.default_rng(1)
    seen = []
    for at, task in enumerate(("task 0", "task 1 task 1", "task 0 task")):
        sizes = dict.fromkeys(list(CAMERAS)[: 1 + at % 2], (40 + 8 * at, 64))
        images = {name: dice.integers(0, 255, (*size, 3), np.uint8) for name, size in sizes.items()}
        seen.append(Observation(images, dice.normal(3, 2, 4).astype(np.float32), task))
    return seen


@pytest.mark.slow
def test_regressor_export_acts_as_the_engine_and_not_without_its_statistics(engine):
    seen = observations()
    expected = engine.act(seen, 0, [(0, 0), (1, 0), (2, 0)])
    folder = engine.export()
    policy = import_file(folder / "act.py").Policy.from_pretrained(str(folder))
    images, states, tasks = zip(*((one.images, one.state, one.task) for one in seen), strict=True)
    found = policy.act_batch(images, np.stack(states), tasks)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        policy.act(images[1], states[1], tasks[1]), expected[1], rtol=1e-5, atol=1e-5
    )
    # It reads the instruction.
    assert np.abs(found[0] - policy.act(images[0], states[0], "task 1")).max() > 1e-4
    with pytest.raises(ValueError, match="no noise"):
        policy.act(images[0], states[0], tasks[0], torch.zeros(4, 5))
    for wrong in (
        images[0][next(iter(CAMERAS))] / 255,
        images[0][next(iter(CAMERAS))].transpose(2, 0, 1),
    ):
        with pytest.raises(ValueError, match=r"needs \(height, width, 3\) of uint8"):
            policy.act(dict.fromkeys(images[0], wrong), states[0], tasks[0])
    spec = read_json(folder / "normalization.json")
    spec["action"]["std"] = [1.0, 1.0, 1.0]
    write_json(folder / "normalization.json", spec)
    other = act.Policy.from_pretrained(folder).act_batch(images, np.stack(states), tasks)
    assert np.abs(other - expected).max() > 1e-2
    (folder / "normalization.json").unlink()
    with pytest.raises(FileNotFoundError, match="normalization"):
        act.Policy.from_pretrained(folder)
    assert "Policy.from_pretrained(folder)" in (folder / "README.md").read_text()
    assert AutoProcessor.from_pretrained(folder)


def test_act_file_imports_nothing_but_torch_numpy_and_transformers():
    tree = ast.parse(Path(act.__file__).read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    # The last two come with transformers.
    needs = {"torch", "numpy", "transformers"} | {
        "safetensors",
        "PIL",
    }
    assert found - set(sys.stdlib_module_names) <= needs
