"""FLOPs of a model per row of each kind and per attention pair, found by one walk over its modules.

A row is a token of the language model (for its head, one with a label), a patch or frame of an encoder, or an output of
a projector. A matmul costs 2 FLOPs for each weight and row; a mixer with a recurrent state writes and reads it with
every token. Backward costs the same again for each gradient that is needed: of the weight if it trains, of the input if
a module before it trains.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.hf.mixers.kinds import mixers_of, state_flops
from mvp_engine.ops.nf4 import Nf4Linear

_PROJECTOR = re.compile(r"merger|projector|connector|multi_modal|mm_|embed_vision|embed_audio")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")

# A kind of rows and their number; or "pair", the number of attention pairs, and the cost of one.
Work = tuple[str, Tensor | float, float | None]


@dataclass
class FlopCosts:
    """FLOPs of forward and backward, for each row of a kind and for each pair of tokens that attend."""

    rows: dict[str, float] = field(default_factory=dict)
    pairs: dict[tuple[str, int | None], float] = field(default_factory=dict)  # by kind and window

    def add_row(self, kind: str, flops: float) -> None:
        self.rows[kind] = self.rows.get(kind, 0.0) + flops

    def add_pair(self, kind: str, window: int | None, flops: float) -> None:
        self.pairs[kind, window] = self.pairs.get((kind, window), 0.0) + flops


def flop_costs(hf: Any) -> FlopCosts:
    """The costs of a Hugging Face model, with its parameters frozen as they are now."""
    text_config = hf.config.get_text_config()
    costs = FlopCosts()
    mixers = {*mixers_of(hf.get_decoder()).values()}
    head = hf.get_output_embeddings()
    input_has_grad = False  # a module before this one trains
    for module, name, is_text in modules_in_forward_order(hf):
        gets_grad = is_text or _block_index(name) < _num_blocks_with_grad(hf.config)
        # An attention layer: not one without weights.
        if hasattr(module, "is_causal") and next(module.parameters(), None) is not None:
            window = getattr(module, "sliding_window", None)
            if not is_text:
                window = _encoder_window(hf.config, name)
            has_backward = gets_grad and (input_has_grad or _trains(module.parameters()))
            flops = attention_flops(module, text_config) * (1 + 2 * has_backward)
            costs.add_pair("text" if is_text else "encoder", window, flops)
        elif module in mixers:
            has_backward = input_has_grad or _trains(module.parameters())
            costs.add_row("text", state_flops(module) * (1 + 2 * has_backward))
        for label, weight in module.named_parameters(recurse=False):
            forward = matmul_flops(module, label, weight, text_config if is_text else None)
            if not forward:
                continue
            num_grads = (weight.requires_grad + input_has_grad) * gets_grad
            kind = "text" if is_text else _encoder_row_kind(module, name)
            kind = "head" if module is head else kind
            costs.add_row(kind, forward * (1 + num_grads))
        input_has_grad = input_has_grad or _trains(module.parameters(recurse=False))
    return costs


def modules_in_forward_order(hf: Any) -> list[tuple[nn.Module, str, bool]]:
    """(module, name, is_text) in the order of the forward: encoders, projector, language model, head."""
    decoder = set(hf.get_decoder().modules())
    head = hf.get_output_embeddings()
    found = []
    for name, module in hf.named_modules():
        found.append((module, name, module in decoder or module is head))
    return sorted(found, key=lambda entry: entry[2])


def matmul_flops(module: nn.Module, label: str, weight: Tensor, text_config: Any) -> float:
    """Forward FLOPs of one row that is multiplied with this weight; 0 if the weight is not a matrix.

    Of the stacked matrices of experts a row meets `num_experts_per_tok`.
    """
    if isinstance(module, nn.Embedding) or "bias" in label:
        return 0.0
    if isinstance(module, Nf4Linear):
        return 2.0 * module.in_features * module.out_features
    if isinstance(module, _CONVOLUTIONS) or weight.ndim == 2:
        return 2.0 * weight.numel()
    num_experts = _num_experts(text_config)
    if weight.ndim == 3 and len(weight) == num_experts:
        return 2.0 * weight.numel() / num_experts * text_config.num_experts_per_tok
    return 0.0


def _num_experts(text_config: Any) -> int:
    for key in _NUM_EXPERTS_KEYS:
        number = getattr(text_config, key, None)
        if number:
            return number
    return 0


def _trains(parameters: Iterator[nn.Parameter]) -> bool:
    return any(parameter.requires_grad for parameter in parameters)


def _encoder_row_kind(module: nn.Module, name: str) -> str:
    """Which rows an encoder's module is applied to."""
    if isinstance(module, nn.Conv1d):
        return "frame" if module.stride[0] == 1 else "encoder"
    if isinstance(module, nn.Conv2d):
        return "patch"
    return "projector" if _PROJECTOR.search(name) else "encoder"


