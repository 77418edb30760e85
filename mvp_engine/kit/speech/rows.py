"""The speech of a packed batch, `PackedBatch.media["speech"]`: its layout, and outputs of a talker on its rows.

An item is one sequence of the talker; its rows are the talker's positions. For Qwen3-Omni that is one spoken assistant
turn: the user turns before it, a header, and one position per frame of codes. For CSM it is all turns of a row: the
text of each, and its frames. The row before a frame predicts it. `protocol.py` plans them in loader workers.

Legend: R talker positions of all spoken turns, N spoken turns, F frames, P positions with a label (frames and ends of
speech), K codebooks, M positions that read a hidden state.

All sizes are known on the host, so nothing here is a host sync.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mvp_engine.data.batch import IGNORE, Media, PackedBatch
from mvp_engine.distributed.sequence_parallel import UlyssesShard, even_sizes, to_device
from mvp_engine.hf.model import attention
from mvp_engine.ops.batched_heads import batched_log_probs
from mvp_engine.ops.linear_cross_entropy import linear_log_probs

SPEECH = "speech"  # the key in `PackedBatch.media`
# Keys in its `fields`, one number per item; on the host, as grids are.
FRAME_COUNTS = "frame_counts"
TURN_COUNTS = "turn_counts"  # spoken turns
SOURCE_COUNTS = "source_counts"  # rows that read a hidden state

# Columns of `values`, which are int64.
LABEL = 0  # the first code of the next frame, or the end of speech; IGNORE elsewhere
TEXT = 1  # the token of the text channel, in the vocabulary of the language model
SOURCE = 2  # the token of its sequence whose hidden state is read (media); -1: the text's embedding
# Temporal, height, width, in POSITION_UNITS: those of videos may be fractions.
POSITIONS = slice(3, 6)
CODES = slice(6, None)  # ids whose embeddings are added, one per codebook; -1: none
FIRST_CODE = 6
POSITION_UNITS = 2**20


def num_positions(batch: PackedBatch) -> int:
    """What a pack holds of its budget: tokens, and the talker's positions."""
    speech = batch.media.get(SPEECH)
    return batch.num_tokens + (0 if speech is None else len(speech.values))


def num_speech_labels(batch: PackedBatch) -> Tensor:
    """The frames and ends of speech that carry loss, as a scalar on the batch's device."""
    return (_values(batch)[:, LABEL] != IGNORE).sum()


def num_speech_frames(batch: PackedBatch) -> Tensor:
    """The frames that carry loss, without ends of speech, as a scalar on the batch's device."""
    values = _values(batch)
    return ((values[:-1, LABEL] != IGNORE) & (values[1:, -1] >= 0)).sum()


def _values(batch: PackedBatch) -> Tensor:
    """The talker's positions; none without speech."""
    return batch.media[SPEECH].values if SPEECH in batch.media else batch.labels.new_empty(0, 1)


@dataclass(frozen=True, eq=False)
class SpeechRows:
    """The speech of a batch: `values` in the layout above, and where its frames and labels are."""

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


# Outputs of speech from the passes of a talker: log-probs, entropies and loss of all codebooks.
#
# Legend: R talker positions, F frames, P positions with a label, K codebooks, D hidden size.
#
# `omni_model.py` and `csm.py` have the passes. Here are the heads, and how sequence-parallel ranks share them: each
# rank has a part of the labels of the first codebook, and runs the code predictor on a part of the frames.

SPEECH_OUTPUTS = ("speech_loss", "speech_log_probs", "speech_entropy")
Outputs = dict[str, Tensor]


class SpeechSizes(NamedTuple):
    """Sizes of a code predictor."""

    books: int
    codes: int  # of a codebook
    width: int  # of the embeddings of codes


