"""`mvp plan` without data, and what it advises: the words that it prints make the training fit."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from typing import Any

import pytest
import yaml
from conftest import ROOT, mvp
from fake_hub import FakeHub, use_hub
from families import config_of
from run_files import printed_json

from mvp_engine.cli import main
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.tools.plan import page

SHAPES = yaml.safe_load((ROOT / "benchmarks" / "hardware" / "shapes.yaml").read_text())
GPU_CONFIGS = sorted(
    file
    for file in ROOT.glob("recipes/*/configs/*.yaml")
    if "vit" not in str(file)
    if re.search("gpu[18]", file.stem) or "# Fits on" in file.read_text()
)
# A part of Qwen3-30B-A3B: a block has 604 million parameters in its experts.
EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 8,
}
EXPERTS |= {
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
}
EXPERTS |= {"num_experts": 128, "num_experts_per_tok": 8}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304}
SIGLIP |= {"num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 384, "patch_size": 14}
PACKS = "data.pack_tokens=4096"
FIXED = ["data.pack_tokens=8192", "model.activation_checkpointing=none"]
SFT = str(ROOT / "recipes" / "qwen3" / "configs" / "sft_gpu1.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the config.json of models on the Hub, under their ids. A plan needs nothing else."""
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp("hub")
    for name, shape in SHAPES.items():
        AutoConfig.for_model(**shape).save_pretrained(folder / name)
    for name in ("model", "align"):  # what recipes/graft writes: SigLIP 2 on Qwen3
        graft = {"vision_config": SIGLIP, "text_config": SHAPES["Qwen/Qwen3-1.7B"]}
        graft |= {"vision_feature_select_strategy": "full", "image_token_index": 151655}
        AutoConfig.for_model("llava", **graft).save_pretrained(
            folder / "outputs" / "graft_gpu" / name
        )
    AutoConfig.for_model(**EXPERTS).save_pretrained(folder / "experts")
    whole = {**EXPERTS, "num_hidden_layers": 48, "vocab_size": 151936}
    AutoConfig.for_model(**whole).save_pretrained(folder / "Qwen" / "Qwen3-30B-A3B")
    return folder


@pytest.fixture
def models(folder, monkeypatch):
    monkeypatch.chdir(folder)


def estimated(words, capsys):
    code = main(["plan", *words, "--json"])
    return code, printed_json(capsys)


@pytest.mark.parametrize("config", GPU_CONFIGS, ids=lambda file: f"{file.parts[-3]}/{file.stem}")
def test_shipped_gpu_config_fits_as_its_comment_says(config, models, capsys):
    found = re.search(r"^# Fits on \d+ GB: mvp plan CONFIG (.*)$", config.read_text(), re.MULTILINE)
    assert found, f"{config} does not say what it fits on"
    if "megatron" in config.stem and find_spec("megatron") is None:
        pytest.skip("needs megatron-core: make test-megatron")
    code, facts = estimated([str(config), *shlex.split(found[1])], capsys)
    assert code == 0
    assert facts["peak_gib"] < 0.9 * facts["room_gib"]
    assert facts["gpus"] == (8 if "gpu8" in config.stem else 1)


@pytest.mark.parametrize(
    "words, wanted",
    [
        (
            [SFT, *FIXED, "model.path=Qwen/Qwen3-1.7B", "--gpu", "L40S"],
            "model.activation_checkpointing=selective",
        ),
        (
            [SFT, *FIXED, "model.path=Qwen/Qwen3-1.7B", "--gpu", "L40S", "data.max_length=4096"],
            PACKS,
        ),
        (["Qwen/Qwen3-VL-2B-Instruct", "--gpu", "H100", "--tokens", "16384"], "{vision: full}'"),
        (["Qwen/Qwen3-4B", "--gpu", "H100", "--gpus", "2"], "parallel.shard=2"),
        (["Qwen/Qwen3-1.7B", "--gpu", "4080", "--tokens", "2048"], "lora.rank=16 optim.lr=0.0001"),
        (
            ["experts", "--gpu", "L4", "--gpus", "8", "--tokens", "4096"],
            "parallel.shard=8 parallel.expert=8",
        ),
    ],
    ids=["checkpointing", "smaller packs", "encoder", "shards", "lora", "experts"],
)
def test_plan_that_does_not_fit_exits_2_and_its_advice_fits(words, wanted, models, capsys):
    code, facts = estimated(words, capsys)
    assert code == EXIT_USER_ERROR
    assert not facts["fits"]
    assert wanted in facts["advice"][0]["words"]
    for advice in facts["advice"]:  # LoRA comes with a second one: more GPUs
        changes = [*shlex.split(advice["words"]), "--gpus", str(advice["gpus"])]
        code, again = estimated([*words, *changes], capsys)
        assert code == 0
        assert again["peak_gib"] == pytest.approx(advice["peak_gib"])
        assert again["step_s"] == pytest.approx(advice["step_s"])
        assert again["tokens_per_step"] / again["gpus"] == facts["tokens_per_step"] / facts["gpus"]


