"""Models with encoders: packed equals one by one and equals transformers' own forward, to 1e-5."""

import pytest
from conftest import ROOT, user_error
from families import REFUSED_VISION, TYPES, VISION, vision_table
from tiny_models import (
    check_packed_is_alone,
    close,
    processor_inputs,
    samples,
    shared_model,
    transformers_log_probs,
)

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel, ValueModel
from mvp_engine.hf.model import attention
from mvp_engine.hf.model.preflight import MediaPreflight, check_packing


@pytest.mark.parametrize("name", VISION)
def test_language_model_with_media_packed_equals_single_and_transformers(name):
    model = shared_model(LanguageModel, name)
    check_packing(model)
    ones = samples(model, name)
    check_packed_is_alone(model, ones, ["log_probs", "entropy"])
    media = MediaPreflight(model)
    media.check(media.unchecked(ones), exact=True, reference=True)
    for one in ones:
        reference = transformers_log_probs(model, processor_inputs(model, one))
        assert close(model(one, ["log_probs"])["log_probs"], reference)


@pytest.mark.parametrize("name", VISION)
def test_value_model_with_media_packed_equals_single(name):
    model = shared_model(ValueModel, name)
    check_packing(model)
    check_packed_is_alone(model, samples(model, name), ["values"])


@pytest.mark.parametrize("name", REFUSED_VISION)
def test_preflight_unsupported_vision_model_is_rejected(name):
    with user_error(REFUSED_VISION[name][0]):
        check_packing(shared_model(LanguageModel, name))


@pytest.mark.parametrize("name", TYPES)
def test_media_inputs_missing_token_types_raise_for_images_only(name):
    model = shared_model(LanguageModel, name)
    text, *_, both = samples(model, name)
    del both.token_fields[TYPES[name]], text.token_fields[TYPES[name]]
    with user_error(f"reads {TYPES[name]} to see images: give them in the batch's token_fields"):
        model(both, ["log_probs"])
    model(text, ["log_probs"])


def test_media_inputs_one_axis_positions_raise_for_images_only():
    model = shared_model(LanguageModel, "qwen3_vl")
    text, *_, both = samples(model, "qwen3_vl")
    flat = PackedBatch.from_sequences([both.input_ids], media=both.media)
    with user_error("Qwen3VLModel has positions on three axes"):
        model(flat, ["log_probs"])
    one_axis = model(PackedBatch.from_sequences([text.input_ids]), ["log_probs"])["log_probs"]
    assert close(one_axis, transformers_log_probs(model, processor_inputs(model, text)))


def test_attention_of_model_with_encoders_is_registered_per_sub_config():
    model = shared_model(LanguageModel, "qwen2_5_omni_thinker")
    config = model.hf.config

    def names():
        parts = (config, config.text_config, config.vision_config, config.audio_config)
        return [part._attn_implementation for part in parts]

    expected = [attention.NAME, attention.NAME, attention.ENCODER, attention.ENCODER]
    assert names() == expected
    with attention.eager_attention(config):
        assert set(names()) == {"eager"}
    assert names() == expected


def test_docs_table_of_vision_families_is_up_to_date():
    page = (ROOT / "docs" / "models.md").read_text()
    expected = f"<!-- vision -->\n{vision_table()}\n<!-- /vision -->"
    assert expected in page, "run python tests/hf/families.py"
