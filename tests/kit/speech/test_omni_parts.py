"""The talker as a part: freezing, LoRA, exports and merges of an Omni model; what is refused, by name."""

from __future__ import annotations

import logging

import pytest
import torch
from conftest import mvp, user_error
from folders import alone, entries
from omni_models import BOOKS, batch_of, omni_folder, qwen3_omni_settings, speech_step, spoken_row

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.hf.model.model_parts import parts_of, trained_parts
from mvp_engine.kit.model import MLLMModelKit
from mvp_engine.kit.speech import OmniModel
from mvp_engine.kit.speech.omni_model import OmniModelEngine, trains_text
from mvp_engine.model_engine import ModelSource, Settings


def speech_trained(folder, lora=None, freeze=()):
    """An engine of the folder after two updates on the speech of one row."""
    model = MLLMModelKit(lora).build(ModelSource(str(folder)), "omni_model")
    engine = OmniModelEngine(model, alone(), Settings(seed=7, freeze=freeze))
    engine.initialize(
        lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    )
    batch = batch_of(read_config(folder, {}), spoken_row(seed=1))
    for _ in range(2):
        engine.train_batch([batch], speech_step(engine.model))
    return engine


def files_of(folder):
    return {key: value for file in folder.glob("*.safetensors") for key, value in entries(file)}


def changed(before, after):
    old, new = files_of(before), files_of(after)
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


def test_export_of_a_trained_talker_changes_the_talker_alone(tmp_path):
    from transformers import Qwen3OmniMoeForConditionalGeneration as Whole

    omni_folder("qwen3_omni_moe", tmp_path / "in", max_shard_size="200KB")
    engine = speech_trained(tmp_path / "in", freeze=("vision", "audio", "projector", "llm"))
    engine.export_hf(tmp_path / "out")
    names = changed(tmp_path / "in", tmp_path / "out")
    assert {name.split(".")[0] for name in names} == {"talker"}
    assert any("code_predictor.lm_head" in name for name in names)
    assert any(".experts." in name for name in names)
    model, info = Whole.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(model.talker.codec_head.weight, engine.model.talker.codec_head.weight)


def test_merge_of_a_talker_with_lora_is_its_export(tmp_path):
    omni_folder("qwen3_omni_moe", tmp_path / "in")
    engine = speech_trained(tmp_path / "in", Lora(rank=2, target_modules=["talker"]))
    adapted = {row["part"]: row["adapters"] for row in trained_parts(engine.model)}
    # Attention, shared experts, their gate, in 2 layers; attention and MLP of 2 predictor layers; 2 projections of 2.
    assert adapted["talker"] == 2 * (4 + 3 + 1) + 2 * (4 + 3) + 4
    assert adapted["llm"] == 0
    assert not trains_text(engine.model)
    engine.save_checkpoint(tmp_path / "step_00000001")
    engine.export_hf(tmp_path / "out")
    assert mvp(f"export {tmp_path}/step_00000001 {tmp_path}/merged") == 0
    assert not changed(tmp_path / "out", tmp_path / "merged")
    assert {name.split(".")[0] for name in changed(tmp_path / "in", tmp_path / "merged")} == {
        "talker"
    }


def test_parts_of_an_omni_model_put_the_code_predictor_into_the_talker():
    model = OmniModel.on_meta(None, {"model_type": "qwen3_omni_moe", **qwen3_omni_settings()})
    parts = parts_of(model)
    assert {part for name, part in parts.items() if name.startswith("talker.")} == {"talker"}
    assert {part for name, part in parts.items() if name.startswith("hf.")} == {
        "vision",
        "audio",
        "projector",
        "llm",
    }
    assert not any("code2wav" in name for name in parts)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"model_type": "qwen2_5_omni"}, "codec was never released.*model.type=language_model"),
        ({"model_type": "qwen3"}, "models with a talker .*not for qwen3"),
        ({"model_type": "qwen3_omni_moe", "enable_audio_output": False}, "enable_audio_output"),
        (
            {"model_type": "qwen3_omni_moe"},
            "number of codebooks must be the same: .*num_quantizers=16",
        ),
        (
            {
                "model_type": "qwen3_omni_moe",
                **qwen3_omni_settings(),
                "talker": {"accept_hidden_layer": 9},
            },
            "accept_hidden_layer=9: the thinker has 3 layers",
        ),
        (
            {
                "model_type": "qwen3_omni_moe",
                **qwen3_omni_settings(),
                "code2wav": {"codebook_size": 30},
            },
            "code2wav_config.codebook_size=30: the talker speaks codes up to 31",
        ),
    ],
)
def test_omni_model_refuses_configs_that_cannot_speak(config, message):
    for part in ("talker", "code2wav"):
        config.get(f"{part}_config", {}).update(config.pop(part, {}))
    with user_error(message):
        OmniModel.on_meta(None, config)


def test_rotary_keys_of_a_talker_are_no_warning_and_unknown_ones_are():
    logger = logging.getLogger("transformers.modeling_rope_utils")
    text = "Unrecognized keys in `rope_parameters` for 'rope_type'='default': {}"
    for keys, is_shown in (
        ("{'mrope_section', 'interleaved'}", False),
        ("{'mrope_section', 'typo'}", True),
    ):
        record = logging.LogRecord(
            logger.name, logging.WARNING, "", 0, text.replace("{}", keys), None, None
        )
        assert bool(logger.filter(record)) == is_shown


def test_omni_model_refuses_another_number_of_codebooks():
    config = read_config(None, {"model_type": "qwen3_omni_moe", **qwen3_omni_settings()})
    batch = batch_of(config, spoken_row(seed=1))
    speech = batch.media["speech"]
    speech.values = speech.values[:, :-1]
    with torch.device("meta"):
        model = OmniModel.from_config(config)
    with user_error(f"speech has {BOOKS - 1} codebooks, and the talker {BOOKS}"):
        model.check(batch)
    assert isinstance(batch, PackedBatch)
