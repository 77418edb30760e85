"""Tensor parallelism by transformers' plans: models with unusual heads equal one rank, or are rejected."""

from __future__ import annotations

from typing import Any

import pytest
from families import SMALL, overrides_of, parallel
from folders import alone
from test_packed_layouts import gradients

from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError

GEMMA4 = {"model_type": "gemma4_text", **SMALL, "vocab_size_per_layer_input": 99}
GEMMA4 |= {"hidden_size_per_layer_input": 8, "sliding_window": 3}


def test_tensor_parallel_layers_with_different_head_sizes_equal_one_rank(
    ranks2, monkeypatch
) -> None:
    monkeypatch.setattr("test_packed_layouts.overrides_of", lambda _: GEMMA4)
    expected = gradients("gemma4_text", alone())
    for found in ranks2.run(gradients_on_ranks, GEMMA4, {"tensor": 2}):
        assert found.keys() == expected.keys()
        for name, grad in expected.items():  # its many norms of small values amplify rounding
            assert float((found[name] - grad).abs().max()) < 3e-4 * float(grad.abs().max()), name


def test_tensor_parallel_norm_with_weights_per_head_is_rejected(ranks2) -> None:
    for message in ranks2.run(
        gradients_on_ranks, overrides_of("cohere") | {"use_qk_norm": True}, {"tensor": 2}
    ):
        assert (
            "layers.0.self_attn.q_norm has a weight for each head, and transformers' plan for cohere"
            in message
        )


def gradients_on_ranks(config: dict[str, Any], sizes: dict[str, int]) -> Any:
    import test_packed_layouts as layouts

    world = World.join("cpu")
    before, layouts.overrides_of = layouts.overrides_of, lambda _: config
    try:
        return gradients("any", Layout.of(world, parallel(**sizes)))
    except UserError as error:
        return str(error)
    finally:
        layouts.overrides_of = before
        world.close()


def test_tensor_parallel_sparse_activations_of_a_sliced_mlp_are_a_user_error() -> None:
    from model_sweep import tiny_config

    from mvp_engine.hf.model.tp_plan import _check

    config = tiny_config("gemma3n_text")
    with pytest.raises(
        UserError, match=r"gemma3n_text keeps the largest activations .* Set parallel.tensor=1"
    ):
        _check(config, config.base_model_tp_plan, 2)
    _check(
        tiny_config("gemma3n_text", activation_sparsity_pattern=[0.0] * 4),
        config.base_model_tp_plan,
        2,
    )