def test_auto_of_packs_shorter_than_rows_says_what_the_plan_says(models, capsys):
    words = [SFT, "model.path=Qwen/Qwen3-0.6B", "data.max_length=8192", "--tokens", "2048"]
    words += ["model.activation_checkpointing=auto", "--gpu", "L4"]  # slower than the host
    _, facts = estimated(words, capsys)
    peak, seconds = re.findall(r"([\d.]+) of \d+ GiB and ([\d.]+) s", facts["auto"]["reason"])[0]
    assert float(peak) == pytest.approx(facts["peak_gib"], abs=0.06)
    assert float(seconds) == pytest.approx(facts["step_s"], rel=0.02)  # without the optimizer


def test_advice_prints_no_warning_of_settings_that_are_only_tried(models, capsys):
    assert mvp("plan experts --gpu L4 --tokens 4096") == EXIT_USER_ERROR
    printed = capsys.readouterr()
    assert "lora.rank" in printed.out
    assert "stacked experts" not in printed.err


def test_plan_with_offload_counts_states_on_the_host_and_their_copies(models, capsys):
    words = [
        SFT,
        "model.path=Qwen/Qwen3-8B",
        "--gpu",
        "H100",
        "model.activation_checkpointing=full",
    ]
    words.append("data.pack_tokens=16384")
    code, without = estimated([*words, "optim.state_dtype=int8"], capsys)
    assert code == EXIT_USER_ERROR  # not even with states in 8 bits
    offers = [advice for advice in without["advice"] if "optim.offload" in advice["words"]]
    assert len(offers) == 1
    assert any("host memory" in note for note in offers[0]["notes"])
    code, facts = estimated([*words, "optim.offload=true"], capsys)
    assert code == 0
    states = 8 * 8.19e9 / 2**30
    assert facts["host_gib"] == pytest.approx(states, rel=0.01)
    assert facts["memory_gib"]["optimizer states"] == 0.75  # three buckets
    copy_s = facts["host_gib"] * 2**30 / 50e9
    assert facts["seconds"]["optimizer"] == pytest.approx(copy_s)
    # 65,536 tokens: at most a fifth longer.
    assert facts["step_s"] < 1.2 * (facts["step_s"] - 1.12 * copy_s)
    assert "GiB per GPU, pinned: optimizer states (optim.offload)" in page(facts)


def test_plan_advice_on_several_gpus_says_that_times_are_without_communication():
    option = {"gpus": 8, "words": "parallel.shard=8", "peak_gib": 60.0, "step_s": 1.0, "notes": []}
    facts: dict[str, Any] = {
        "config": "it",
        "gpus": 8,
        "gpu": "H100",
        "packs": "full packs",
        "auto": None,
    }
    facts |= {"memory_gib": {}, "peak_gib": 90.0, "room_gib": 79.0, "fits": False, "fits_on": []}
    assert "Times are without communication" in page({**facts, "advice": [option]})
    assert "communication" not in page({**facts, "gpus": 1, "advice": [{**option, "gpus": 1}]})


def test_plan_prints_the_words_to_paste(models, capsys):
    assert mvp("plan Qwen/Qwen3-1.7B --gpu 4080 --tokens 2048") == EXIT_USER_ERROR
    text = capsys.readouterr().out
    assert "does NOT fit" in text
    assert (
        "It fits with these words on the command line:\n\n  lora.rank=16 optim.lr=0.0001\n" in text
    )
    assert re.search(r"on 2 GPUs .*:\n\n  parallel.shard=2 .* optim.state_dtype=int8\n", text)
    assert "Without a change it fits on: L40S, " in text


