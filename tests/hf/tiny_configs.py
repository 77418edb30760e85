"""Tiny random models of any text model type of transformers, from the field names of its config class.

There is no code per model: a rule sets the size that a field's name stands for (`RULES`), lists with one entry per
layer are shortened so that every kind of layer stays in them, and `EXCEPTIONS` holds the few values that must fit to
each other. `tests/hf/model_sweep.py` runs the models.
"""

import dataclasses
import re

LAYERS = 4
LONGEST = 64  # positions

# A pattern of the whole field name, and the value of every field with such a name. The first match counts.
RULES = [
    ("((pronunciation|shape)_)?vocab_size(_per_layer_input)?", 99),
    ("(pronunciation|shape)_embed_dim", 8),
    ("pad_token_id", 0),
    ("bos_token_id", 1),
    ("eos_token_id", 2),
    (
        "hidden_size(_global)?|d_model|n_embd|emb_dim|embedding_dim|embedding_size|word_embed_proj_dim",
        32,
    ),
    ("(in|out)put_embedding_size|lru_width|attention_hidden_size", 32),
    (
        "num_hidden_layers|n_layers?|num_layers|decoder_layers|num_blocks|num_layers_per_stack",
        LAYERS,
    ),
    ("(num_|n_|decoder_|swa_num_|linear_num_|num_)?(attention_)?heads?", 4),
    ("(swa_)?num_(key_value|kv)_heads|kv_n_heads|num_query_groups|linear_num_key_heads", 2),
    ("num_global_key_value_heads", 2),
    ("linear_num_value_heads", 4),
    (
        "(global_|swa_|attention_|linear_|linear_key_|linear_value_)?head_(dim|size)|kv_channels|d_head|dim_head",
        8,
    ),
    ("rotary_dim", 4),
    ("query_pre_attn_scalar", 8),
    (
        "max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length",
        LONGEST,
    ),
    ("original_max_position_embeddings", LONGEST),
    ("(moe_|expert_|shared_|dense_)?(shared_expert_)?(intermediate|ffn_hidden)_size(_mlp)?", 24),
    ("(decoder_)?ffn_(dim|hidden_size)|feed_forward_size|dff|dim_ff|d_inner", 24),
    ("(num|n|num_local|n_routed|moe_num)_(local_)?(routed_)?experts", 4),
    ("num_experts_per_tok|moe_topk|moe_k|num_experts_per_token|top_k_experts", 2),
    ("n_group|topk_group|num_expert_groups?", 1),
    ("zero_expert_num", 2),
    (
        "sliding_window(_size)?|attention_window_size|window_size|attention_chunk_size|keep_window_size",
        3,
    ),
    ("local_attention", 4),
    ("max_window_layers", 1),
    ("first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    ("qk_rope_head_dim", 4),
    ("qk_nope_head_dim|v_head_dim|qk_head_dim", 8),
    ("(kv|q|o)_lora_rank|laurel_rank|gated_norm_rank|adapter_rank|hc_lowrank", 8),
    ("index_head_dim", 8),
    # With few heads, scores of exactly 0 tie, and ties depend on the shape.
    (
        "index_n_heads|indexer_n_heads",
        16,
    ),
    ("index_topk", 3),
    ("index_block_size", 2),
    ("index_topk_blocks", 2),
    ("num_kv_shared_layers", 0),
    ("hidden_size_per_layer_input|ple_embed_dim|router_hidden_size", 8),
    ("mamba_d_state|state_size|ssm_state_size", 8),
    ("mamba_(d_head|head_dim|headdim)", 8),
    ("mamba_n(um)?_heads|n_mamba_heads", 8),
    ("mamba_dt_rank|time_step_rank", 4),
    ("(mamba_)?chunk_size|block_size", 8),
]

# Fields that get their size where the default config leaves them open.
OPEN = {
    "head_dim",
    "num_key_value_heads",
    "n_routed_experts",
    "n_group",
    "topk_group",
    "num_experts_per_tok",
}

LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
SPARSE = {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}

# Values without which the default config of a type is not valid.
NO_LAYER_INPUTS = {
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
NEEDED = {"gemma4_assistant": {"text_config": NO_LAYER_INPUTS}}

# Values that have to fit to each other, or that the default config does not use, by model type.
EXCEPTIONS = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_hash_byte_group_size": [3],
        "cross_attn_k": 2,
        "max_patch_length": 4,
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"intermediate_size": 24},
    "gemma4_assistant": {"text_config": {**NO_LAYER_INPUTS, "num_hidden_layers": 2}},
    "gemma4_text": {"head_dim": 8, "global_head_dim": 8},
    "gemma4_unified_text": {"head_dim": 8, "global_head_dim": 8},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": LINEAR,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": WINDOWS,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 4, "qk_head_dim": 12},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "mellum": WINDOWS,
    "minimax_m3_vl_text": SPARSE,
    "qwen2": {"use_sliding_window": True, "layer_types": None},
    "qwen2_moe": {"use_sliding_window": True, "layer_types": None},
    "qwen3": {"use_sliding_window": True, "layer_types": None},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
        "lsh_attention_probs_dropout_prob": 0.0,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_head_dim": 16, "attention_hidden_size": 64},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(name, **more):
    """A small config of this model type, with every kind of layer that the default config has."""
    from transformers import CONFIG_MAPPING, AutoConfig

    default = CONFIG_MAPPING[name](**NEEDED.get(name, {}))
    return AutoConfig.for_model(
        name, **{**small_values(default), **EXCEPTIONS.get(name, {}), **more}
    )


def small_values(default):
    """The settings that make a config small, those of its sub-configs included."""
    values = default.to_dict()
    small = {}
    for field in dataclasses.fields(default):
        value = values.get(default.attribute_map.get(field.name, field.name))
        size = _size(field.name)
        if field.name in default.sub_configs and getattr(default, field.name) is not None:
            small[field.name] = small_values(getattr(default, field.name))
        elif isinstance(value, list) and len(value) == values.get("num_hidden_layers"):
            small[field.name] = _one_of_each(value)
        elif size is not None and (value is None) == (field.name in OPEN and field.default is None):
            small[field.name] = size
    if "kv_lora_rank" in values:  # latent attention has no key/value heads
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def _size(field):
    return next((size for pattern, size in RULES if re.fullmatch(pattern, field)), None)


def _one_of_each(values):
    """As many values as the tiny model has layers, all different ones in the order in which they first appear."""
    kinds = list(dict.fromkeys(values))
    return (kinds * LAYERS)[: max(LAYERS, len(kinds))]
