"""Audio encoders of Omni models: no host sync, bit-equal to transformers, sounds do not change their neighbours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from omni_models import OMNI, batch_of, qwen3_omni, spoken_row
from sync_watch import MovedBatch, device_reads
from transformers import AutoConfig, AutoModel

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.media import encoders
from mvp_engine.hf.model.attention import ENCODER, use_own_masks
from mvp_engine.kit.speech import OmniModel

FAMILIES = ["qwen3_omni_moe", "qwen2_5_omni"]


def ours(whole):
    model = LanguageModel.from_config(copy.deepcopy(whole.thinker.config))
    model.hf.load_state_dict(whole.thinker.state_dict())
    return model.eval()


def sounds(lengths):
    """Mel frames (sounds, 8, longest) and their mask."""
    longest = max(lengths)
    values = torch.randn(len(lengths), 8, longest, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return values * mask[:, None], mask.long()


def features(model, values, mask):
    base = model.base()
    with torch.no_grad():
        planned = encoders.frame_mask(base, mask, values.device)
        return base.get_audio_features(values, planned).last_hidden_state


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [[10], [101], [130, 110, 230]])
def test_audio_encoder_with_planned_chunks_equals_transformers(family, lengths):
    whole = OMNI[family]()
    values, mask = sounds(lengths)
    with torch.no_grad():
        wanted = whole.thinker.get_audio_features(values, mask).last_hidden_state
    found = features(ours(whole), values, mask)
    assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_audio_encoder_short_sounds_in_a_pack_equal_each_alone(family):
    """transformers' own call changes sounds of less than a second with their neighbours, in Qwen3-Omni."""
    whole = OMNI[family]()
    model = ours(whole)
    if family == "qwen3_omni_moe":
        model.base().audio_tower.conv_chunksize = 3  # slices of chunks
    lengths = [10, 130, 30, 7, 250, 99]
    values, mask = sounds(lengths)
    together = features(model, values, mask)
    alone = []
    for index, length in enumerate(lengths):
        one = values[index : index + 1, :, :length], mask[index : index + 1, :length]
        alone.append(features(model, *one))
        with torch.no_grad():
            wanted = whole.thinker.get_audio_features(*one).last_hidden_state
        assert torch.allclose(alone[-1], wanted, atol=1e-6)
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


def packed(config, media, spoken):
    rows = [batch_of(config, spoken_row(media=media, spoken=spoken, seed=seed)) for seed in (0, 1)]
    return PackedBatch.concat(rows)


def test_forward_and_backward_of_an_omni_model_read_no_value_of_the_device():
    whole = qwen3_omni()
    model: Any = OmniModel.from_config(copy.deepcopy(whole.config))
    batch = MovedBatch.of(packed(whole.config, "image video audio", (0,)))
    assert device_reads(model, batch, ["loss", "speech_loss"], ["speech_loss"]) == []


def test_sync_watch_finds_the_reads_of_an_encoder_without_a_plan(monkeypatch):
    """The watch itself: the encoder then reads lengths, indexes by a mask and searches for places."""
    whole = qwen3_omni()
    monkeypatch.setattr(encoders, "apply_sync_free_audio", lambda model: None)
    monkeypatch.setattr(
        "mvp_engine.hf.media.shared_media.frame_mask", lambda base, mask, device: mask
    )
    monkeypatch.setattr("mvp_engine.data.batch.HOST_FIELDS", ("grid_thw", "_counts"))
    batch = MovedBatch.of(packed(whole.config, "audio", ()))
    found = device_reads(ours(whole), batch, ["log_probs"])
    assert {"index", "tolist", "item", "nonzero"} <= {one.split(" ")[0] for one in found}


@pytest.mark.parametrize(
    "name, expected", [("gemma4_audio", "eager"), ("qwen2_audio_encoder", ENCODER)]
)
def test_audio_encoder_with_attention_code_of_its_own_gets_masks_for_it(name, expected):
    with torch.device("meta"):
        encoder = AutoModel.from_config(AutoConfig.for_model(name))
    encoder.config._attn_implementation_internal = ENCODER
    use_own_masks(encoder)
    assert encoder.config._attn_implementation == expected
