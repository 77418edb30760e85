"""Mimi as a codec: the codes of transformers' own model, whatever a sound is batched with."""

import numpy as np
import pytest
import torch
from conftest import user_error
from transformers import MimiConfig, MimiModel

from mvp_engine.kit.speech import codec as codec_module
from mvp_engine.kit.speech import open_codec


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = MimiConfig(
        hidden_size=32,
        num_filters=4,
        num_residual_layers=1,
        codebook_size=64,
        codebook_dim=16,
        vector_quantization_hidden_dimension=16,
        num_quantizers=8,
        num_hidden_layers=1,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=16,
        upsample_groups=32,
    )
    model = MimiModel(config)
    for module in model.modules():
        if hasattr(module, "embed_sum"):  # zeros in a new model: every frame would have code 0
            torch.nn.init.normal_(module.embed_sum)
    path = tmp_path_factory.mktemp("mimi")
    model.save_pretrained(path)
    return path


def test_mimi_codes_in_batches_equal_those_of_each_sound_alone(folder, monkeypatch):
    monkeypatch.setattr(codec_module, "BATCH_SECONDS", 3.0)  # several batches
    codec = open_codec(str(folder), books=4)
    random = np.random.default_rng(0)
    lengths = [1920 * 5, 1920 * 9 + 7, 100, 1920 * 6 - 1, 0]
    sounds = [random.normal(size=length).astype(np.float32) * 0.3 for length in lengths]
    together = codec.encode_many(sounds)
    assert [codes.shape for codes in together] == [(5, 4), (10, 4), (1, 4), (6, 4), (0, 4)]
    for sound, codes in zip(sounds[:4], together, strict=False):
        assert (codec.encode(sound) == codes).all()
    assert len(np.unique(together[1])) > 4
    model = MimiModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        own = (
            model.encode(torch.from_numpy(sounds[0])[None, None], num_quantizers=4).audio_codes[0].T
        )
    assert (own.numpy() == together[0]).all()
    assert len(codec.decode(together[1])) == 1920 * 10


def test_mimi_fingerprint_changes_with_books_and_weights(folder, tmp_path):
    names = {open_codec(str(folder), books=books).fingerprint for books in (4, 8)}
    assert len(names) == 2
    other = MimiModel.from_pretrained(folder)
    other.quantizer.semantic_residual_vector_quantizer.input_proj.weight.data.mul_(2)
    other.save_pretrained(tmp_path)
    assert open_codec(str(tmp_path), books=4).fingerprint not in names
    with user_error("has 8 codebooks"):
        open_codec(str(folder), books=16)
