"""Tensor parallelism by transformers' plans: models with unusual heads equal one rank, or are rejected."""

import pytest
from conftest import user_error
from families import SMALL, overrides_of
from test_packed_layouts import gradients
from tiny_engines import ALONE, assert_close, message_of

GEMMA4 = {**SMALL, "model_type": "gemma4_text", "vocab_size_per_layer_input": 99}
GEMMA4 |= {"hidden_size_per_layer_input": 8, "sliding_window": 3}


def gradients_of(layout, config):
    return gradients(config, layout)


@pytest.mark.slow
def test_tensor_parallel_layers_with_different_head_sizes_equal_one_rank(on_ranks):
    expected = gradients(GEMMA4, ALONE)
    for found in on_ranks({"tensor": 2}, gradients_of, GEMMA4):
        assert_close(found, expected, 3e-4, floor=0.0)  # its many norms amplify rounding


def test_tensor_parallel_norm_with_weights_per_head_is_rejected(on_ranks):
    cohere = overrides_of("cohere") | {"use_qk_norm": True}
    expected = "layers.0.self_attn.q_norm has a weight for each head, and transformers' plan for"
    for message in on_ranks({"tensor": 2}, message_of, gradients_of, cohere):
        assert expected in message


def test_tensor_parallel_sparse_activations_of_a_sliced_mlp_are_a_user_error():
    from model_sweep import tiny_config

    from mvp_engine.hf.model.tp_plan import _check

    config = tiny_config("gemma3n_text")
    plan = config.base_model_tp_plan
    with user_error(r"gemma3n_text keeps the largest activations .* Set parallel.tensor=1"):
        _check(config, plan, 2)
    _check(tiny_config("gemma3n_text", activation_sparsity_pattern=[0.0] * 4), plan, 2)
