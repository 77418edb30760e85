"""What actions cost: the FLOPs of the tokens behind the prefixes, and what `mvp plan` asks of action models.

Costs of a suffix token and of a pair with a token that it attends to are of the kind `action`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError, count
from mvp_engine.hf.model.flop_costs import FlopCosts, PlanFacts, attention_flops, matmul_flops
from mvp_engine.kit.actions.plugin import NOISE

if TYPE_CHECKING:
    from mvp_engine.kit.actions.chunk_regressor import ChunkRegressor
    from mvp_engine.kit.actions.pi0 import Pi0Policy

CAMERAS = 3  # of an assumed row
PROMPT_TOKENS = 32


def add_regressor_costs(costs: FlopCosts, model: ChunkRegressor) -> None:
    """The suffix runs through the text layers."""
    costs.rows["action"] = costs.rows["text"]
    for (kind, _), flops in list(costs.pairs.items()):
        if kind == "text":
            costs.pairs["action", None] = flops
    for module in (model.state_proj, model.action_head):
        _add_weights(costs, module, None)


def add_pi0_costs(costs: FlopCosts, model: Pi0Policy) -> None:
    """The suffix runs through the expert, which needs nothing of the last prefix layer but its keys and values."""
    hf: Any = model.hf
    config = hf.config.dit_config
    for layer in model.expert.layers:
        _add_weights(costs, layer, config)
        costs.add_pair("action", None, 3 * attention_flops(layer.self_attn, config))
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


class ActionFacts(PlanFacts):
    """An action head whose suffix runs through the text layers."""

    splits_sequences = False  # they are short
    is_simulated = False

    @property
    def backbone(self) -> Any:
        return self.model.backbone

    @property
    def has_text_loss(self) -> bool:
        """Whether co-training has rows of text; without a config, it has."""
        if self.config is None:
            return True
        return hasattr(self.config, "actions") and self.config.actions.text_weight > 0

    def unused_parameters(self) -> set[str]:
        return set() if self.has_text_loss else self.model.text_parameters

    def rows_of(self, block: nn.Module, part: str) -> str:
        return "action" if part == "action" else super().rows_of(block, part)

    def num_rows(self, batch: PackedBatch) -> dict[str, float]:
        suffix = float(self.model.num_suffix_rows(batch))
        return {"text": batch.num_tokens + suffix, "action": suffix}

    def attends_within_images(self) -> bool:
        return False  # by groups of queries, without masks

    def head(self, batch: PackedBatch) -> Tensor | None:
        return super().head(batch) if self.has_text_loss else None

    def assumed_batch(self, tokens: int) -> tuple[PackedBatch, int, str]:
        """Rows with three cameras, a prompt, and the draws of noise of the config."""
        from mvp_engine.kit.plan.packs import assumed_media

        draws = self.config.actions.draws if hasattr(self.config, "actions") else 1
        config = self.backbone.config
        image = assumed_media(config, tokens, None)
        if image is None:
            raise UserError(f"mvp plan does not know the images of {config.model_type}")
        item_tokens = image[1]
        max_length = CAMERAS * item_tokens + PROMPT_TOKENS
        rows = max(1, tokens // max_length)
        images = assumed_media(config, CAMERAS * rows * item_tokens, None)
        assert images is not None
        ids = torch.zeros(rows, max_length, dtype=torch.long)
        ids[:, : CAMERAS * item_tokens] = config.image_token_id
        spec = self.model.action_spec
        noise = torch.empty(rows, draws, spec.chunk, spec.action_dim, device="meta")
        no_loss = list(torch.zeros_like(ids, dtype=torch.bool))
        fields, media = {NOISE: noise}, {images[0]: images[2]}
        batch = PackedBatch.from_sequences(list(ids), no_loss, sequence_fields=fields, media=media)
        text = (
            f"packs of {count(rows, 'row')}, assumed: {CAMERAS} cameras of {item_tokens:,} tokens and a prompt of "
            f"{PROMPT_TOKENS}, {count(draws, 'draw')} of noise each"
        )
        return batch, max_length, text


class Pi0Facts(ActionFacts):
    """An action head with an expert of its own."""

    def num_rows(self, batch: PackedBatch) -> dict[str, float]:
        rows = super().num_rows(batch)
        return {**rows, "text": float(batch.num_tokens)}

    def head(self, batch: PackedBatch) -> Tensor | None:
        return self.backbone.get_input_embeddings().weight if self.has_text_loss else None
