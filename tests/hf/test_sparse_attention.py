"""Latent attention (MLA) and sparse attention with an indexer: packed equals alone and transformers, to 1e-5."""

import pytest
from conftest import user_error
from model_sweep import EXACT, build, causal_types, differences, worst_difference
from sweep_columns import on_layout, on_two_ranks
from tiny_engines import ALONE, CAMPAIGN

from mvp_engine.hf.mixers import packed_mixers
from mvp_engine.hf.model.preflight import check_packing, probe

LATENT = ["deepseek_v2", "deepseek_v3", "longcat_flash", "youtu", "glm4_moe_lite"]
# One indexer per layer; layers that share one; a compressor of windows; blocks; with gated delta nets.
SPARSE = [
    "deepseek_v32",
    "glm_moe_dsa",
    "hy_v4",
    "deepseek_v4",
    "minimax_m3_vl_text",
    "qwen4_exp_text",
]


@pytest.mark.parametrize("name", [*LATENT, *SPARSE])
def test_latent_and_sparse_attention_packed_equals_transformers(name):
    if name not in causal_types():
        pytest.skip("this transformers does not have it")
    model = build(name)
    check_packing(model)
    assert not model.padded_rows
    assert bool(packed_mixers.sparse_attention_of(model.decoder())) == (name in SPARSE)
    assert max(differences(model).values()) <= EXACT


def test_sparse_attention_on_the_whole_pack_is_rejected(monkeypatch):
    """The boundary test: without boundaries the indexer picks tokens of other sequences."""
    model = build("deepseek_v32")

    def on_the_whole_pack(forward, packing, args, kwargs):
        return forward(*args, **kwargs)

    monkeypatch.setattr(packed_mixers, "run_by_sequence", on_the_whole_pack)
    with user_error("two sequences in one batch change each other"):
        probe(model)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_with_activation_checkpointing_gives_the_same_gradients(name):
    found = on_layout(name, ALONE, activation_checkpointing="full")
    assert worst_difference(found, on_layout(name, ALONE)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"shard": 2}, marks=CAMPAIGN),
        {"ulysses": 2},
        {"context": 2},
    ],
    ids=str,
)
def test_sparse_attention_on_two_ranks_gives_the_gradients_of_one(ranks2, layout):
    for name in ("deepseek_v32", "deepseek_v4"):
        assert on_two_ranks(name, ranks2, **layout) is True, name
