"""benchmarks/optimizer_states.py: figures of each optimizer, reasons of failures, comparison after resharding."""

import importlib

import pytest
import torch
from conftest import ROOT


@pytest.fixture
def states(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("optimizer_states")


@pytest.fixture
def resharding(states):
    return importlib.import_module("optimizer_resharding")


def test_benchmark_of_optimizers_gives_bytes_and_times_or_the_reason_of_a_failure(
    states, monkeypatch
):
    monkeypatch.setitem(states.OPTIMIZERS, "broken", lambda model: 1 / 0)
    model = states.Parameters({"matrix": (32, 256), "vector": (64,)}, "cpu")
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    names = [states.OURS, "torch fused AdamW, float32", "broken"]
    rows = [states.measure(states.start(name, model), model, rounds=2) for name in names]
    int8, float32, broken = rows
    codes_and_scales = 2 * (32 * 256 + 4 * 32 * 2)  # two scales in each row of 256
    assert int8["state_bytes_per_param"] == (codes_and_scales + 8 * 64) / (32 * 256 + 64)
    assert float32["state_bytes_per_param"] == 8
    assert min(int8["step_ms"], float32["step_ms"]) > 0
    assert broken == {"optimizer": "broken", "why": "ZeroDivisionError: division by zero"}
    lines = states.table(
        [{**int8, "reshard": {"qwen3 4 -> 2": "fails"}}, float32, broken]
    ).splitlines()
    assert len({line.count("|") for line in lines}) == 1


def test_benchmark_of_qwen3_has_the_number_of_parameters_of_the_model(states):
    shapes = states.MODELS["qwen3-1.7b"].values()
    assert sum(torch.Size(shape).numel() for shape in shapes) == 1_720_574_976


def test_benchmark_of_resharding_on_one_rank_finds_equal_states_and_a_changed_one(
    resharding, monkeypatch, tmp_path
):
    monkeypatch.setattr(resharding, "MODELS", {"small": {"matrix": (6, 130)}})
    for phase in ("save", "load"):
        resharding.reshard_worker(resharding.OURS, phase, tmp_path)
    assert resharding.compare(tmp_path, "small") == "2 of 2 equal"
    assert resharding.saved_bytes(tmp_path, "small") == 2 * (6 * 130 + 4 * 6 * 2) / (6 * 130)
    file = tmp_path / "small.load.0.pt"
    values = torch.load(file)
    values["states"]["weights.matrix/exp_avg"][1][0, 0] += 1
    torch.save(values, file)
    assert resharding.compare(tmp_path, "small") == "1 of 2 equal (not weights.matrix/exp_avg)"
