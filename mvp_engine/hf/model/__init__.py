"""The model on packed batches: `PackedModel` and `LanguageModel`, attention, preflight, and layouts.

Model engines call it through a `ModelAdapter`; kits subclass `PackedModel`.
"""

from __future__ import annotations

# What files outside of this room import, by module. A table, not imports: a start loads the modules that it needs.
DOOR = {
    "adapter": "HFAdapter ModelAdapter adapter_of cast_frozen_base cast_frozen_weights",
    "attention": (
        "NAME NoMask Overlay PACK_ARGUMENTS UnsupportedAttention Window boundaries "
        "check_options config_tree context_spec eager_attention names_in_forward "
        "packed_attention register register_variant use without_mask"
    ),
    "auto_model": "from_auto media_inputs",
    "config_source": (
        "declare_interleaved_mrope num_heads read_config tool_schema warn_of_custom_code "
        "with_vocabulary"
    ),
    "flop_costs": "FlopCosts PlanFacts Work attention_flops matmul_flops modules_in_forward_order",
    "input_hooks": "BlockContext cast_decoder_inputs embedding_dtype mark_sizes",
    "kv_cache": "KVCache",
    "language_model": "LanguageModel ValueModel config_logit_steps",
    "model_parts": (
        "blocks_by_part by_part matching names_by_part norms_by_part parts_of table trained_parts"
    ),
    "packed_model": "Outputs PackedModel losses_of",
    "preflight": (
        "BOUNDS EXACT NEIGHBOUR_BOUNDS TRIALS eager_eval max_difference mean_difference "
        "special_tokens"
    ),
    "tp_plan": "SummedGrad",
}
