"""One teacher-forced pass of Qwen3-Omni's talker and its code predictor, on the speech rows of a packed batch.

Legend: R talker positions of all spoken turns, N spoken turns, F frames, P positions with a label (frames and ends of
speech), K codebooks, D hidden size.

A talker sequence is one spoken turn, with boundaries of its own (`data/speech.py` has the layout, `speech_protocol.py`
the plan that loader workers make). transformers has this protocol in `generate` only, step by step. The code predictor
reads (hidden state, code 0, ..., code K - 2) of each frame: all K positions in one pass, frames being a batch of short
sequences, where `generate` makes K - 1 passes. All sizes are known on the host: no host sync.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.data.batch import IGNORE, Media, PackedBatch
from mvp_engine.data.speech import (
    CODES,
    FIRST_CODE,
    FRAME_COUNTS,
    LABEL,
    POSITIONS,
    SOURCE,
    SOURCE_COUNTS,
    SPEECH,
    TEXT,
)
from mvp_engine.distributed.key_exchange import to_device
from mvp_engine.distributed.ulysses import UlyssesShard, even_sizes
from mvp_engine.hf import attention

# Masks of the predictor's layers: none, since attention is causal by itself. Without a dict, transformers would look
# for packed sequences in the positions, which is a host sync.
_CAUSAL = {"full_attention": None, "sliding_attention": None}


@dataclass(frozen=True, eq=False)
class SpeechRows:
    """The speech of a batch: `values` as `data/speech.py` describes them, and where its frames and labels are."""

    values: Tensor  # (R, 6 + K)
    lengths: list[int]  # of the talker's sequences
    cu_seqlens: Tensor  # (N + 1,) int32
    frames: Tensor  # (F,) rows of frames
    labelled: Tensor  # (P,) rows that predict a frame, or the end
    sources: Tensor | None  # (M,) rows of media; None without any
    source_tokens: Tensor | None  # (M,) their tokens in the batch
    num_real_labelled: int  # without those of dummy sequences, which come last

    @classmethod
    def of(cls, batch: PackedBatch) -> SpeechRows | None:
        """None for a batch without speech."""
        speech = batch.media.get(SPEECH)
        if speech is None or not len(speech.row_counts):
            return None
        values = speech.values
        device = values.device
        lengths: list[int] = speech.row_counts.tolist()
        num_frames = int(speech.fields[FRAME_COUNTS].sum())
        num_sources = int(speech.fields[SOURCE_COUNTS].sum())
        is_frame_R = values[:, -1] >= 0
        predicts_R = F.pad(is_frame_R[1:], (0, 1))  # the row after the last of an item is no frame
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        sources = None
        tokens = None
        if num_sources:
            sources = torch.nonzero_static(values[:, SOURCE] >= 0, size=num_sources)[:, 0]
            starts_N = batch.cu_seqlens.long()[to_device(speech.sequence_ids, device)]
            counts_N = to_device(speech.row_counts, device)
            starts_R = starts_N.repeat_interleave(counts_N, output_size=len(values))
            tokens = (values[:, SOURCE] + starts_R)[sources]
        return cls(
            values=values,
            lengths=lengths,
            cu_seqlens=to_device(offsets, device),
            frames=torch.nonzero_static(is_frame_R, size=num_frames)[:, 0],
            labelled=torch.nonzero_static(is_frame_R | predicts_R, size=num_frames + len(lengths))[
                :, 0
            ],
            sources=sources,
            source_tokens=tokens,
            num_real_labelled=_num_real(batch, speech),
        )

    @property
    def codes(self) -> Tensor:
        """(F, K)"""
        return self.values[self.frames][:, CODES]

    @property
    def places_of_frames(self) -> Tensor:
        """(F,): for each frame, the place in `labelled` of the row that predicts it."""
        return torch.searchsorted(self.labelled, self.frames) - 1


def _num_real(batch: PackedBatch, speech: Media) -> int:
    real = getattr(batch, "num_real_sequences", batch.num_sequences)
    items = int((speech.sequence_ids < real).sum())
    return int(speech.fields[FRAME_COUNTS][:items].sum()) + items


class SpeechScores(NamedTuple):
    """Log-probs and entropies of codes."""

    first: Tensor  # (P,)
    first_entropy: Tensor
    rest: Tensor  # (K - 1, F)
    rest_entropy: Tensor

    def loss(self) -> Tensor:
        """(2,): of the first codebook, and the mean over the others, each summed over frames."""
        return torch.stack([-self.first.sum(), -self.rest.mean(0).sum()])


@dataclass(frozen=True)
class RowShare:
    """How the ranks of a sequence-parallel group share what comes after the talker's layers: heads, code predictor."""

    labelled: UlyssesShard
    frames: UlyssesShard

    @classmethod
    def of(cls, shard: UlyssesShard, rows: SpeechRows) -> RowShare:
        def share(total: int) -> UlyssesShard:
            sizes = even_sizes(total, len(shard.sizes))
            return UlyssesShard(shard.group, shard.rank, sizes)

        return cls(share(len(rows.labelled)), share(len(rows.frames)))

    def cut_frames(self, frames_F: Tensor) -> Tensor:
        """This rank's frames; one at least, since every rank runs the code predictor."""
        own = self.frames.cut(frames_F)
        return own if len(own) else frames_F[:1]

    def own(self, scores: SpeechScores) -> SpeechScores:
        """Without a frame that another rank has too."""
        size = self.frames.sizes[self.frames.rank]
        rest = scores.rest[:, :size]
        return scores._replace(rest=rest, rest_entropy=scores.rest_entropy[:, :size])

    def gather(self, scores: SpeechScores) -> SpeechScores:
        """Of all rows, on every rank."""
        return SpeechScores(
            self.labelled.gather(scores.first),
            self.labelled.gather(scores.first_entropy),
            self.frames.gather(scores.rest.T.contiguous()).T,
            self.frames.gather(scores.rest_entropy.T.contiguous()).T,
        )