def attention_flops(module: Any, text_config: Any) -> float:
    """Forward FLOPs of one pair of tokens that attend: the score, and the weighted value."""
    num_heads = getattr(module, "num_heads", None) or text_config.num_attention_heads
    head_dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    dims = 2 * head_dim if head_dim else module.qk_head_dim + module.v_head_dim
    return 2.0 * num_heads * dims


def _block_index(name: str) -> int:
    """The index of the block that a module is part of; -1 if it is in none."""
    found = re.search(r"\.(\d+)\.", f"{name}.")
    return int(found[1]) if found else -1


def _num_blocks_with_grad(config: Any) -> float:
    """Where the features of an earlier block are used, the blocks after it run forward and get no gradient."""
    layer = getattr(config, "vision_feature_layer", -1)
    if isinstance(layer, int) and layer < -1:
        return config.vision_config.num_hidden_layers + layer + 1
    return math.inf


def _encoder_window(config: Any, name: str) -> int | None:
    """The side of an encoder block's attention windows in patches; None for full attention."""
    vision: Any = getattr(config, "vision_config", None)
    full_attention_blocks = getattr(vision, "fullatt_block_indexes", None)
    if full_attention_blocks is None or _block_index(name) in full_attention_blocks:
        return None
    return vision.window_size // vision.patch_size


# PlanFacts: what `mvp plan` asks of a model, next to its modules and its FLOPs.
#
# A model with more than text and encoders names a subclass in `PackedModel.plan_facts`.


class PlanFacts:
    """`config`: the config of the recipe, or None."""

    has_text_model = True
    splits_sequences = True  # over context and Ulysses ranks
    shares_experts = True  # over expert-parallel ranks
    is_simulated = True  # its loss runs on tensors without values

    def __init__(self, model: Any, config: Any = None) -> None:
        self.model = model
        self.config = config

    @property
    def backbone(self) -> Any:
        """The vision-language model whose modules and config are walked."""
        return self.model.hf

    def unused_parameters(self) -> set[str]:
        """Names of trained parameters that get no gradient."""
        return set()

    def rows_of(self, block: nn.Module, part: str) -> str:
        """The kind of rows that a block processes: a key of `num_rows`, or `encoder` or `projector`."""
        return {"llm": "text", "projector": "projector"}.get(part, "encoder")

    def num_rows(self, batch: PackedBatch) -> dict[str, float]:
        """The rows of each kind, apart from those of encoders."""
        return {"text": float(batch.num_tokens)}

    def encoder_media(self, batch: PackedBatch) -> dict[str, Media]:
        return batch.media

    def runs_last(self, rows: str) -> bool:
        """Whether blocks with these rows run behind everything else that trains."""
        return False

    def experts_config(self, rows: str) -> Any:
        """The config with the number of experts of a row; None for encoders."""
        is_encoder = rows in ("encoder", "projector")
        return None if is_encoder else self.backbone.config.get_text_config()

    def attends_within_images(self) -> bool:
        """Whether tokens of an image attend to each other in the text layers (Gemma 3, PaliGemma)."""
        text: Any = self.model.hf.config.get_text_config()
        has_types = "token_type_ids" in inspect.signature(self.model.hf.forward).parameters
        return has_types or bool(getattr(text, "use_bidirectional_attention", False))

    def head(self, batch: PackedBatch) -> Tensor | None:
        """The weight that computes the logits of the batch; None without logits."""
        head = self.model.hf.get_output_embeddings()
        return None if head is None else head.weight

    def loss_bytes(self, batch: PackedBatch, size: int) -> float:
        """Memory of losses other than that of text, for elements of `size` bytes."""
        return 0.0

    def assumed_batch(self, tokens: int) -> tuple[PackedBatch, int, str] | None:
        """A full pack where the data is not known, the tokens of its rows, and its description.

        None: rows of text, and images or audio for the encoders.
        """
        return None
