"""Linear-attention, state-space and convolution mixers: packed equals alone, equals transformers' own forward."""

import pytest
import tiny_models
import torch
from conftest import user_error
from mixer_families import MIXERS, VISION_MIXERS, mixer_model
from tiny_engines import assert_close, assert_equal, engine_of
from tiny_engines import gradients as gradients_of

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel, ValueModel
from mvp_engine.hf.mixers.per_sequence import Packing
from mvp_engine.hf.model import attention, preflight

LENGTHS = (13, 1, 6, 20, 6)


def sequences():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 90, (length,), generator=generator) for length in LENGTHS]


def log_probs(model, *ids):
    return model(PackedBatch.from_sequences(list(ids)), ["log_probs"])["log_probs"]


def transformers_log_probs(model, ids):
    """From transformers' own forward of one sequence, with gradients; 0 at the end."""
    with attention.eager_attention(model.hf.config):
        logits = model.hf(ids[None], use_cache=False).logits[0]
    found = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
    return torch.cat([found, found.new_zeros(1)])


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return gradients_of(model)


@pytest.mark.parametrize("name", MIXERS)
def test_mixers_packed_equals_alone_and_transformers(name):
    model = mixer_model(name)
    assert model.mixers.modules
    ids = sequences()
    packed = log_probs(model, *ids)
    alone = torch.cat([log_probs(model, i) for i in ids])
    theirs = torch.cat([transformers_log_probs(model, i) for i in ids])
    assert torch.allclose(packed, alone, rtol=1e-5, atol=1e-5)
    assert torch.allclose(packed, theirs, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-0.1, 0.1, len(packed))
    of_packed = gradients(model, (packed * weights).sum())
    assert_close(of_packed, gradients(model, (theirs * weights).sum()))


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2_moe", "mamba2", "mamba"])
def test_mixers_state_that_is_not_reset_fails_preflight(name, monkeypatch):
    model = mixer_model(name)
    preflight.check_packing(model)

    def one_sequence(batch, *rest):
        return Packing([batch.num_tokens], batch.cu_seqlens[[0, -1]], *rest)

    monkeypatch.setattr(Packing, "of", one_sequence)
    with user_error("two sequences in one batch change each other"):
        preflight.probe(model)


def test_mixers_of_value_model_packed_equals_alone():
    model = mixer_model("qwen3_5_text", ValueModel)
    ids = sequences()
    values = model(PackedBatch.from_sequences(ids), ["values"])["values"]
    alone = torch.cat([model(PackedBatch.from_sequences([i]), ["values"])["values"] for i in ids])
    assert torch.allclose(values, alone, rtol=1e-5, atol=1e-5)


def test_model_without_mixers_is_unchanged():
    from families import config_of

    model = LanguageModel.from_config(config_of("llama"))
    assert model.mixers.modules == {}
    assert "forward" not in model.decoder().layers[0].__dict__


@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h", "lfm2_moe", "falcon_h1"])
def test_mixers_folder_to_engine_to_folder_keeps_weights_and_log_probs(name, tmp_path):
    model = mixer_model(name)
    model.hf.save_pretrained(tmp_path / "base")
    engine = engine_of(LanguageModel.on_meta(tmp_path / "base"), optimizer=None)
    expected = log_probs(model, *sequences())
    assert torch.equal(log_probs(engine.model, *sequences()), expected)
    engine.export_hf(tmp_path / "exported")
    again = type(model.hf).from_pretrained(tmp_path / "exported")
    assert_equal(again.state_dict(), model.hf.state_dict())


@pytest.mark.parametrize("name", VISION_MIXERS)
def test_mixers_with_images_and_videos_packed_equals_alone_and_transformers(name, monkeypatch):
    monkeypatch.setitem(tiny_models.VISION, name, ("", {}, "patches frame"))
    model = mixer_model(name)
    ones = tiny_models.samples(model, name)
    tiny_models.check_packed_is_alone(model, ones, ["log_probs", "entropy"])
    for one in ones:
        theirs = tiny_models.transformers_log_probs(model, tiny_models.processor_inputs(model, one))
        assert torch.allclose(model(one, ["log_probs"])["log_probs"], theirs, rtol=1e-5, atol=1e-5)
