"""Estimates of memory and time are near what was measured on a GPU, and go the way that settings push them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from test_recipe import recipe  # noqa: F401 - a fixture

from mvp_engine.cli import main
from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.imports import import_file
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.model_engine import ModelSource
from mvp_engine.model_engine.fsdp.parallelize import cast_frozen_base, freeze
from mvp_engine.tools.estimate_memory import FP8, Setting, estimate

data: Any = import_file(ROOT / "benchmarks" / "sft" / "data.py")
PIXELS = data.Pixels()
LARGE = {"state_dtype": "int8", "activation_checkpointing": "selective"}


@pytest.mark.parametrize(
    (
        "file",
        "mix",
        "shape",
        "packs",
        "sides",
    ),  # how, and steps; the first five do not count
    [
        ("text_sft", "mix", "qwen3_1_7b", 2, {"ours": ({}, 15), "ours, fp8": ({"fp8": True}, 15)}),
        ("text_sft", "full", "qwen3_1_7b", 2, {"ours": ({}, 10)}),
        ("text_8b", "mix", "qwen3_8b", 4, {"ours": (LARGE, 20)}),
        ("vlm_sft", "images", "qwen3_vl_2b", 2, {"ours": ({}, 20), "ours, fp8": ({"fp8": True}, 10)}),
    ],
)
def test_estimates_are_within_a_tenth_of_what_was_measured(
    file: str, mix: str, shape: str, packs: int, sides: dict[str, tuple[dict[str, Any], int]]
) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
    model, pixels, size = LanguageModel.on_meta(None, data.shape(shape)), data.Pixels(), data.PER_STEP[mix]
    rows = data.rows(mix, max(steps for _, steps in sides.values()))
    chosen = [pack for i in range(0, len(rows), size) for pack in data.balanced(rows[i : i + size], packs)]
    largest = max(chosen, key=lambda some: sum(len(row.ids) + sum(h * w for h, w in row.grids) / 2 for row in some))
    heaviest = data.packed(largest, shape, pixels)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for step in range(5, len(chosen) // packs):
        of_step = [data.packed(some, shape, pixels) for some in chosen[packs * step : packs * (step + 1)]]
        for side, (how, steps) in sides.items():
            if step < steps:
                found[side].append(estimate(model, [heaviest], of_step, Setting("NVIDIA H200", **how)))
    for side, told in found.items():
        measured = next(row for row in result["rows"] if (row["side"], row["mix"]) == (side, mix))
        assert told[0]["peak_gib"] == pytest.approx(measured["memory_gib"], rel=0.1), side
        mean = sum(one["step_s"] for one in told) / len(told)
        assert 1e3 * mean == pytest.approx(measured["step_ms"], rel=0.1), side


def test_settings_change_what_they_should() -> None:
    shape, plain = data.shape("qwen3_vl_2b"), Setting()
    model, pixels = LanguageModel.on_meta(None, shape), data.Pixels()
    batch = data.packed(data.rows("images", 1)[:6], "qwen3_vl_2b", pixels)

    def told(setting: Setting, model: Any = model) -> dict[str, Any]:
        return estimate(model, [batch], [batch] * 2, setting)

    base = told(plain)
    kept = base["memory_gib"]["activations"]
    full, some = (
        told(replace(plain, activation_checkpointing=way))["memory_gib"]["activations"] for way in ("full", "selective")
    )
    assert full < some < kept
    assert told(replace(plain, compile={"llm": "inductor"}))["memory_gib"]["activations"] > kept
    assert told(replace(plain, activation_checkpointing={"vision": "full"}))["memory_gib"]["activations"] < kept
    assert told(replace(plain, state_dtype="int8"))["memory_gib"]["moments"] < base["memory_gib"]["moments"] / 3
    shared = told(replace(plain, shard=8))["memory_gib"]
    assert shared["weights"] == pytest.approx(base["memory_gib"]["weights"] / 8)
    assert told(replace(plain, ulysses=2))["memory_gib"]["activations"] < kept
    assert told(replace(plain, gpu="RTX 4090"))["step_s"] > 3 * base["step_s"]
    assert not told(replace(plain, gpu="RTX 4090"))["fits"]
    adapted = MLLMModelKit(Lora(rank=8)).build(ModelSource(None, shape))
    lora = told(plain, adapted)["memory_gib"]
    assert lora["moments"] < base["memory_gib"]["moments"] / 20
    assert lora["activations"] < kept  # the encoder is frozen, and nothing before it trains
    frozen = LanguageModel.on_meta(None, shape)
    freeze(frozen, ["llm"])
    assert told(plain, frozen)["memory_gib"]["activations"] == pytest.approx(kept)  # gradients pass through it


def test_what_ranks_share_and_what_each_does_whole() -> None:
    shape, plain = data.shape("qwen3_vl_2b"), Setting()
    model, batch = LanguageModel.on_meta(None, shape), data.packed(data.rows("images", 1)[:6], "qwen3_vl_2b", PIXELS)
    text = replace(batch, media={})
    alone, shared = (estimate(model, [batch], [batch], replace(plain, ulysses=n)) for n in (1, 4))
    words = estimate(model, [batch], [text], replace(plain, ulysses=4))["seconds"]
    for name in ("weights", "gradients", "moments"):  # ranks that share sequences hold shards
        assert shared["memory_gib"][name] == pytest.approx(alone["memory_gib"][name] / 4)
    assert shared["seconds"]["optimizer"] == pytest.approx(alone["seconds"]["optimizer"] / 4)
    for name in ("matrix products", "attention"):  # the encoder is run whole by each of them
        encoder = alone["seconds"][name] - 4 * words[name]
        assert encoder > 0.2 * alone["seconds"][name]
        assert shared["seconds"][name] == pytest.approx(words[name] + encoder)


def test_adapters_on_a_base_in_bf16() -> None:
    """Its weights are there once, nothing is kept for a gradient of the head, and its 8-bit products are no more than
    the products that there are."""
    shape = {**data.shape("qwen3_8b"), "dtype": "bfloat16"}
    batch = data.packed(data.rows("mix", 1)[:8], "qwen3_8b", PIXELS)
    model: Any = MLLMModelKit(Lora(rank=16)).build(ModelSource(None, shape))
    cast_frozen_base(model, torch.bfloat16)
    base = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    found = estimate(model, [batch], [batch], Setting())
    assert found["memory_gib"]["weights"] * 2**30 == pytest.approx(2 * base, rel=0.03)
    assert found["memory_gib"]["weights in bf16"] < 0.2
    assert found["memory_gib"]["loss"] < 2.0  # a chunk of logits
    whole = estimate(LanguageModel.on_meta(None, shape), [batch], [batch], Setting())["memory_gib"]
    assert found["memory_gib"]["activations"] == pytest.approx(whole["activations"], rel=0.05)
    low = estimate(model, [batch], [batch], Setting(fp8=True))["seconds"]["matrix products"]
    assert found["seconds"]["matrix products"] / FP8 < low < found["seconds"]["matrix products"]


def test_what_is_frozen_keeps_what_trained_parts_before_it_need() -> None:
    vision = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {k: v for k, v in data.shape("small").items() if k not in ("model_type", "tie_word_embeddings")}
    shape = {"model_type": "llava", "image_token_index": 7}
    shape |= {
        "vision_config": {"model_type": "clip_vision_model", **vision},
        "text_config": {**text, "model_type": "qwen3"},
    }
    ids, pixels = torch.full((600,), 7), torch.zeros(1, 3, 336, 336)
    media = {"pixel_values": Media(pixels, torch.ones(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), {})}
    batch = PackedBatch.from_sequences([ids], media=media)

    def kept(*frozen: str) -> float:
        model = LanguageModel.on_meta(None, shape)
        freeze(model, frozen)
        return estimate(model, [batch], [batch], Setting())["memory_gib"]["activations"]

    assert kept("llm", "vision") == pytest.approx(kept("vision"))  # the projector trains, through all text layers
    assert 0 < kept("vision") < kept()
    assert kept("llm", "vision", "projector") == 0


def test_recomputing_takes_the_time_of_another_forward() -> None:
    model = LanguageModel.on_meta(None, data.shape("qwen3_8b"))
    batch = data.packed(data.rows("mix", 1)[:8], "qwen3_8b", PIXELS)
    none, some, full = (
        estimate(model, [batch], [batch], Setting(activation_checkpointing=way))
        for way in ("none", "selective", "full")
    )
    assert none["step_s"] == some["step_s"]  # what it computes again is not known to a tenth
    assert full["seconds"]["attention"] == pytest.approx(none["seconds"]["attention"] * 4 / 3)
    assert 1.25 < full["seconds"]["matrix products"] / none["seconds"]["matrix products"] < 4 / 3  # but for the head
    assert full["mfu"] < none["mfu"]


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
    assert main(["estimate", config, "--gpus", "4", "parallel.replicate=2"]) == 2
    assert "needs 2. parallel.replicate=-1" in capsys.readouterr().err
    assert main(["estimate", config, "--gpus", "3", "data.global_batch_size=4"]) == 2  # as a training would
    assert "nearest that fit" in capsys.readouterr().err
