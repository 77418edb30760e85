"""Estimates of memory and time are near what was measured on a GPU, and go the way that settings push them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from test_recipe import recipe  # noqa: F401 - a fixture

from mvp_engine.cli import main
from mvp_engine.imports import import_file
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.kit.estimate import Setting, estimate
from mvp_engine.model_engine import ModelSource
from mvp_engine.model_engine.fsdp.build import freeze
from mvp_engine.model_engine.packed import LanguageModel

data: Any = import_file(ROOT / "benchmarks" / "sft" / "data.py")
STEPS = {"mix": 15, "full": 10, "images": 15}  # of the benchmarks; the first five do not count


@pytest.mark.parametrize(
    ("file", "side", "mix", "shape"),
    [
        ("text_sft", "ours", "mix", "qwen3_1_7b"),
        ("text_sft", "ours, fp8", "mix", "qwen3_1_7b"),
        ("text_sft", "ours", "full", "qwen3_1_7b"),
        ("vlm_sft", "ours", "images", "qwen3_vl_2b"),
    ],
)
def test_estimates_are_within_a_tenth_of_what_was_measured(file: str, side: str, mix: str, shape: str) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
    measured = next(row for row in result["rows"] if (row["side"], row["mix"]) == (side, mix))
    model, pixels, size = LanguageModel.on_meta(None, data.shape(shape)), data.Pixels(), data.PER_STEP[mix]
    rows = data.rows(mix, STEPS[mix])
    chosen = [pack for i in range(0, len(rows), size) for pack in data.balanced(rows[i : i + size], 2)]
    largest = max(chosen, key=lambda some: sum(len(row.ids) + sum(h * w for h, w in row.grids) / 2 for row in some))
    heaviest, seconds = data.packed(largest, shape, pixels), []
    for step in range(5, STEPS[mix]):
        packs = [data.packed(some, shape, pixels) for some in chosen[2 * step : 2 * step + 2]]
        found = estimate(model, [heaviest], packs, Setting("NVIDIA H200", fp8="fp8" in side))
        seconds.append(found["step_s"])
    assert found["peak_gib"] == pytest.approx(measured["memory_gib"], rel=0.1)
    assert 1e3 * sum(seconds) / len(seconds) == pytest.approx(measured["step_ms"], rel=0.1)


def test_memory_of_a_model_of_eight_billion_that_recomputes() -> None:
    (measured,) = json.loads((ROOT / "benchmarks" / "results" / "text_8b.json").read_text())["rows"]
    rows = data.rows("mix", 5)
    chosen = [pack for i in range(0, len(rows), 32) for pack in data.balanced(rows[i : i + 32], 4)]
    heaviest = data.packed(max(chosen, key=lambda pack: sum(len(row.ids) for row in pack)), "qwen3_8b", data.Pixels())
    setting = Setting("NVIDIA H200", recompute="selective", moments="int8")
    found = estimate(LanguageModel.on_meta(None, data.shape("qwen3_8b")), [heaviest], [heaviest], setting)
    assert found["peak_gib"] == pytest.approx(measured["memory_gib"], rel=0.05)


def test_settings_change_what_they_should() -> None:
    shape, plain = data.shape("qwen3_vl_2b"), Setting()
    model, pixels = LanguageModel.on_meta(None, shape), data.Pixels()
    batch = data.packed(data.rows("images", 1)[:6], "qwen3_vl_2b", pixels)

    def told(setting: Setting, model: Any = model) -> dict[str, Any]:
        return estimate(model, [batch], [batch] * 2, setting)

    base = told(plain)
    kept = base["memory_gib"]["activations"]
    full, some = (told(replace(plain, recompute=way))["memory_gib"]["activations"] for way in ("full", "selective"))
    assert full < some < kept
    assert told(replace(plain, compile={"llm": "inductor"}))["memory_gib"]["activations"] > kept
    assert told(replace(plain, recompute={"vision": "full"}))["memory_gib"]["activations"] < kept
    assert told(replace(plain, moments="int8"))["memory_gib"]["moments"] < base["memory_gib"]["moments"] / 3
    shared = told(replace(plain, shard=8))["memory_gib"]
    assert shared["weights"] == pytest.approx(base["memory_gib"]["weights"] / 8)
    assert told(replace(plain, sequence=2))["memory_gib"]["activations"] < kept
    assert told(replace(plain, gpu="RTX 4090"))["step_s"] > 3 * base["step_s"]
    assert not told(replace(plain, gpu="RTX 4090"))["fits"]
    adapted = MLLMModelKit(Lora(rank=8)).build(ModelSource(None, shape))
    lora = told(plain, adapted)["memory_gib"]
    assert lora["moments"] < base["memory_gib"]["moments"] / 20
    assert lora["activations"] < kept  # the encoder is frozen, and nothing before it trains
    frozen = LanguageModel.on_meta(None, shape)
    freeze(frozen, ["llm"])
    assert told(plain, frozen)["memory_gib"]["activations"] == pytest.approx(kept)  # gradients pass through it


def test_the_command_tells_people_and_programs(recipe: Path, capsys: Any) -> None:  # noqa: F811
    config = str(next(recipe.glob("chat/**/*.yaml")))
    assert main(["estimate", config, "--gpu", "A100", "--gpus", "2"]) == 0
    assert "2 x A100" in (text := capsys.readouterr().out)
    assert "fits" in text
    assert main(["estimate", config, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gpu"] == "H200"
    assert told["peak_gib"] == pytest.approx(sum(told["memory_gib"].values()))
    assert told["eta_s"] == pytest.approx(told["steps"] * told["step_s"])
    assert main(["estimate", config, "--gpu", "abacus"]) == 2
    assert main(["estimate", config, "--gpus", "3", "parallel.shard=2"]) == 2
    assert "needs a multiple of 2" in capsys.readouterr().err
