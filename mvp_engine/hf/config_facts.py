"""Facts about a model that follow from its transformers config alone."""

from __future__ import annotations

from typing import Any

from mvp_engine.hf.attention import config_tree


def num_heads(config: Any) -> tuple[int, int]:
    """Numbers of query heads and of key/value heads of a text config; minima if layers differ.

    Both are 0 for a model without attention (Mamba, RWKV).
    """
    layers = [config]
    per_layer = getattr(config, "per_layer_config", None)
    if per_layer is not None:
        layers = [per_layer[index] for index in range(config.num_hidden_layers)]
    layers = [layer for layer in layers if getattr(layer, "num_attention_heads", None)]
    query_heads = [layer.num_attention_heads for layer in layers]
    kv_heads = [_num_kv_heads(layer) for layer in layers]
    return min(query_heads, default=0), min(kv_heads, default=0)


def _num_kv_heads(layer: Any) -> int:
    return getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads


def placeholder_tokens(config: Any, vocab_size: int) -> list[int]:
    """Tokens that a model replaces by features of its encoders; without media they have no meaning."""
    found: set[int] = set()
    for part in config_tree(config):
        for kind in ("image", "video", "audio"):
            for name in (f"{kind}_token_id", f"{kind}_token_index"):
                token = getattr(part, name, None)
                if isinstance(token, int) and 0 <= token < vocab_size:
                    found.add(token)
    return sorted(found)


def packed_length_limit(config: Any) -> int | None:
    """The sequence length up to which rotary frequencies are constant; None without such a limit.

    `longrope` and `dynamic` scaling switch frequencies for a whole batch when its longest
    sequence passes this length, so a longer sequence would change the others of its pack.
    """
    limits = []
    for part in config_tree(config):
        rope_parameters = getattr(part, "rope_parameters", None) or {}
        by_layer_type = [value for value in rope_parameters.values() if isinstance(value, dict)]
        for rope in (rope_parameters, *by_layer_type):
            if rope.get("rope_type") in ("longrope", "dynamic"):
                limits.append(_original_length(rope, part))
    return min(limits, default=None)


def _original_length(rope: dict[str, Any], config: Any) -> int:
    length = rope.get("original_max_position_embeddings")
    length = length or getattr(config, "original_max_position_embeddings", None)
    return int(length or config.max_position_embeddings)
