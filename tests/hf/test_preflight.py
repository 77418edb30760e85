"""Preflight probes: models that cannot be packed are found when an engine starts, on every layout."""

from __future__ import annotations

import pytest
import torch
from families import SMALL, config_of, overrides_of, parallel

from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.mixers import states
from mvp_engine.hf.model import preflight
from mvp_engine.model_engine import FSDPEngine, LanguageModelEngine, Settings


def start(family: str, world: World, settings: Settings | None = None, **sizes: int) -> str:
    """The error of an engine that rejects a model; empty without one."""
    model = LanguageModel.on_meta(None, overrides_of(family))
    try:
        LanguageModelEngine(model, Layout.of(world, parallel(**sizes)), settings).initialize()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", ["bloom", "jamba"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_engine_start_family_that_cannot_be_packed_uses_padded_rows(
    family: str, precision: str, monkeypatch
) -> None:
    monkeypatch.setattr(states, "is_mixer", lambda module: False)
    model = LanguageModel.on_meta(None, overrides_of(family))
    LanguageModelEngine(
        model, Layout(World.join("cpu")), Settings(precision=precision)
    ).initialize()
    assert model.padded_rows
    assert not model.can_cache


def test_engine_start_supported_family_in_bf16_passes_preflight() -> None:
    for family in ("qwen3", "gemma2", "gpt_oss", "qwen3_moe", "mamba", "jamba", "minimax"):
        assert start(family, World.join("cpu"), Settings(precision="bf16")) == ""


def test_engine_start_on_two_ranks_rejects_unsupported_family_only(ranks2) -> None:
    for answers in ranks2.run(start_on_layouts):
        for layout, (unsupported, *supported) in answers.items():
            if "ulysses" in layout:
                assert "jamba cannot be trained on packed sequences" in unsupported
                assert "Set parallel.ulysses=1" in unsupported
            else:  # it runs on padded rows
                assert unsupported == ""
            assert supported == ["", ""]


def start_on_layouts() -> dict[str, tuple[str, ...]]:
    world = World.join("cpu")
    layouts: list[dict[str, int]] = [{"shard": 2}, {"ulysses": 2}, {}]
    supported = {
        str(sizes): (start("qwen3", world, **sizes), start("jamba", world, **sizes))
        for sizes in layouts
    }
    is_mixer, states.is_mixer = (
        states.is_mixer,
        lambda module: False,
    )  # then a mixer runs on the whole pack
    answers = {
        str(sizes): (start("jamba", world, **sizes), *supported[str(sizes)]) for sizes in layouts
    }
    states.is_mixer = is_mixer
    world.close()
    return answers


def test_engine_start_model_instance_is_probed() -> None:
    torch.manual_seed(0)
    model = LanguageModel.from_config(config_of("granite"))
    model.scale = 1.0
    with torch.no_grad():
        model.hf.get_output_embeddings().weight *= 30
    with pytest.raises(
        UserError, match="granite: log-probs differ from those of transformers' own forward"
    ):
        FSDPEngine(model, Layout(World.join("cpu"))).initialize()


def test_engine_start_non_finite_weights_are_reported() -> None:
    model = LanguageModel.from_config(config_of("llama"))
    with torch.no_grad():
        model.hf.get_output_embeddings().weight[3] = float("nan")
        model.base().norm.weight[0] = float("inf")
    with pytest.raises(UserError, match="llama returns non-finite outputs"):
        FSDPEngine(model, Layout(World.join("cpu"))).initialize()


def test_engine_start_config_that_transformers_own_forward_refuses_does_not_blame_packing() -> None:
    model = LanguageModel.on_meta(
        None, {**overrides_of("qwen3"), "num_attention_heads": 4, "num_key_value_heads": 3}
    )
    with pytest.raises(UserError) as caught:
        LanguageModelEngine(model, Layout(World.join("cpu"))).initialize()
    text = str(caught.value)
    assert (
        "transformers' own Qwen3ForCausalLM.forward fails with this config, without any packing (RuntimeError"
        in text
    )
    assert "correct the sizes in model.config" in text
    assert "packed sequences" not in text


def test_engine_start_single_layer_that_mixes_sequences_is_found(monkeypatch) -> None:
    monkeypatch.setattr(states, "is_mixer", lambda module: False)
    more = {
        "model_type": "lfm2",
        "layer_types": ["full_attention", "conv", "full_attention"],
        "num_hidden_layers": 3,
    }
    for precision in ("fp32", "bf16"):
        model = LanguageModel.on_meta(
            None, {k: v for k, v in SMALL.items() if k != "head_dim"} | more
        )
        LanguageModelEngine(
            model, Layout(World.join("cpu")), Settings(precision=precision)
        ).initialize()
        assert "two sequences in one batch change each other" in model.padded_rows


def test_preflight_failed_trial_on_one_rank_is_repeated_on_all(ranks2) -> None:
    """Otherwise the other rank would leave the probe and the collectives would hang."""
    assert ranks2.run(trials_with_a_failure_on_rank_1) == [2, 2]


def trials_with_a_failure_on_rank_1() -> int:
    world = World.join("cpu")
    calls: list[torch.Tensor] = []
    original = preflight._difference

    def difference(a: torch.Tensor, b: torch.Tensor) -> float:
        calls.append(a)
        return 1.0 if len(calls) == 1 and world.rank == 1 else original(a, b)

    preflight._difference = difference
    try:
        start("qwen3", world, shard=2)
    finally:
        preflight._difference = original
    world.close()
    return len(calls) // 2  # two calls per trial
