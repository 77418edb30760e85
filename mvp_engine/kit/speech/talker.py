"""Qwen3-Omni's talker and its code predictor, teacher forced on the speech rows of a packed batch.

Legend: R talker positions of all spoken turns, F frames, K codebooks, D hidden size, T tokens of the thinker, M
positions that read one of its hidden states.

A talker sequence is one spoken turn, with boundaries of its own (`kit/speech/layout.py` has the layout, `protocol.py`
the plan that loader workers make). transformers has this protocol in `generate` only, step by step. The code predictor
reads (hidden state, code 0, ..., code K - 2) of each frame: all K positions in one pass, frames being a batch of short
sequences, where `generate` makes K - 1 passes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.distributed.ulysses import UlyssesShard
from mvp_engine.hf.model import attention
from mvp_engine.hf.model.input_hooks import embedding_dtype
from mvp_engine.kit.speech.layout import FIRST_CODE, TEXT
from mvp_engine.kit.speech.rows import SpeechRows

# Masks of the predictor's layers: none, since attention is causal by itself. Without a dict, transformers would look
# for packed sequences in the positions, which is a host sync.
_CAUSAL = {"full_attention": None, "sliding_attention": None}


class Qwen3Talker:
    """The passes of a talker, as `speech_rows.py` calls them."""

    def __init__(self, talker: Any, embed: nn.Module) -> None:
        """`embed` are the thinker's embeddings."""
        self.talker = talker
        self.embed = embed
        self.books = int(talker.config.num_code_groups)

    @property
    def decoder(self) -> Any:
        return self.talker.model

    @property
    def predictor(self) -> Any:
        return self.talker.code_predictor.model

    @property
    def first_head(self) -> Tensor:
        """(V, D) of the first codebook"""
        return self.talker.codec_head.weight

    def rest_heads(self) -> Tensor:
        """(K - 1, V, D) of the others"""
        return torch.stack([head.weight for head in self.talker.code_predictor.lm_head])

    def embeddings(self, codes_FK: Tensor) -> Tensor:
        """(F, K, D): the embeddings of the codes of each frame; the first codebook is the talker's own."""
        first_FD = self.talker.get_input_embeddings()(codes_FK[:, 0])
        tables = [table.weight for table in self.talker.code_predictor.get_input_embeddings()]
        # One lookup in one table, instead of one in each of K - 1.
        offsets_K = torch.arange(len(tables), device=codes_FK.device) * len(tables[0])
        rest_FKD = F.embedding(codes_FK[:, 1:] + offsets_K, torch.cat(tables))
        embeds_FKD = torch.cat([first_FD[:, None], rest_FKD], dim=1)
        return embeds_FKD.to(embedding_dtype(embeds_FKD))

    def embedding(self, codes_F: Tensor, book: int) -> Tensor:
        """(F, D): of one codebook."""
        if book == 0:
            return self.talker.get_input_embeddings()(codes_F)
        return self.talker.code_predictor.get_input_embeddings()[book - 1](codes_F)

    def text(self, ids_R: Tensor) -> Tensor:
        """(R, D): the text channel."""
        return self.talker.text_projection(self.embed(ids_R))

    def inputs(self, rows: SpeechRows, embeds_FKD: Tensor, hidden_TD: Tensor | None) -> Tensor:
        """(R, D): the text channel (projected embeddings, or hidden states at media) plus the codec channel.

        `hidden_TD` are the thinker's hidden states, needed where rows have media.
        """
        inputs_RD = self.text(rows.values[:, TEXT])
        if rows.sources is not None:
            assert hidden_TD is not None
            assert rows.source_tokens is not None
            media_MD = self.talker.hidden_projection(hidden_TD[rows.source_tokens])
            inputs_RD = inputs_RD.index_copy(0, rows.sources, media_MD.to(inputs_RD.dtype))
        first_R = rows.values[:, FIRST_CODE]
        header_RD = self.talker.get_input_embeddings()(first_R.clamp(min=0))
        inputs_RD = inputs_RD + header_RD.masked_fill((first_R < 0)[:, None], 0.0)
        rest_FD = embeds_FKD[:, 1:].sum(1)
        return inputs_RD.index_add(0, rows.frames, rest_FD.to(inputs_RD.dtype))

    def hidden(self, rows: SpeechRows, inputs_RD: Tensor, shard: UlyssesShard | None) -> Tensor:
        """(R, D): the last hidden states, each spoken turn a sequence of its own."""
        return packed_hidden(self.decoder, rows, inputs_RD, rows.positions, shard)

    def rest_hidden(self, hidden_FD: Tensor, embeds_FKD: Tensor) -> Tensor:
        """(K - 1, F, D): the inputs of the heads after the first. `hidden_FD`: of the rows that predict the frames."""
        inputs_FKD = torch.cat([hidden_FD[:, None].to(embeds_FKD.dtype), embeds_FKD[:, :-1]], dim=1)
        out = self.predictor(inputs_embeds=inputs_FKD, attention_mask=_CAUSAL, use_cache=False)
        return out.last_hidden_state[:, 1:].transpose(0, 1)


def packed_hidden(
    decoder: Any, rows: SpeechRows, inputs_RD: Tensor, positions: Tensor, shard: UlyssesShard | None
) -> Tensor:
    """(R, D): the last hidden states of a decoder on the rows, with `positions` of shape (R,) or (3, R).

    With `shard`, its ranks share the rows in the layers; each gets the hidden states of all.
    """
    options: dict[str, Any] = attention.boundaries(rows.cu_seqlens, max(rows.lengths))
    if shard is not None:
        inputs_RD = shard.cut(inputs_RD)
        positions = shard.cut(positions, dim=positions.ndim - 1)
        options["ulysses_shard"] = shard
    out = decoder(
        inputs_embeds=inputs_RD[None],
        position_ids=positions.unsqueeze(-2),
        use_cache=False,
        **options,
    )
    hidden_RD = out.last_hidden_state[0]
    return hidden_RD if shard is None else shard.gather_shared(hidden_RD)
