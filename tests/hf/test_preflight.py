"""Preflight probes: models that cannot be packed are found when an engine starts, on every layout."""

import pytest
import torch
from conftest import user_error
from families import SMALL, config_of, overrides_of, parallel
from tiny_engines import ALONE, engine_of, message_of

from mvp_engine.distributed import Layout
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.mixers import kinds
from mvp_engine.hf.model import preflight
from mvp_engine.model_engine import FSDPEngine


def start(layout, model, precision="fp32"):
    """The model of an engine that started."""
    kind = {"kind": FSDPEngine} if isinstance(model, LanguageModel) else {}
    return engine_of(model, layout, optimizer=None, precision=precision, **kind).model


@pytest.mark.parametrize("family", ["bloom", "jamba"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_engine_start_family_that_cannot_be_packed_uses_padded_rows(family, precision, monkeypatch):
    monkeypatch.setattr(kinds, "kind_of", lambda mixer_class: None)
    model = start(ALONE, family, precision)
    assert model.padded_rows
    assert not model.can_cache


def test_engine_start_supported_family_in_bf16_passes_preflight():
    for family in ("qwen3", "gemma2", "gpt_oss", "qwen3_moe", "mamba", "jamba", "minimax"):
        start(ALONE, family, "bf16")


@pytest.mark.slow
def test_engine_start_on_two_ranks_rejects_unsupported_family_only(on_ranks):
    for of_rank in on_ranks({"shard": 2}, start_on_layouts):
        for layout, (unsupported, *supported) in of_rank.items():
            if layout == "ulysses":
                assert "jamba cannot be trained on packed sequences" in unsupported
                assert "Set parallel.ulysses=1" in unsupported
            else:  # it runs on padded rows
                assert unsupported == ""
            assert supported == ["", ""]


def start_on_layouts(first):
    layouts = {kind: Layout.of(first.world, parallel(**{kind: 2})) for kind in ("ulysses", "shard")}
    layouts["replicate"] = Layout.of(first.world, parallel())
    found = {}
    for kind, layout in layouts.items():
        supported = [message_of(layout, start, family) for family in ("qwen3", "jamba")]
        # Then a mixer runs on the whole pack.
        kind_of, kinds.kind_of = kinds.kind_of, lambda mixer_class: None
        found[kind] = (message_of(layout, start, "jamba"), *supported)
        kinds.kind_of = kind_of
    return found


def test_engine_start_model_instance_is_probed():
    torch.manual_seed(0)
    model = LanguageModel.from_config(config_of("granite"))
    model.scale = 1.0
    with torch.no_grad():
        model.hf.get_output_embeddings().weight *= 30
    with user_error("granite: log-probs differ from those of transformers' own forward"):
        start(ALONE, model)


def test_engine_start_non_finite_weights_are_reported():
    model = LanguageModel.from_config(config_of("llama"))
    with torch.no_grad():
        model.hf.get_output_embeddings().weight[3] = float("nan")
        model.base().norm.weight[0] = float("inf")
    with user_error("llama returns non-finite outputs"):
        start(ALONE, model)


def test_engine_start_config_that_transformers_own_forward_refuses_does_not_blame_packing():
    shape = {**overrides_of("qwen3"), "num_attention_heads": 4, "num_key_value_heads": 3}
    text = message_of(ALONE, start, shape)
    own = "transformers' own Qwen3ForCausalLM.forward fails with this config, without any packing"
    assert f"{own} (RuntimeError" in text
    assert "correct the sizes in model.config" in text
    assert "packed sequences" not in text


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_engine_start_single_layer_that_mixes_sequences_is_found(monkeypatch, precision):
    monkeypatch.setattr(kinds, "kind_of", lambda mixer_class: None)
    shape = {name: value for name, value in SMALL.items() if name != "head_dim"}
    shape |= {"model_type": "lfm2", "num_hidden_layers": 3}
    shape["layer_types"] = ["full_attention", "conv", "full_attention"]
    model = start(ALONE, shape, precision)
    assert "two sequences in one batch change each other" in model.padded_rows


def test_preflight_failed_trial_on_one_rank_is_repeated_on_all(on_ranks):
    """Otherwise the other rank would leave the probe and the collectives would hang."""
    assert on_ranks({"shard": 2}, trials_with_a_failure_on_rank_1) == [2, 2]


def trials_with_a_failure_on_rank_1(layout):
    calls = []
    original = preflight.mean_difference

    def difference(a, b):
        calls.append(a)
        return 1.0 if len(calls) == 1 and layout.world.rank == 1 else original(a, b)

    preflight.mean_difference = difference
    try:
        start(layout, "qwen3")
    finally:
        preflight.mean_difference = original
    return len(calls) // 2  # two calls per trial
