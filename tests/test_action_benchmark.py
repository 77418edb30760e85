"""benchmarks/actions.py: both sides train what they say, and the script runs on a CPU."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import torch
from conftest import CAMPAIGN, ROOT
from run_files import read_json

from mvp_engine.config import compose
from mvp_engine.imports import import_file

SCRIPT = ROOT / "benchmarks" / "actions.py"
BENCH = import_file(SCRIPT)
ARGS = Namespace(tiny=True, workers=0, steps=2)


def test_action_benchmark_config_of_ours_is_valid_and_has_room_for_the_samples(
    tmp_path,
):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "robot").mkdir()
    config = compose(BENCH.ours_config(tmp_path, ARGS, 4, "full", 2)).config
    assert config.data.pack_tokens == 4 * (3 * 16 + 32)
    assert config.actions.draws == 2
    assert config.model.type == "action_model"


def test_action_benchmark_real_shape_is_pi0s_own():
    from transformers import AutoConfig

    config = AutoConfig.for_model(**BENCH.model_config(tiny=False))
    assert config.chunk_size == 50
    assert config.vlm_config.text_config.hidden_size == 2048
    assert BENCH.tokens_of_a_sample(tiny=False) == 3 * 256 + 32


def test_action_benchmark_batch_of_transformers_trains_all_samples():
    found = BENCH.theirs(Path(), ARGS, ["2"])
    assert found["samples"] == 2
    assert torch.tensor(found["loss"]).isfinite()
    assert found["samples_per_s"] > 0


@CAMPAIGN
def test_action_benchmark_runs_on_a_cpu(tmp_path):
    out = tmp_path / "out.json"
    words = "--tiny --steps 4 --episodes 2 --workers 0 --ours 4:full:2 4:none:1".split()
    command = [sys.executable, str(SCRIPT), *words, "--theirs", "4", "--out", str(out)]
    subprocess.run(
        command, check=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, timeout=600
    )
    found = read_json(out)
    assert [row["side"] for row in found["rows"]] == ["ours", "ours", "transformers"]
    assert all(row["samples_per_s"] > 0 for row in found["rows"])
    assert found["ratio"] > 0
