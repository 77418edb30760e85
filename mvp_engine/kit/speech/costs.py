"""What speech costs: the FLOPs of the talker's positions and of the codes of frames, and what `mvp plan` asks.

Legend: N spoken turns, F frames, K codebooks.

Kinds of rows: `talker` (a position), `talker_media` (one that reads a hidden state), `codec_head` (a label of the first
codebook), `code` (a position of the code predictor, K of each frame), `code_head` (a frame).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.errors import count
from mvp_engine.hf.model.flop_costs import FlopCosts, PlanFacts, Work, attention_flops, matmul_flops
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


def speech_costs_alone(model: Any) -> FlopCosts:
    """The costs of CSM, which computes nothing for the text of a batch: it reads text in its speech rows."""
    csm: Any = model.hf
    config = csm.config
    depth = csm.depth_decoder
    costs = FlopCosts(rows={"text": 0.0})
    for layer in csm.backbone_model.layers:
        _add_weights(costs, "talker", layer, config)
        costs.add_pair("talker", None, 3 * attention_flops(layer.self_attn, config))
    _add_weights(costs, "codec_head", csm.lm_head, None)
    for layer in depth.model.layers:
        _add_weights(costs, "code", layer, depth.config)
        costs.add_pair("code", None, 3 * attention_flops(layer.self_attn, depth.config))
    _add_weights(costs, "code", depth.model.inputs_embeds_projector, None)
    head = depth.codebooks_head.weight
    costs.add_row("code_head", 2.0 * head.numel() * (2 + head.requires_grad))
    return costs


def add_speech_costs(costs: FlopCosts, model: Any) -> None:
    talker: Any = model.talker
    config = talker.config
    predictor = talker.code_predictor
    for layer in talker.model.layers:
        _add_weights(costs, "talker", layer, config.text_config)
        flops = 3 * attention_flops(layer.self_attn, config.text_config)
        costs.add_pair("talker", None, flops)
    _add_weights(costs, "talker", talker.text_projection, None)
    _add_weights(costs, "talker_media", talker.hidden_projection, None)
    _add_weights(costs, "codec_head", talker.codec_head, None)
    for layer in predictor.model.layers:
        _add_weights(costs, "code", layer, predictor.config)
        costs.add_pair("code", None, 3 * attention_flops(layer.self_attn, predictor.config))
    _add_weights(costs, "code_head", predictor.lm_head, None)


def _add_weights(costs: FlopCosts, kind: str, module: nn.Module, config: Any) -> None:
    """Forward, and backward to the inputs; to the weights, where they train."""
    for part in module.modules():
        for label, weight in part.named_parameters(recurse=False):
            flops = matmul_flops(part, label, weight, config)
            costs.add_row(kind, flops * (2 + weight.requires_grad))


def speech_work(costs: FlopCosts, media: Media) -> Iterator[Work]:
    """The rows of each kind, and the attention pairs with the cost of one, as `MFUKit.encoder_work` yields them."""
    rows_N = media.row_counts.double()
    frames = float(media.fields[FRAME_COUNTS].sum())
    books = media.values.shape[1] - FIRST_CODE
    yield "talker", float(rows_N.sum()), None
    if "talker_media" in costs.rows:
        yield "talker_media", float(media.fields[SOURCE_COUNTS].sum()), None
    yield "codec_head", frames + float(media.fields[TURN_COUNTS].sum()), None
    yield "code", frames * books, None
    yield "code_head", frames, None
    yield "pair", float((rows_N * (rows_N + 1) / 2).sum()), costs.pairs["talker", None]
    yield "pair", frames * books * (books + 1) / 2, costs.pairs["code", None]


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
        return {"text": batch.num_tokens * self.model.text_share(batch)}

    def encoder_media(self, batch: PackedBatch) -> dict[str, Media]:
        return {name: media for name, media in batch.media.items() if name != SPEECH}

    def experts_config(self, rows: str) -> Any:
        if rows == "talker":
            return self.model.talker.config.text_config
        return super().experts_config(rows)

    def head(self, batch: PackedBatch) -> Tensor | None:
        return None if self.model.text_share(batch) < 1.0 else super().head(batch)

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
