"""Tiny random models of real architectures: the families that the tests go through."""

from __future__ import annotations

from typing import Any

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

WINDOW = {"sliding_window": 3}
GEMMA = {"query_pre_attn_scalar": 8, **WINDOW}

# model type -> (what is special about it, what its config needs beyond SMALL)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("GQA", {}),
    "mistral": ("GQA, sliding window", WINDOW),
    "qwen2": ("GQA, biases", {}),
    "qwen3": ("GQA, query and key norms", {}),
    "qwen3_moe": ("mixture of experts", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "mixtral": ("mixture of experts", {"num_local_experts": 4}),
    "olmoe": ("mixture of experts", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "attention sinks, sliding window, mixture of experts",
        {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW},
    ),
    "gemma": ("scaled embeddings", {}),
    "gemma2": ("soft-capping of attention and logits, sliding window", GEMMA),
    "gemma3_text": ("sliding window in 5 of 6 layers, two rotary bases", GEMMA),
    "phi3": ("fused projections", {}),
    "olmo2": ("norms after the blocks", {}),
    "olmo3": ("sliding window", WINDOW),
    "granite": ("scaled residuals and logits", {"logits_scaling": 2.0}),
    "cohere2": ("parallel blocks, scaled logits, sliding window", WINDOW),
    "smollm3": ("layers without rotary positions", {}),
    "starcoder2": ("layer norms with biases, sliding window", WINDOW),
    "glm4": ("half-rotary positions", {}),
    "exaone4": ("hybrid windows", WINDOW),
    "ernie4_5": ("", {}),
    "seed_oss": ("", {}),
    "gpt_neox": ("parallel residuals, no GQA", {}),
    "gpt2": ("learned positions", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}

# Layers of these look across boundaries, or drop them on the way: they must be refused.
REFUSED = ["falcon_h1", "mamba", "jamba", "bloom", "minimax", "stablelm"]


def config_of(name: str) -> Any:
    from transformers import AutoConfig

    extra = FAMILIES[name][1] if name in FAMILIES else {}
    return AutoConfig.for_model(name, **{**SMALL, **extra})


def table() -> str:
    """The table in docs/models.md; `python tests/model_engine/families.py` prints it."""
    rows = [f"| `{name}` | {special or '-'} |" for name, (special, _) in FAMILIES.items()]
    return "\n".join(["| model type | what is special about it |", "| --- | --- |", *rows])


if __name__ == "__main__":
    print(table())