def test_plan_of_a_hub_id_downloads_no_weights(tmp_path, monkeypatch, capsys):
    from transformers import AutoConfig

    config = AutoConfig.for_model(**SHAPES["Qwen/Qwen3-0.6B"]).to_json_string().encode()
    monkeypatch.chdir(tmp_path)
    with FakeHub().serve() as hub:
        use_hub(hub.url, tmp_path / "home", monkeypatch)
        hub.add("Qwen/Qwen3-0.6B", {"config.json": config, "model.safetensors": b"weights"})
        code, facts = estimated(["Qwen/Qwen3-0.6B", "--tokens", "4096", "--gpu", "4090"], capsys)
        assert code == 0
        assert facts["config"] == "Qwen/Qwen3-0.6B"
        assert set(hub.downloads()) == {"config.json"}
        assert mvp("plan Qwen/Qwen3-0.7B") == EXIT_USER_ERROR
        assert "Qwen/Qwen3-0.7B" in capsys.readouterr().err


def test_plan_of_a_config_without_data_assumes_full_packs(models, capsys):
    code, facts = estimated([SFT, "model.path=Qwen/Qwen3-0.6B", "--tokens", "4096"], capsys)
    assert code == 0
    assert facts["tokens_per_step"] == 65536
    assert "4,096 tokens, assumed" in facts["packs"]
    assert facts["steps"] is None
    shipped = ["sft/lora", "model.path=Qwen/Qwen3-0.6B"]  # a config, not a Hub id
    code, facts = estimated(shipped, capsys)
    assert code == facts["idle_ranks"] == 0
    code, on_8 = estimated([*shipped, "--gpus", "8"], capsys)
    assert on_8["idle_ranks"] == 6  # the global batch has two packs
    assert on_8["mfu"] == pytest.approx(facts["mfu"] / 4, rel=0.01)
    assert mvp("plan sft/lroa") == EXIT_USER_ERROR
    assert "sft/lora" in capsys.readouterr().err
    assert mvp(f"plan {SFT}") == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert "model.path=..." in error
    assert "sources" not in error
    for words in (["--tokens", "0"], ["--media-share", "2"], ["--gpus", "0"]):
        assert mvp("plan Qwen/Qwen3-0.6B", *words) == EXIT_USER_ERROR


TINY = {
    "gpt_neox": "rows of 64",
    "qwen3_moe": "rows of 64",
    "gemma3": "12 images of 4 tokens",
    "smolvlm": "12 images of 4 tokens",
    "mistral3": "12 images of 4 tokens",
    "qwen2_5_omni_thinker": "1 image of 36 tokens",
}


@pytest.mark.parametrize("model_type", TINY)
def test_plan_of_other_families_counts_their_media(model_type, tmp_path, capsys):
    config_of(model_type).save_pretrained(tmp_path)
    code, facts = estimated([str(tmp_path), "--tokens", "64"], capsys)
    assert code == 0
    assert TINY[model_type] in facts["packs"]


@pytest.mark.parametrize(
    "model, media",
    [("Qwen/Qwen3-VL-2B-Instruct", "3 images"), ("Qwen/Qwen2-Audio-7B-Instruct", "4 audio clips")],
)
def test_plan_of_a_model_with_encoder_counts_media(model, media, models, capsys):
    words = [model, "--tokens", "4096", "model.freeze=[llm]"]
    _, facts = estimated(words, capsys)
    assert media in facts["packs"]
    _, text = estimated([*words, "--media-share", "0"], capsys)
    assert text["seconds"]["GEMM"] < facts["seconds"]["GEMM"]
    assert text["peak_gib"] < facts["peak_gib"]


def test_plan_of_preference_training_counts_a_copied_reference(models, capsys):
    config = str(ROOT / "recipes" / "preference" / "configs" / "gpu8.yaml")
    words = [config, "model.path=Qwen/Qwen3-8B", "--gpu", "H100"]
    peaks = []
    for reference in ("copy", "cached"):
        _, facts = estimated([*words, f"preference.reference={reference}"], capsys)
        peaks.append(facts["peak_gib"])
    assert peaks[0] - peaks[1] > 1.5  # 8 B parameters in 16 bit, or more, over 8 ranks
