"""FLOPs of action heads: the tokens behind the prefixes, and what they attend to.

Legend: S sequences, N noise draws, C steps of a chunk.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.model.flop_costs import FlopCosts, attention_flops, matmul_flops
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.kit.actions.action_model import NOISE, ActionModel
from mvp_engine.kit.actions.pi0 import Pi0Policy


def language_backbone(model: PackedModel) -> Any:
    """The vision-language model whose modules and config an estimate walks: of pi0, its PaliGemma."""
    return model.base() if isinstance(model, Pi0Policy) else model.hf


def num_draws(batch: PackedBatch) -> int:
    noise = batch.sequence_fields.get(NOISE)
    return 1 if noise is None else noise.shape[1]


def num_suffix_rows(model: PackedModel, batch: PackedBatch) -> int:
    """Tokens of states and chunks."""
    if not isinstance(model, ActionModel):
        return 0
    draws = num_draws(batch) if isinstance(model, Pi0Policy) else 1
    return batch.num_sequences * (1 + draws * model.action_spec.chunk)


def suffix_pairs(model: ActionModel, batch: PackedBatch) -> Tensor:
    """Pairs of a suffix token and a token that it attends to."""
    lengths_S = batch.cu_seqlens.diff().double()
    chunk = model.action_spec.chunk
    draws = num_draws(batch) if isinstance(model, Pi0Policy) else 1
    return ((lengths_S + 1) + draws * chunk * (lengths_S + 1 + chunk)).sum()


def add_action_costs(costs: FlopCosts, model: ActionModel) -> None:
    """Add the costs of a suffix token under the kind `action`."""
    if not isinstance(model, Pi0Policy):  # the suffix runs through the text layers
        for name in ("rows", "pairs"):
            table: Any = getattr(costs, name)
            for key, flops in list(table.items()):
                kind = key if name == "rows" else key[0]
                if kind == "text":
                    table["action" if name == "rows" else ("action", None)] = flops
        regressor: Any = model
        for module in (regressor.state_proj, regressor.action_head):
            _add_weights(costs, module, None)
        return
    config: Any = model.hf.config
    hf: Any = model.hf
    for layer in model.expert.layers:
        _add_weights(costs, layer, config.dit_config)
        costs.add_pair("action", None, 3 * attention_flops(layer.self_attn, config.dit_config))
    for module in (hf.embed_action_time, hf.action_out_proj):
        _add_weights(costs, module, None)
    _remove_last_prefix_layer(costs, model)


def _remove_last_prefix_layer(costs: FlopCosts, model: Pi0Policy) -> None:
    """Actions need the keys and values of the last prefix layer and nothing behind them."""
    decoder: Any = model.decoder()
    layer = decoder.layers[-1]
    passes = 1 + 2 * any(p.requires_grad for p in layer.parameters())
    attention = layer.self_attn
    for module in (attention.q_proj, attention.o_proj, layer.mlp):
        for part in module.modules():
            for label, weight in part.named_parameters(recurse=False):
                costs.add_row("text", -passes * matmul_flops(part, label, weight, decoder.config))
    costs.add_pair("text", None, -passes * attention_flops(attention, decoder.config))


def _add_weights(costs: FlopCosts, module: nn.Module, config: Any) -> None:
    """Forward, and backward to the inputs; to the weights, where they train."""
    for part in module.modules():
        for label, weight in part.named_parameters(recurse=False):
            flops = matmul_flops(part, label, weight, config)
            costs.add_row("action", flops * (2 + weight.requires_grad))
