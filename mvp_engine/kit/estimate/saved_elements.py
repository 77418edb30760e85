"""SavedElements: what one transformer block saves for backward, per row, counted from its layers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.ops import fp8
from mvp_engine.ops.cudnn_attention import LARGEST_HEAD  # also FlashAttention's

HEAD_DIM = 64  # of attention that does not name it


@dataclass
class SavedElements:
    """Elements per row that backward of a block needs, by mode of activation checkpointing."""

    none: float = 0.0
    selective: float = 0.0  # outputs of GEMMs and attention
    full: float = 0.0  # the input of the block
    attention: float = 0.0  # the output of attention
    heads: float = 0.0  # of attention
    fp8_gradients: float = 0.0  # bytes less with `model.fp8_weight_gradients`, in compiled blocks


def saved_elements(block: nn.Module) -> SavedElements:
    """Count the elements over the groups of a block: attention, MLP, experts, norms.

    A group of linear layers saves the input and the outputs of its first layers and the input of its last one.
    Rotary embeddings create new queries and keys. A norm saves its input. LoRA saves little besides the input of
    its layer, which is counted already.
    """
    saved = SavedElements()
    for group in block.children():
        linear = _linear_layers(group)
        experts = [p for p in group.parameters() if p.ndim == 3]
        if linear:
            _add_linear(saved, group, linear)
        if experts:
            _add_experts(saved, experts, _experts_per_token(group))
        if not linear and not experts:
            for name, param in group.named_parameters():
                if name.endswith("weight") and param.ndim == 1:  # of a norm
                    saved.none += param.numel()
    saved.selective += saved.full
    return saved


def saved_for_keys(block: Any) -> SavedElements:
    """Of a block that only computes keys and values: the inputs of its norm and projections, and the rotated keys."""
    width = float(block.self_attn.k_proj.in_features)
    keys = float(block.self_attn.k_proj.out_features)
    return SavedElements(2 * width + 2 * keys, width + 2 * keys, width)


def _linear_layers(group: nn.Module) -> list[nn.Linear]:
    layers = []
    for name, module in group.named_modules():
        if isinstance(module, nn.Linear) and "lora_" not in name:
            layers.append(module)
    return layers


def _add_linear(saved: SavedElements, group: nn.Module, layers: list[nn.Linear]) -> None:
    *first, last = layers
    last_input = float(last.in_features)
    outputs = float(sum(layer.out_features for layer in first))
    first_input = max((layer.in_features for layer in first), default=0.0)
    saved.none += last_input + outputs + first_input
    saved.selective += outputs + last.out_features
    saved.full = max(saved.full, float(last.out_features))
    is_attention = hasattr(group, "is_causal") and bool(first)
    if is_attention:  # queries are as wide as the attention output, the last layer's input
        saved.none += last_input + (outputs - last_input) / 2
        saved.selective += last_input
        saved.attention += last_input
        saved.heads += last_input / (getattr(group, "head_dim", None) or HEAD_DIM)
    # One byte of an input instead of two. Backward of attention needs its output in bf16 all the same.
    if any(_has_fp8_gradient(layer) for layer in first):
        saved.fp8_gradients += first_input
    if _has_fp8_gradient(last):
        saved.fp8_gradients += -last_input if is_attention else last_input


def _has_fp8_gradient(layer: nn.Linear) -> bool:
    return fp8.fits(layer) and layer.weight.requires_grad


def _add_experts(saved: SavedElements, weights: list[nn.Parameter], per_token: int) -> None:
    saved.none += per_token * sum(float(weight.shape[1] + weight.shape[2]) for weight in weights)
    saved.selective += per_token * sum(float(weight.shape[1]) for weight in weights)


def _experts_per_token(group: nn.Module) -> int:
    for module in group.modules():
        for name in ("top_k", "num_experts_per_tok"):
            found = getattr(module, name, None)
            if isinstance(found, int):
                return found
    return 1


# ---- Attention that is no operator ----------------------------------------------------------------------------------


def has_fused_attention(block: nn.Module) -> bool:
    """Whether the layers of a block let a GPU compute attention by cuDNN or FlashAttention.

    They are operators, whose outputs the mode `attention` keeps. FlexAttention (soft caps, sinks, other head sizes),
    the reference loop (dropout) and mixers of hybrid models are none: there `attention` is `full`.
    """
    return any(hasattr(layer, "is_causal") and _is_fused(layer) for layer in block.modules())


def _is_fused(attention: Any) -> bool:
    softcap = getattr(attention, "attn_logit_softcapping", None)
    sinks = getattr(attention, "sinks", None)
    dropout: Any = getattr(attention, "attention_dropout", None)
    if softcap is not None or sinks is not None or dropout:
        return False
    size = getattr(attention, "qk_head_dim", None) or getattr(attention, "head_dim", None)
    head_dim = int(size or HEAD_DIM)
    same_values = getattr(attention, "v_head_dim", head_dim) == head_dim
    return head_dim % 8 == 0 and head_dim <= LARGEST_HEAD and same_values


def attends_within_images(model: PackedModel) -> bool:
    """Whether tokens of an image attend to each other in the language model, by FlexAttention (Gemma 3, PaliGemma)."""
    hf: Any = model.hf
    text: Any = hf.config.get_text_config()
    has_types = "token_type_ids" in inspect.signature(hf.forward).parameters
    return has_types or bool(getattr(text, "use_bidirectional_attention", False))
