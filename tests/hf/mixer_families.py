"""Tiny models with mixers (linear attention, state space, short convolutions), at least one for each kind of mixer."""

import torch
from families import EXPERTS, PATCHES, SMALL, TOKENS

from mvp_engine.hf import LanguageModel

HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
DELTA_MOE = {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16, **HYBRID}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
NEMOTRON = {
    "layer_types": ["linear_attention", "full_attention", "mlp", "moe"],
    "num_hidden_layers": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 16,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
KDA = {
    **EXPERTS,
    "num_local_experts": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
ZAMBA2 = {
    "mamba_d_state": 8,
    "mamba_ngroups": 1,
    "n_mamba_heads": 4,
    "mamba_headdim": 16,
    "chunk_size": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "num_mem_blocks": 1,
}

# model type -> config settings beyond SMALL
MIXERS = {
    "qwen3_5_text": {**DELTA, **HYBRID},  # gated delta rule
    "qwen3_5_moe_text": DELTA_MOE,
    "qwen3_next": DELTA_MOE,
    "olmo_hybrid": {**DELTA, **HYBRID, "num_key_value_heads": 4},
    "kimi_linear": KDA,  # Kimi delta attention
    "lfm2_moe": {
        **EXPERTS,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
    },  # short convolution
    "nemotron_h": NEMOTRON,  # Mamba 2
    "granitemoehybrid": {
        **MAMBA2,
        **HYBRID,
        "num_local_experts": 4,
        "shared_intermediate_size": 16,
    },
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64},  # Mamba 2 and attention in the same layer
    "zamba2": ZAMBA2,
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
    "mamba": {"state_size": 8},  # selective scan
    "jamba": {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "minimax": {**HYBRID, "num_local_experts": 4, "block_size": 4},  # lightning attention
    "recurrent_gemma": {
        "lru_width": 32,
        "num_hidden_layers": 3,
        "attention_window_size": 8,
    },  # RG-LRU
    "rwkv": {"attention_hidden_size": 32},
    "xlstm": {"num_heads": 4, "num_blocks": 2},
    "zaya": {
        **EXPERTS,
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
    },  # convolutions of queries and keys
}
VISION_TEXT = {
    **SMALL,
    **DELTA,
    **HYBRID,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
}
VISION_MIXERS = {
    "qwen3_5": {"text_config": VISION_TEXT},
    "qwen3_5_moe": {"text_config": {**VISION_TEXT, **DELTA_MOE}},
}


def mixer_config(name, **changes):
    from transformers import AutoConfig

    if name in VISION_MIXERS:
        encoder = {**PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": []}
        return AutoConfig.for_model(name, **TOKENS, vision_config=encoder, **VISION_MIXERS[name])
    return AutoConfig.for_model(name, **{**SMALL, **MIXERS[name], **changes})


def mixer_model(name, kind=LanguageModel, **changes):
    """A tiny model without zero weights."""
    torch.manual_seed(0)
    model = kind.from_config(mixer_config(name, **changes))
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param)
    return model.eval()
