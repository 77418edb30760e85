"""Estimates of memory and time are near measurements on a GPU, and settings change them as expected."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, mvp
from run_files import printed_json, read_json
from test_recipe import recipe  # noqa: F401 - a fixture

from mvp_engine.cli import main
from mvp_engine.config.schema import CHECKPOINTING_MODES
from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.lora.quantize import quantize_layers
from mvp_engine.hf.media.shared_media import largest_share
from mvp_engine.hf.model.adapter import cast_frozen_base
from mvp_engine.imports import import_file
from mvp_engine.kit import Lora, MLLMData, MLLMModelKit
from mvp_engine.kit.data.pack.packer import make_packs
from mvp_engine.kit.plan.choice import Workload, choose
from mvp_engine.kit.plan.costs import FP8_SPEEDUP, BlockCosts, PlanSettings
from mvp_engine.kit.plan.hardware import GPUS, gpu_by_name
from mvp_engine.kit.plan.packs import SampledBatches
from mvp_engine.kit.plan.step import (
    ATTENTION_EFFICIENCY,
    DYNAMIC,
    GEMM_EFFICIENCY,
    REST,
    attention_efficiency,
    estimate_step,
    micro_batch_seconds,
)
from mvp_engine.model_engine import ModelSource
from mvp_engine.model_engine.fsdp.parallelize import freeze

data: Any = import_file(ROOT / "benchmarks" / "sft" / "data.py")
PIXELS = data.Pixels()
TABLE = read_json(ROOT / "benchmarks" / "results" / "plan.json")["rows"]  # of docs/plan.md


def on_meta(shape):
    return LanguageModel.on_meta(None, data.shape(shape))


def packed(shape, rows, mix="mix"):
    return data.packed(data.rows(mix, 1)[:rows], shape, PIXELS)


def estimated(model, batch, **settings):
    return estimate_step(model, [batch], [batch], PlanSettings(**settings))


LARGE = {"state_dtype": "int8", "activation_checkpointing": "selective"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, mix, shape, packs, sides",  # sides: settings and number of steps; the first five steps warm up
    [
        ("text_sft", "mix", "qwen3_1_7b", 2, {"ours": ({}, 15), "ours, fp8": ({"fp8": True}, 15)}),
        ("text_sft", "full", "qwen3_1_7b", 2, {"ours": ({}, 10)}),
        ("text_8b", "mix", "qwen3_8b", 4, {"ours": (LARGE, 20)}),
        (
            "vlm_sft",
            "images",
            "qwen3_vl_2b",
            2,
            {"ours": ({}, 20), "ours, fp8": ({"fp8": True}, 10)},
        ),
    ],
)
def test_plan_is_within_ten_percent_of_measurements(file, mix, shape, packs, sides):
    result = read_json(ROOT / "benchmarks" / "results" / f"{file}.json")
    model, pixels, size = (
        LanguageModel.on_meta(None, data.shape(shape)),
        data.Pixels(),
        data.PER_STEP[mix],
    )
    rows = data.rows(mix, max(steps for _, steps in sides.values()))
    chosen = [
        pack for i in range(0, len(rows), size) for pack in data.balanced(rows[i : i + size], packs)
    ]
    largest = max(
        chosen,
        key=lambda some: sum(len(row.ids) + sum(h * w for h, w in row.grids) / 2 for row in some),
    )
    heaviest = data.packed(largest, shape, pixels)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    stride = 8 if mix == "images" else 1  # whose batches take long to make
    for step in range(5, len(chosen) // packs, stride):
        of_step = [
            data.packed(some, shape, pixels) for some in chosen[packs * step : packs * (step + 1)]
        ]
        for (
            batch
        ) in of_step:  # measured when the head still computed logits of tokens without a label
            batch.labels = batch.input_ids.clone()
        for side, (settings, steps) in sides.items():
            if step < steps:
                settings = PlanSettings(gpu="NVIDIA H200", **settings)
                found[side].append(estimate_step(model, [heaviest], of_step, settings))
    for side, estimates in found.items():
        measured = next(row for row in result["rows"] if (row["side"], row["mix"]) == (side, mix))
        assert estimates[0]["peak_gib"] == pytest.approx(measured["memory_gib"], rel=0.1), side
        row = result["rows"].index(measured)
        [of_docs] = [one for one in TABLE if (one["file"], one["row"]) == (file, row)]
        assert estimates[0]["peak_gib"] == pytest.approx(of_docs["predicted_gib"], abs=0.1), side
        mean = sum(one["step_s"] for one in estimates) / len(estimates)
        assert 1e3 * mean == pytest.approx(measured["step_ms"], rel=0.1), side


def test_gradients_of_one_micro_batch_take_the_place_of_activations():
    model = on_meta("qwen3_1_7b")
    for batch in [packed("qwen3_1_7b", size) for size in (12, 1)]:
        one, two = (
            estimate_step(model, [batch], [batch] * count, PlanSettings()) for count in (1, 2)
        )
        gradients = two["memory_gib"]["gradients"]
        dynamic = sum(two["memory_gib"][kind] for kind in DYNAMIC)
        assert two["peak_gib"] - one["peak_gib"] == pytest.approx(min(gradients, dynamic))


def test_plan_settings_change_memory_and_time_as_expected():
    model, batch = on_meta("qwen3_vl_2b"), packed("qwen3_vl_2b", 6, "images")

    def step(model=model, **settings):
        return estimate_step(model, [batch], [batch] * 2, PlanSettings(**settings))

    def memory(model=model, **settings):
        return step(model, **settings)["memory_gib"]

    base = memory()
    kept = base["activations"]
    full, some = (
        memory(activation_checkpointing=mode)["activations"] for mode in ("full", "selective")
    )
    assert full < some < kept
    assert memory(compile={"llm": "inductor"})["activations"] > kept
    assert memory(activation_checkpointing={"vision": "full"})["activations"] < kept
    assert memory(state_dtype="int8")["optimizer states"] < base["optimizer states"] / 3
    shared = memory(shard=8)
    assert shared["weights"] == pytest.approx(base["weights"] / 8)
    gathered = memory(shard=8, reshard=False)["all-gathered weights"]
    everything = sum(param.numel() for param in model.parameters()) * 2 / 2**30  # in bf16
    assert (
        shared["all-gathered weights"]
        < everything
        < gathered
        < everything + shared["all-gathered weights"]
    )
    assert memory(ulysses=2)["activations"] < kept
    slow = step(gpu="RTX 4090")
    assert slow["step_s"] > 3 * step()["step_s"]
    assert not slow["fits"]
    lora = memory(MLLMModelKit(Lora(rank=8)).build(ModelSource(None, data.shape("qwen3_vl_2b"))))
    assert lora["optimizer states"] < base["optimizer states"] / 20
    assert lora["activations"] < kept  # the encoder is frozen, and nothing before it trains
    frozen = on_meta("qwen3_vl_2b")
    freeze(frozen, ["llm"])
    assert memory(frozen)["activations"] == pytest.approx(kept)  # gradients pass through it


@pytest.mark.parametrize("dimension", ["ulysses", "context"])
def test_plan_sequence_ranks_shard_text_and_weights_and_share_images(dimension):
    model, batch = on_meta("qwen3_vl_2b"), packed("qwen3_vl_2b", 6, "images")
    text = replace(batch, media={})
    alone, shared = (estimated(model, batch, **{dimension: n}) for n in (1, 4))
    words = estimate_step(model, [batch], [text], PlanSettings(**{dimension: 4}))["seconds"]  # type: ignore[arg-type]
    for name in ("weights", "gradients", "optimizer states"):  # FSDP shards over these ranks
        assert shared["memory_gib"][name] == pytest.approx(alone["memory_gib"][name] / 4)
    assert shared["seconds"]["optimizer"] == pytest.approx(alone["seconds"]["optimizer"] / 4)
    share = largest_share(batch.media["pixel_values"], 4)
    assert 0.25 <= share < 0.6
    for name in ("GEMM", "attention"):
        encoder = alone["seconds"][name] - 4 * words[name]
        assert encoder > 0.2 * alone["seconds"][name]
        assert shared["seconds"][name] == pytest.approx(words[name] + share * encoder)


def test_plan_context_keeps_gathered_keys_unless_checkpointed():
    model = on_meta("qwen3_vl_2b")
    batch = replace(packed("qwen3_vl_2b", 6, "images"), media={})
    kept = {}
    for mode in ("none", "full"):
        both = (
            estimated(model, batch, activation_checkpointing=mode, **ranks)
            for ranks in ({"ulysses": 4}, {"context": 4})
        )
        ulysses, context = (facts["memory_gib"]["activations"] for facts in both)
        kept[mode] = context - ulysses
    config = model.hf.config.get_text_config()
    row = 2 * config.num_key_value_heads * config.head_dim * 2  # keys and values in bf16
    assert kept["none"] == pytest.approx(
        config.num_hidden_layers * row * batch.num_tokens * (1 + 1 / 8) / 2**30
    )
    assert kept["full"] == 0


def test_plan_of_lora_on_a_bf16_base():
    """The base weights are stored once, the head has no gradient, and FP8 speeds up no more than all GEMMs."""
    shape = {**data.shape("qwen3_8b"), "dtype": "bfloat16"}
    batch = packed("qwen3_8b", 8)
    model: Any = MLLMModelKit(Lora(rank=16)).build(ModelSource(None, shape))
    cast_frozen_base(model, torch.bfloat16)
    base = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    found = estimated(model, batch)
    assert found["memory_gib"]["weights"] * 2**30 == pytest.approx(2 * base, rel=0.03)
    assert found["memory_gib"]["bf16 weight copies"] < 0.2
    assert found["memory_gib"]["loss"] < 2.0  # a chunk of logits
    whole = estimated(LanguageModel.on_meta(None, shape), batch)["memory_gib"]
    assert found["memory_gib"]["activations"] == pytest.approx(whole["activations"], rel=0.05)
    low = estimated(model, batch, fp8=True)["seconds"]["GEMM"]
    assert found["seconds"]["GEMM"] / FP8_SPEEDUP < low < found["seconds"]["GEMM"]


def test_plan_counts_experts_in_fp8_on_gpus_that_have_them():
    """Their outputs and input gradients; on other GPUs bf16 copies of experts are kept for backward."""
    model: Any = on_meta("qwen3_a3b_6")
    batch = packed("qwen3_a3b_6", 8)
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    # FLOPs of outputs, input gradients.
    stacked = 2 * 2 * 8 / 128 * sum(p.numel() for p in experts) * batch.num_tokens
    saved = {}
    for gpu in ("H200", "L40S"):
        plain, low = (estimated(model, batch, gpu=gpu, fp8=low) for low in (False, True))
        flops = GEMM_EFFICIENCY * gpu_by_name(gpu).flops_per_s
        saved[gpu] = (plain["seconds"]["GEMM"] - low["seconds"]["GEMM"]) * flops
        copies = low["memory_gib"]["bf16 weight copies"] * 2**30
        assert (copies > 2 * sum(p.numel() for p in experts)) == (gpu == "L40S")
    assert saved["H200"] - saved["L40S"] == pytest.approx(stacked * (1 - 1 / FP8_SPEEDUP), rel=1e-3)


def test_plan_counts_weight_gradients_in_fp8():
    model: Any = on_meta("qwen3_8b")
    batch = packed("qwen3_8b", 8)
    both = (estimated(model, batch, fp8=low) for low in (True, "all"))
    gemm = [facts["seconds"]["GEMM"] for facts in both]
    assert 0.8 * gemm[0] < gemm[1] < 0.97 * gemm[0]


def test_plan_frozen_blocks_after_trained_ones_save_activations():
    vision = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    text = {
        k: v
        for k, v in data.shape("small").items()
        if k not in ("model_type", "tie_word_embeddings")
    }
    shape = {"model_type": "llava", "image_token_index": 7}
    shape |= {
        "vision_config": {"model_type": "clip_vision_model", **vision},
        "text_config": {**text, "model_type": "qwen3"},
    }
    ids, pixels = torch.full((600,), 7), torch.zeros(1, 3, 336, 336)
    media = {
        "pixel_values": Media(
            pixels, torch.ones(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), {}
        )
    }
    batch = PackedBatch.from_sequences([ids], media=media)

    def kept(*frozen):
        model = LanguageModel.on_meta(None, shape)
        freeze(model, frozen)
        return estimated(model, batch)["memory_gib"]["activations"]

    # The projector trains, through all text layers.
    assert kept("llm", "vision") == pytest.approx(kept("vision"))
    assert 0 < kept("vision") < kept()
    assert kept("llm", "vision", "projector") == 0


def test_plan_full_activation_checkpointing_adds_one_forward():
    model = on_meta("qwen3_8b")
    batch = packed("qwen3_8b", 8)
    none, some, attention, full, offload = (
        estimated(model, batch, activation_checkpointing=mode) for mode in CHECKPOINTING_MODES
    )
    assert none["step_s"] == some["step_s"]  # the time of selective checkpointing is not modelled
    # Backward of attention, whose scores are computed again, is 2.5 forwards.
    assert full["seconds"]["attention"] == pytest.approx(none["seconds"]["attention"] * 4.5 / 3.5)
    assert attention["seconds"] == {**full["seconds"], "attention": none["seconds"]["attention"]}
    assert 1.25 < full["seconds"]["GEMM"] / none["seconds"]["GEMM"] < 4 / 3  # but for the head
    assert full["mfu"] < none["mfu"]
    # Of 36 inputs of blocks, 35 wait on the host, and three are on the GPU.
    inputs = full["memory_gib"]["activations"]
    # The output of attention is as wide as the input of a block, and log-sum-exp is float32 for each of 32 heads.
    kept = attention["memory_gib"]["activations"] - 2 * inputs
    assert kept * 2**30 == pytest.approx(36 * 32 * 4 * batch.num_tokens)
    assert offload["memory_gib"]["activations"] == 0
    assert offload["host_gib"] == pytest.approx(inputs * 35 / 36)
    within = [one["memory_gib"]["block in backward"] for one in (full, offload)]
    assert within[1] - within[0] == pytest.approx(inputs * 3 / 36)
    assert offload["seconds"].pop("exposed copies") == 0
    assert offload["seconds"] == full["seconds"]


def test_plan_of_attention_of_long_sequences_is_near_its_measurements():
    """Forward and backward of 32 heads of 128; the short sequences of the second pack have few of its pairs.

    These were measured with cuDNN. The rate of the estimate is that of FlashAttention 4, which was measured on one
    sequence of 131,072 tokens: so what is compared is how the rate depends on lengths.
    """
    results = ROOT / "benchmarks" / "results"
    measured = read_json(results / "context_share.json")["rows"]
    packs = read_json(results / "recipe_attention.json")["rows"]
    tflops = {row["kernel"]: row["tflops"] for row in packs if row["pack"] == "1 x 131072"}
    faster = tflops["FlashAttention 4"] / tflops["cuDNN, ragged"]
    peak = gpu_by_name("H200").flops_per_s
    for mix, lengths in {
        "1 x 256k": [2**18],
        "128k and 64 x 2k": [2**17] + [2**11] * 64,
        "8 x 32k": [2**15] * 8,
    }.items():
        row = next(row for row in measured if (row["mix"], row["rank"]) == (mix, "whole pack"))
        batch = PackedBatch.from_sequences(
            [torch.zeros(length, dtype=torch.long) for length in lengths]
        )
        flops = 3 * 4 * 32 * 128 * sum(length * (length + 1) / 2 for length in lengths)
        ms = 1e3 * flops / (attention_efficiency(batch) / REST * peak)
        assert ms * faster == pytest.approx(row["forward_ms"] + row["backward_ms"], rel=0.05)
    short = PackedBatch.from_sequences([torch.zeros(8192, dtype=torch.long)] * 2)
    assert attention_efficiency(short) == ATTENTION_EFFICIENCY


def test_plan_offload_waits_for_copies_over_a_slow_link():
    model = on_meta("qwen3_8b")
    batch = packed("qwen3_8b", 8)
    costs = BlockCosts(model, PlanSettings(activation_checkpointing="offload"))
    gpu = gpu_by_name("H200")
    slow = replace(gpu, host_bytes_per_s=1e8)
    copies = 2 * sum(costs.offloaded_bytes(batch)[1:]) / 1e8
    fast = micro_batch_seconds(costs, batch, gpu)
    assert micro_batch_seconds(costs, batch, slow) > max(fast, copies)
    assert micro_batch_seconds(costs, batch, slow) < fast + 1.2 * copies


def test_sampled_batches_know_the_encoder_work_of_the_heaviest_pack():
    """The few rows of a sample may have less than most: `auto` counts that of more rows, which are not loaded."""
    rows = data.rows("images", 1)
    costs = np.array([[len(row.ids), 1536 * sum(h * w for h, w in row.grids)] for row in rows])
    size = 8192
    light = sorted(range(40), key=lambda row: costs[row, 1] / costs[row, 0])[8:14]
    sample = data.packed([rows[row] for row in light], "qwen3_vl_2b", PIXELS)
    costs = costs[light + [row for row in range(40) if row not in light]]
    packs = [costs[pack].sum(0) for pack in make_packs(*costs.T, size)]
    heaviest = max(encoder / tokens for tokens, encoder in packs if tokens > 0.9 * size)
    kit: Any = SimpleNamespace(sample=lambda _: sample, sample_costs=lambda _: costs)
    batches = SampledBatches(kit)
    batch = batches(size)
    density = batch.media["pixel_values"].values.numel() / batch.num_tokens
    assert density < 0.8 * heaviest
    assert density * batches.heaviest(size) == pytest.approx(heaviest)
    model = on_meta("qwen3_vl_2b")
    config = SimpleNamespace(model=SimpleNamespace(activation_checkpointing="none"))
    fixed = MLLMData(sources=[{"path": "x"}], pack_tokens=size)  # type: ignore[list-item]
    work = Workload(model, PlanSettings(), batches, gpu_by_name("H200"), 1)
    peaks = [
        choose(config, "data", fixed, 2, one).peak
        for one in (work, replace(work, heaviest=batches.heaviest))
    ]
    encoder = BlockCosts(model, PlanSettings()).saved_bytes(batch).encoder * size / batch.num_tokens
    assert peaks[1] - peaks[0] == pytest.approx((batches.heaviest(size) - 1) * encoder)
    costs[:, 1] = 0
    assert SampledBatches(kit).heaviest(size) == 1.0


def test_plan_with_data_advises_packs_that_hold_its_longest_row(
    recipe,  # noqa: F811
    monkeypatch,
    capsys,
):
    words = ["plan", str(next(recipe.glob("chat/**/*.yaml"))), "--gpu", "T4", "--json"]
    assert main(words) == 0
    peak = printed_json(capsys)["peak_gib"]
    monkeypatch.setitem(GPUS, "T4", (peak, 0.32, 25, 25, False))
    assert main(words) == EXIT_USER_ERROR
    (advice,) = printed_json(capsys)["advice"]
    assert advice["words"].startswith("data.pack_tokens=")
    assert main([*words, *advice["words"].split()]) == 0
    again = printed_json(capsys)
    assert again["peak_gib"] == pytest.approx(advice["peak_gib"])
    assert again["peak_gib"] < 0.95 * peak


def test_plan_command_prints_text_and_json(recipe, capsys):  # noqa: F811
    config = str(next(recipe.glob("chat/**/*.yaml")))
    assert mvp(f"plan {config} --gpu A100 --gpus 2") == 0
    assert "2 x A100" in (text := capsys.readouterr().out)
    assert "fits" in text
    assert mvp(f"plan {config} --json") == 0
    facts = printed_json(capsys)
    assert facts["gpu"] == "H200"
    assert facts["peak_gib"] == pytest.approx(sum(facts["memory_gib"].values()))
    assert facts["eta_s"] == pytest.approx(facts["steps"] * facts["step_s"])
    assert mvp(f"plan {config} --gpu abacus") == 2
    assert mvp(f"plan {config} --gpus 3 parallel.shard=2") == 2
    assert "needs a multiple of 2" in capsys.readouterr().err
    sizes = []
    for gpus in ("2", "3"):
        assert mvp(f"plan {config} --gpus {gpus} data.global_batch_size=4 --json") == 0
        sizes.append(printed_json(capsys))
    # One of the three has two packs, too.
    assert sizes[0]["step_s"] == pytest.approx(sizes[1]["step_s"], rel=0.1)
    assert sizes[0]["tokens_per_step"] == sizes[1]["tokens_per_step"]


def test_plan_of_qlora_counts_4_bit_weights_and_their_dequantization():
    shape = {**data.shape("qwen3_8b"), "dtype": "bfloat16"}
    batch = packed("qwen3_8b", 8)
    found = []
    for quantize in ({}, {"llm": "nf4"}):
        model: Any = MLLMModelKit(Lora(rank=16)).build(ModelSource(None, shape))
        cast_frozen_base(model, torch.bfloat16)
        if quantize:
            quantize_layers(model, quantize, torch.bfloat16)
        found.append(estimated(model, batch, quantize=quantize))
    lora, qlora = found
    blocks = 36 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 12288)
    saved = (lora["memory_gib"]["weights"] - qlora["memory_gib"]["weights"]) * 2**30
    assert saved == pytest.approx(blocks * (2 - 9 / 16))
    assert lora["memory_gib"]["activations"] == qlora["memory_gib"]["activations"]
    assert lora["seconds"]["GEMM"] == qlora["seconds"]["GEMM"]
    assert lora["step_s"] < qlora["step_s"] < 1.5 * lora["step_s"]
