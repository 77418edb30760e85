"""Models that cannot run several sequences in one row: padded rows give the log-probs and gradients of transformers."""

import copy

import pytest
import torch
from conftest import user_error
from model_sweep import EXACT, build, differences, sequences
from sweep_columns import on_layout
from tiny_engines import ALONE, assert_close

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.model.preflight import check_packing, probe

# ALiBi from the shape of the batch; attention without boundaries; attention classes chosen by name.
FAMILIES = ["bloom", "stablelm", "gptj"]


@pytest.mark.parametrize("name", FAMILIES)
def test_padded_rows_equal_transformers_per_token_and_parameter(name):
    model = build(name)
    if not model.padded_rows:
        with user_error(f"{name} cannot be trained on packed sequences"):
            probe(model)
    check_packing(model)
    assert model.padded_rows
    assert max(differences(model).values()) <= EXACT


def test_padded_rows_of_one_sequence_do_not_depend_on_longer_ones():
    model = padded("bloom")
    short, long = sequences(model)[1], sequences(model)[2]
    alone = model(PackedBatch.from_sequences([short]), ["log_probs", "hidden_states"])
    both = model(PackedBatch.from_sequences([short, long]), ["log_probs", "hidden_states"])
    assert torch.allclose(both["hidden_states"][: len(short)], alone["hidden_states"], atol=1e-6)


def test_padded_rows_of_a_copy_and_without_padding_again():
    model = padded("stablelm")
    again = copy.deepcopy(model)
    assert again.padded_rows == model.padded_rows
    again.use_padded_rows("")
    with user_error("received no sequence boundaries"):
        probe(again)
    check_packing(model)


def test_padded_rows_kv_cache_is_a_user_error():
    from mvp_engine.hf.model.kv_cache import KVCache

    model = padded("bloom")
    assert not model.can_cache
    batch = PackedBatch.from_sequences(sequences(model))
    with user_error("padded rows, which have no KV cache"):
        model(batch, ["next_logits"], kv_cache=KVCache([7], 3))


def test_padded_rows_on_two_shards_give_the_gradients_of_one_rank(on_ranks):
    for found in on_ranks({"shard": 2}, gradients_of_bloom):
        assert_close(found, gradients_of_bloom(ALONE))


def gradients_of_bloom(layout):
    return on_layout("bloom", layout)


def padded(name):
    model = build(name)
    check_packing(model)
    return model
