"""The speech of a packed batch as a talker's rows: where frames and labels are, and how ranks share them.

Legend: R talker positions of all spoken turns, N spoken turns, F frames, P positions with a label (frames and ends of
speech), K codebooks, M positions that read a hidden state.

All sizes are known on the host, so nothing here is a host sync.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mvp_engine.data.batch import IGNORE, Media, PackedBatch
from mvp_engine.data.speech import (
    CODES,
    FRAME_COUNTS,
    LABEL,
    POSITION_UNITS,
    POSITIONS,
    SOURCE,
    SOURCE_COUNTS,
    SPEECH,
    TURN_COUNTS,
)
from mvp_engine.distributed.key_exchange import to_device
from mvp_engine.distributed.ulysses import UlyssesShard, even_sizes


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
        num_turns = int(speech.fields[TURN_COUNTS].sum())
        predicts_R = F.pad(is_frame_R[1:], (0, 1))  # the first row of an item is no frame
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
            labelled=torch.nonzero_static(is_frame_R | predicts_R, size=num_frames + num_turns)[
                :, 0
            ],
            sources=sources,
            source_tokens=tokens,
            num_real_labelled=_num_real(batch, speech),
        )

    @property
    def positions(self) -> Tensor:
        """(3, R): temporal, height, width"""
        return self.values[:, POSITIONS].T / POSITION_UNITS

    @property
    def codes(self) -> Tensor:
        """(F, K)"""
        return self.values[self.frames][:, CODES]

    def rest_labels(self) -> Tensor:
        """(K - 1, F): the codes after the first, IGNORE in frames whose first code has no label."""
        has_label_F = self.values[self.frames - 1, LABEL] != IGNORE
        return torch.where(has_label_F[:, None], self.codes[:, 1:], IGNORE).T

    @property
    def places_of_frames(self) -> Tensor:
        """(F,): for each frame, the place in `labelled` of the row that predicts it."""
        return torch.searchsorted(self.labelled, self.frames) - 1


def _num_real(batch: PackedBatch, speech: Media) -> int:
    real = getattr(batch, "num_real_sequences", batch.num_sequences)
    items = int((speech.sequence_ids < real).sum())
    return sum(int(speech.fields[name][:items].sum()) for name in (FRAME_COUNTS, TURN_COUNTS))


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
