"""Models that cannot run several sequences in one row: padded rows give the log-probs and gradients of transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from model_sweep import EXACT, build, differences, sequences
from sweep_columns import on_layout
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model.preflight import check_packing, probe

# ALiBi from the shape of the batch; attention without boundaries; attention classes chosen by name.
FAMILIES = ["bloom", "stablelm", "gptj"]


@pytest.mark.parametrize("name", FAMILIES)
def test_padded_rows_equal_transformers_per_token_and_parameter(name: str) -> None:
    model = build(name)
    if not model.padded_rows:
        with pytest.raises(UserError, match=f"{name} cannot be trained on packed sequences"):
            probe(model)
    check_packing(model)
    assert model.padded_rows
    assert max(differences(model).values()) <= EXACT


def test_padded_rows_of_one_sequence_do_not_depend_on_longer_ones() -> None:
    model = padded("bloom")
    short, long = sequences(model)[1], sequences(model)[2]
    alone = model(PackedBatch.from_sequences([short]), ["log_probs", "hidden_states"])
    both = model(PackedBatch.from_sequences([short, long]), ["log_probs", "hidden_states"])
    assert torch.allclose(both["hidden_states"][: len(short)], alone["hidden_states"], atol=1e-6)


def test_padded_rows_of_a_copy_and_without_padding_again() -> None:
    model = padded("stablelm")
    again = copy.deepcopy(model)
    assert again.padded_rows == model.padded_rows
    again.use_padded_rows("")
    with pytest.raises(UserError, match="received no sequence boundaries"):
        probe(again)
    check_packing(model)


def test_padded_rows_kv_cache_is_a_user_error() -> None:
    from mvp_engine.hf.model.kv_cache import KVCache

    model = padded("bloom")
    assert not model.can_cache
    with pytest.raises(UserError, match="padded rows, which have no KV cache"):
        model(
            PackedBatch.from_sequences(sequences(model)), ["next_logits"], kv_cache=KVCache([7], 3)
        )


def test_padded_rows_on_two_shards_give_the_gradients_of_one_rank(ranks2) -> None:
    expected = on_layout("bloom", Layout(World.join("cpu")))
    for found in ranks2.run(gradients_of_two_shards):
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            assert torch.allclose(found[name], grad, rtol=1e-5, atol=1e-5), name


def gradients_of_two_shards() -> dict[str, Tensor]:
    from families import parallel

    world = World.join("cpu")
    found = on_layout("bloom", Layout.of(world, parallel(shard=2)))
    world.close()
    return found


def padded(name: str) -> LanguageModel:
    model = build(name)
    check_packing(model)
    return model
