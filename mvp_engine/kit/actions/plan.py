"""What `mvp plan` asks of action models: `hf/model/plan_facts.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError, count
from mvp_engine.hf.model.plan_facts import PlanFacts
from mvp_engine.kit.actions.action_flops import language_backbone, num_suffix_rows
from mvp_engine.kit.actions.action_model import NOISE

CAMERAS = 3  # of an assumed row
PROMPT_TOKENS = 32


class ActionFacts(PlanFacts):
    """An action head whose suffix runs through the text layers."""

    splits_sequences = False  # they are short
    is_simulated = False

    @property
    def backbone(self) -> Any:
        return language_backbone(self.model)

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
        suffix = float(num_suffix_rows(self.model, batch))
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
        row_tokens = CAMERAS * item_tokens + PROMPT_TOKENS
        rows = max(1, tokens // row_tokens)
        images = assumed_media(config, CAMERAS * rows * item_tokens, None)
        assert images is not None
        ids = torch.zeros(rows, row_tokens, dtype=torch.long)
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
        return batch, row_tokens, text


class Pi0Facts(ActionFacts):
    """An action head with an expert of its own."""

    def num_rows(self, batch: PackedBatch) -> dict[str, float]:
        rows = super().num_rows(batch)
        return {**rows, "text": float(batch.num_tokens)}

    def head(self, batch: PackedBatch) -> Tensor | None:
        return self.backbone.get_input_embeddings().weight if self.has_text_loss else None
