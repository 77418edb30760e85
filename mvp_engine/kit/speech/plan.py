"""What `mvp plan` asks of models that speak: `hf/model/plan_facts.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.errors import count
from mvp_engine.hf.model.plan_facts import PlanFacts
from mvp_engine.kit.speech.flops import thinker_share
from mvp_engine.kit.speech.protocol import HEADER
from mvp_engine.kit.speech.rows import (
    FIRST_CODE,
    FRAME_COUNTS,
    LABEL,
    SOURCE_COUNTS,
    SPEECH,
    TURN_COUNTS,
)
from mvp_engine.ops.batched_heads import CHUNK_LOGITS

ROW_TOKENS = 128  # text of an assumed row
FRAMES = 125  # of its answer


class SpeechFacts(PlanFacts):
    """A talker behind a language model."""

    shares_experts = False
    is_simulated = False

    def __init__(self, model: Any, config: Any = None) -> None:
        super().__init__(model, config)
        self.predictor = set(model.predictor.modules())

    def rows_of(self, block: nn.Module, part: str) -> str:
        if block in self.predictor:
            return "code"
        return "talker" if part == "talker" else super().rows_of(block, part)

    def runs_last(self, rows: str) -> bool:
        return rows in ("talker", "code")

    def num_rows(self, batch: PackedBatch) -> dict[str, float]:
        return {"text": batch.num_tokens * thinker_share(self.model, batch)}

    def encoder_media(self, batch: PackedBatch) -> dict[str, Media]:
        return {name: media for name, media in batch.media.items() if name != SPEECH}

    def experts_config(self, rows: str) -> Any:
        if rows == "talker":
            return self.model.talker.config.text_config
        return super().experts_config(rows)

    def head(self, batch: PackedBatch) -> Tensor | None:
        return None if thinker_share(self.model, batch) < 1.0 else super().head(batch)

    def loss_bytes(self, batch: PackedBatch, size: int) -> float:
        """Around the heads of the talker: a chunk of logits, embeddings of all codes.

        In half precision the gradient of logits takes their place; in float32 there are three copies.
        """
        speech = batch.media.get(SPEECH)
        if speech is None or not len(speech.row_counts):
            return 0.0
        sizes = self.model.speech_sizes
        frames = int(speech.fields[FRAME_COUNTS].sum())
        logits = min(frames * (sizes.books - 1) * sizes.codes, CHUNK_LOGITS)
        embeddings = frames * sizes.books * sizes.width
        weights = (sizes.books - 1) * sizes.codes * sizes.width
        return logits * (2.0 if size == 2 else 12.0) + 3.0 * size * embeddings + 8.0 * weights

    def assumed_batch(self, tokens: int) -> tuple[PackedBatch, int, str]:
        """Spoken answers: talker positions count as tokens, as the data kit counts them."""
        talker_rows = ROW_TOKENS // 2 + HEADER + FRAMES
        rows = max(1, tokens // (ROW_TOKENS + talker_rows))
        books = self.model.speech_sizes.books
        values = torch.empty(
            rows * talker_rows, FIRST_CODE + books, dtype=torch.long, device="meta"
        )
        counts = torch.full((rows,), talker_rows)
        fields = {FRAME_COUNTS: torch.full((rows,), FRAMES), TURN_COUNTS: torch.ones(rows).long()}
        fields[SOURCE_COUNTS] = torch.zeros(rows).long()
        media = {SPEECH: Media(values, counts, torch.arange(rows), fields, label_column=LABEL)}
        ids = torch.zeros(rows, ROW_TOKENS, dtype=torch.long)
        text = (
            f"packs of {count(rows, 'row')}, assumed: {ROW_TOKENS} tokens of text and an answer of {FRAMES} frames, "
            "which is 10 seconds"
        )
        batch = PackedBatch.from_sequences(list(ids), media=media)
        return batch, ROW_TOKENS + talker_rows, text


class CsmFacts(SpeechFacts):
    """A model whose blocks read text in their rows of speech."""

    has_text_model = False

    def experts_config(self, rows: str) -> Any:
        return PlanFacts.experts_config(self, rows)

    def head(self, batch: PackedBatch) -> Tensor | None:
        return None
