"""Outputs of speech from the passes of a talker: log-probs, entropies and loss of all codebooks.

Legend: R talker positions, F frames, P positions with a label, K codebooks, D hidden size.

`talker.py` and `csm.py` have the passes. Here are the heads, and how sequence-parallel ranks share them: each rank has
a part of the labels of the first codebook, and runs the code predictor on a part of the frames.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE
from mvp_engine.data.speech import LABEL
from mvp_engine.distributed.ulysses import UlyssesShard
from mvp_engine.hf.speech_rows import RowShare, SpeechRows, SpeechScores
from mvp_engine.ops.batched_heads import batched_log_probs
from mvp_engine.ops.linear_cross_entropy import linear_log_probs

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
