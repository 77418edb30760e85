"""FLOPs of speech: the talker's positions, the codes of frames, and thinker blocks that do not run for speech alone.

Legend: N spoken turns, F frames, K codebooks.

Kinds of rows: `talker` (a position), `talker_media` (one that reads a hidden state), `codec_head` (a label of the first
codebook), `code` (a position of the code predictor, K of each frame), `code_head` (a frame).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.kit.flop_costs import FlopCosts, attention_flops, matmul_flops
from mvp_engine.kit.speech.csm import CsmModel
from mvp_engine.kit.speech.omni_model import OmniModel, trains_text
from mvp_engine.kit.speech.rows import (
    FIRST_CODE,
    FRAME_COUNTS,
    SOURCE_COUNTS,
    SPEECH,
    TURN_COUNTS,
)

SPEAKING = (OmniModel, CsmModel)


def speech_costs_alone(model: CsmModel) -> FlopCosts:
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


def add_speech_costs(costs: FlopCosts, model: OmniModel) -> None:
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


def speech_work(
    costs: FlopCosts, media: Media
) -> Iterator[tuple[str, Tensor | float, float | None]]:
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


def thinker_share(model: PackedModel, batch: PackedBatch) -> float:
    """The share of the thinker's text layers that run: all, or for speech alone none, or those below what is read."""
    if not isinstance(model, OmniModel) or trains_text(model):
        return 1.0
    kinds = [kind for kind, media in batch.media.items() if len(media.row_counts)]
    if not any(kind != SPEECH for kind in kinds):
        return 0.0
    layers: Any = model.decoder().layers
    return model.talker.config.accept_hidden_layer / len(layers)