def codec_embeddings(talker: Any, codes_FK: Tensor) -> Tensor:
    """(F, K, D): the embeddings of the codes of each frame; the first codebook is the talker's own."""
    first_FD = talker.get_input_embeddings()(codes_FK[:, 0])
    tables = [table.weight for table in talker.code_predictor.get_input_embeddings()]
    # One lookup in one table, instead of one in each of K - 1.
    offsets_K = torch.arange(len(tables), device=codes_FK.device) * len(tables[0])
    rest_FKD = F.embedding(codes_FK[:, 1:] + offsets_K, torch.cat(tables))
    return torch.cat([first_FD[:, None], rest_FKD], dim=1)


def talker_inputs(
    talker: Any,
    embed: nn.Module,
    rows: SpeechRows,
    frame_embeds_FKD: Tensor,
    hidden_TD: Tensor | None,
) -> Tensor:
    """(R, D): the text channel (projected embeddings, or hidden states at media) plus the codec channel.

    `embed` are the thinker's embeddings, `hidden_TD` its hidden states, needed where rows have media.
    """
    inputs_RD = talker.text_projection(embed(rows.values[:, TEXT]))
    if rows.sources is not None:
        assert hidden_TD is not None
        assert rows.source_tokens is not None
        media_MD = talker.hidden_projection(hidden_TD[rows.source_tokens])
        inputs_RD = inputs_RD.index_copy(0, rows.sources, media_MD.to(inputs_RD.dtype))
    first_R = rows.values[:, FIRST_CODE]
    header_RD = talker.get_input_embeddings()(first_R.clamp(min=0))
    inputs_RD = inputs_RD + header_RD.masked_fill((first_R < 0)[:, None], 0.0)
    rest_FD = frame_embeds_FKD[:, 1:].sum(1)
    return inputs_RD.index_add(0, rows.frames, rest_FD.to(inputs_RD.dtype))


def talker_hidden(
    talker: Any, rows: SpeechRows, inputs_RD: Tensor, shard: UlyssesShard | None = None
) -> Tensor:
    """(R, D): the last hidden states of the talker, each spoken turn a sequence of its own.

    With `shard`, its ranks share the rows in the talker's layers; each gets the hidden states of all.
    """
    positions_3R = rows.values[:, POSITIONS].T
    options: dict[str, Any] = attention.boundaries(rows.cu_seqlens, max(rows.lengths))
    if shard is not None:
        inputs_RD = shard.cut(inputs_RD)
        positions_3R = shard.cut(positions_3R, dim=1)
        options["ulysses_shard"] = shard
    out = talker.model(
        inputs_embeds=inputs_RD[None],
        position_ids=positions_3R[:, None],
        use_cache=False,
        **options,
    )
    hidden_RD = out.last_hidden_state[0]
    return hidden_RD if shard is None else shard.gather_shared(hidden_RD)


def predictor_hidden(talker: Any, hidden_FD: Tensor, frame_embeds_FKD: Tensor) -> Tensor:
    """(K - 1, F, D): the inputs of the heads of codes 1 to K - 1. `hidden_FD`: of the rows that predict the frames."""
    embeds_FKD = torch.cat(
        [hidden_FD[:, None].to(frame_embeds_FKD.dtype), frame_embeds_FKD[:, :-1]], dim=1
    )
    out = talker.code_predictor.model(
        inputs_embeds=embeds_FKD, attention_mask=_CAUSAL, use_cache=False
    )
    return out.last_hidden_state[:, 1:].transpose(0, 1)


def predictor_labels(rows: SpeechRows, codes_FK: Tensor) -> Tensor:
    """(K - 1, F): the codes after the first, IGNORE in frames whose first code has no label."""
    has_label_F = rows.values[rows.frames - 1, LABEL] != IGNORE
    return torch.where(has_label_F[:, None], codes_FK[:, 1:], IGNORE).T
