"""Batches that a model would misread are rejected: token ids out of range, sequences past a rotary limit."""

import pytest
import torch
from conftest import user_error
from families import config_of, overrides_of
from folders import language_model
from tiny_engines import ALONE, counting

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.model_engine import FSDPEngine


def batch_with(field, value):
    batch = PackedBatch.from_sequences([torch.arange(3, 9), torch.arange(5, 12)])
    getattr(batch, field)[8] = value
    return batch


@pytest.mark.parametrize(
    "field, value", [("labels", -1), ("labels", 99), ("input_ids", 99), ("input_ids", IGNORE)]
)
def test_check_token_outside_of_vocabulary_raises_with_its_place(field, value):
    engine = language_model(None, **overrides_of("qwen3"))
    place = f"{value} at position 2 of sequence 1"
    with user_error(f"{field}: {place} is outside of the model's vocabulary of 99 tok"):
        engine.infer_batch(batch_with(field, value), ["log_probs"])
    good = engine.infer_batch(batch_with(field, 98), ["log_probs"])["log_probs"]
    assert bool(good.isfinite().all())


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_hidden_sequence_past_the_rope_limit_raises(kind):
    rope = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "factor": 4.0,
    }
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = config_of("phi3" if kind == "longrope" else "llama")
    config.rope_parameters = rope
    config.max_position_embeddings = 64
    config.original_max_position_embeddings = 16
    model = LanguageModel.from_config(config).eval()
    FSDPEngine(model, ALONE).initialize()
    model(counting(16, 9), ["log_probs"])
    with user_error(r"a sequence of 17 tokens: .* longer than 16"):
        model(counting(17, 9), ["log_probs"])