class TalkerPasses(Protocol):
    """What a family of talkers computes."""

    books: int

    @property
    def first_head(self) -> Tensor: ...

    def rest_heads(self) -> Tensor: ...

    def embeddings(self, codes_FK: Tensor) -> Tensor: ...

    def inputs(self, rows: SpeechRows, embeds_FKD: Tensor, hidden_TD: Tensor | None) -> Tensor: ...

    def hidden(self, rows: SpeechRows, inputs_RD: Tensor, shard: UlyssesShard | None) -> Tensor: ...

    def rest_hidden(self, hidden_FD: Tensor, embeds_FKD: Tensor) -> Tensor: ...


def speech_outputs(
    talker: TalkerPasses,
    rows: SpeechRows | None,
    wanted: tuple[str, ...],
    *,
    shard: UlyssesShard | None = None,
    hidden_TD: Tensor | None = None,
    chunk: int = 2048,
) -> Outputs:
    """The wanted ones of `SPEECH_OUTPUTS`. `shard`: of the talker's positions; `hidden_TD`: what media rows read."""
    if rows is None:
        return _no_speech(talker, wanted)
    embeds_FKD = talker.embeddings(rows.codes)
    inputs_RD = talker.inputs(rows, embeds_FKD, hidden_TD)
    hidden_RD = talker.hidden(rows, inputs_RD, shard)
    share = None if shard is None else RowShare.of(shard, rows)
    labelled_P = rows.labelled if share is None else share.labelled.cut(rows.labelled)
    labels_P = rows.values[labelled_P, LABEL]
    first = linear_log_probs(hidden_RD[labelled_P], talker.first_head, labels_P, chunk=chunk)
    before_F = rows.frames - 1
    labels_KF = rows.rest_labels()
    if share is not None:
        frames_F = share.cut_frames(torch.arange(len(rows.frames), device=inputs_RD.device))
        before_F, embeds_FKD, labels_KF = (
            before_F[frames_F],
            embeds_FKD[frames_F],
            labels_KF[:, frames_F],
        )
    heads_KFD = talker.rest_hidden(hidden_RD[before_F], embeds_FKD)
    rest_KF, entropy_KF = batched_log_probs(heads_KFD, talker.rest_heads(), labels_KF)
    scores = SpeechScores(first.log_probs, first.entropy, rest_KF, entropy_KF)
    loss = None
    if share is not None:
        scores = share.own(scores)
        loss = share.labelled.total(scores.loss())
        scores = share.gather(scores)
    return _outputs(rows, scores, loss, wanted)


def _outputs(
    rows: SpeechRows, scores: SpeechScores, loss: Tensor | None, wanted: tuple[str, ...]
) -> Outputs:
    computed: Outputs = {}
    if "speech_loss" in wanted:
        computed["speech_loss"] = scores.loss() if loss is None else loss
    has_label_P = rows.values[rows.labelled, LABEL] != IGNORE
    at_P = rows.places_of_frames
    kept = rows.num_real_labelled
    if "speech_log_probs" in wanted:
        computed["speech_log_probs"] = _table(scores.first, scores.rest, at_P)[:kept]
    if "speech_entropy" in wanted:
        entropy_P = torch.where(has_label_P, scores.first_entropy, 0.0)
        of_frames = torch.where(has_label_P[at_P], scores.rest_entropy, 0.0)
        computed["speech_entropy"] = _table(entropy_P, of_frames, at_P)[:kept]
    return computed


def _no_speech(talker: TalkerPasses, wanted: tuple[str, ...]) -> Outputs:
    """Zeros that can run backward: a micro-batch without speech still needs one."""
    nothing: Any = talker.first_head.flatten()[:0].float().sum()
    if torch.is_grad_enabled() and not nothing.requires_grad:  # heads take no adapters
        nothing.requires_grad_()
    empty = nothing.expand(0, talker.books)
    return {name: nothing.expand(2) if name == "speech_loss" else empty for name in wanted}


def _table(first_P: Tensor, rest_KF: Tensor, at_P: Tensor) -> Tensor:
    """(P, K): the first codebook of all labelled rows, the others in the rows that predict a frame."""
    rest_PK = first_P.new_zeros(len(first_P), len(rest_KF)).index_copy(0, at_P, rest_KF.T)
    return torch.cat([first_P[:, None], rest_PK], dim=1)


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
