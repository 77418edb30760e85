"""Softmax statistics of one chunk of logits: what the loss needs of a (C, V) block before it is freed.

Legend: T tokens, C tokens of a chunk, D hidden size, V vocabulary rows on this rank, R ranks, N statistics.

With a sharded vocabulary each rank computes statistics relative to its own maximum (`shard_stats`), and one all-gather
of N numbers per token combines them (`merge_shard_stats`). Gradients are in `mvp_engine.ops.logit_stats`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mvp_engine.ops.precision import is_half_on_gpu

IGNORE = -100  # the label of tokens without a loss
# The logit of excluded tokens: of probability 0, but finite, so that 0 times it and its square are finite too.
EXCLUDED = -1e15


class HeadSpec(NamedTuple):
    """How a head turns hidden states into logits: `(hidden @ weight.T + bias) * scale`, capped, over temperature."""

    scale: float
    softcap: float | None
    temperature: float
    dtype: torch.dtype  # of the matmuls
    excluded: tuple[int, ...] = ()  # rows of the weight that are not part of the softmax

    @property
    def factor(self) -> float:
        """What the output of the matmul is multiplied by where no soft cap comes in between."""
        return self.scale / self.temperature


class VocabShard(NamedTuple):
    """This rank's rows of a vocabulary that the ranks of a group share."""

    group: dist.ProcessGroup
    start: int  # the first row


class Stats(NamedTuple):
    """Statistics of the softmax over the whole vocabulary, float32, one number per token."""

    log_probs: Tensor  # of the labels; 0 where the label is IGNORE
    log_z: Tensor  # the logarithm of the softmax's denominator
    entropy: Tensor
    mean_logits: Tensor  # over the vocabulary; a placeholder without `mean`

    @classmethod
    def cat(cls, chunks: list[Stats]) -> Stats:
        """The statistics of all tokens from those of their chunks."""
        return cls(*(torch.cat(columns) for columns in zip(*chunks, strict=True)))


def fused_kernels(raw_CV: Tensor, spec: HeadSpec) -> Any:
    """The module of Triton kernels where it supports these logits: it saves most of the time outside of matmuls."""
    if not is_half_on_gpu(raw_CV) or spec.softcap is not None:
        return None
    from mvp_engine.ops import logit_kernels

    return logit_kernels


def head_output(
    hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, spec: HeadSpec
) -> Tensor:
    """The output of the head's matmul, before scale, cap and temperature. The weight is already in `spec.dtype`."""
    bias_V = None if bias_V is None else bias_V.to(spec.dtype)
    raw_CV = F.linear(hidden_CD.to(spec.dtype), weight_VD, bias_V)
    return _exclude_(raw_CV, spec) if spec.excluded and spec.softcap is None else raw_CV


def logits_of(raw_CV: Tensor, spec: HeadSpec) -> Tensor:
    """The float32 logits of a head's output."""
    logits_CV = raw_CV.float()
    if spec.scale != 1.0:
        logits_CV = logits_CV * spec.scale
    if spec.softcap is not None:
        logits_CV = spec.softcap * torch.tanh(logits_CV / spec.softcap)
    if spec.temperature != 1.0:
        logits_CV = logits_CV / spec.temperature
    return _exclude_(logits_CV, spec) if spec.excluded and spec.softcap is not None else logits_CV


def _exclude_(logits_CV: Tensor, spec: HeadSpec) -> Tensor:
    for row in spec.excluded:  # a tensor of indices would be copied from the host
        logits_CV[:, row] = max(EXCLUDED, torch.finfo(logits_CV.dtype).min)
    return logits_CV


def chunk_stats(raw_CV: Tensor, labels_C: Tensor, spec: HeadSpec, mean: bool) -> Stats:
    """The statistics of a chunk from the head's output over the whole vocabulary."""
    kernels = fused_kernels(raw_CV, spec)
    if kernels is not None:
        return Stats(*kernels.row_stats(raw_CV, labels_C, spec.factor))
    return torch_stats(logits_of(raw_CV, spec), labels_C, mean)


def torch_stats(logits_CV: Tensor, labels_C: Tensor, mean: bool) -> Stats:
    """`chunk_stats` in plain PyTorch, which the fused kernel is tested against."""
    log_z_C = logits_CV.logsumexp(-1)
    label_logit_C = logits_CV.gather(-1, labels_C.clamp(min=0)[:, None])[:, 0]
    log_probs_C = torch.where(labels_C == IGNORE, 0.0, label_logit_C - log_z_C)
    probs_CV = (logits_CV - log_z_C[:, None]).exp_()
    entropy_C = log_z_C - torch.linalg.vecdot(probs_CV, logits_CV)
    mean_C = logits_CV.mean(-1) if mean else log_z_C
    return Stats(log_probs_C, log_z_C, entropy_C, mean_C)


def shard_stats(logits_CV: Tensor, labels_C: Tensor, vocab_start: int, mean: bool) -> Tensor:
    """The statistics of this rank's vocabulary rows that the other ranks need, (N, C); uses up the logits.

    Maximum, sum of exponentials and weighted sum, the latter two relative to the maximum; the label's logit; with
    `mean` also the sum of logits and the number of rows. The label's logit is -inf where another rank owns the label,
    so a label that no rank owns gives a non-finite loss.
    """
    max_C = logits_CV.amax(-1)
    index_C, is_local_C = local_labels(labels_C, vocab_start, logits_CV.shape[1])
    label_logit_C = logits_CV.gather(-1, index_C[:, None])[:, 0]
    label_logit_C = label_logit_C.masked_fill(~is_local_C, float("-inf"))
    for_mean = []
    if mean:
        for_mean = [logits_CV.sum(-1), torch.full_like(max_C, logits_CV.shape[1])]
    logits_CV -= max_C[:, None]
    exp_CV = logits_CV.exp()
    weighted_C = torch.linalg.vecdot(exp_CV, logits_CV)
    return torch.stack([max_C, exp_CV.sum(-1), weighted_C, label_logit_C, *for_mean])


def merge_shard_stats(
    stats_NT: Tensor, labels_T: Tensor, group: dist.ProcessGroup, mean: bool
) -> tuple[Stats, Tensor | None]:
    """The statistics over the whole vocabulary from `shard_stats` of all ranks; with `mean` also its size, (T,)."""
    ranks = dist.get_world_size(group)
    stats, tokens = stats_NT.shape
    stats_RNT = stats_NT.new_empty(ranks * stats, tokens)
    dist.all_gather_into_tensor(stats_RNT, stats_NT, group=group)
    by_kind = stats_RNT.view(ranks, stats, tokens).unbind(1)
    max_RT = by_kind[0]
    sum_RT = by_kind[1]
    weighted_RT = by_kind[2]
    label_logit_RT = by_kind[3]
    max_T = max_RT.amax(0)
    below_RT = max_RT - max_T  # how far each rank's maximum is below that of all
    share_RT = below_RT.exp()
    sum_T = (share_RT * sum_RT).sum(0)
    weighted_T = (share_RT * (weighted_RT + below_RT * sum_RT)).sum(0)
    log_sum_T = sum_T.log()
    label_log_prob_T = label_logit_RT.amax(0) - max_T - log_sum_T
    log_probs_T = torch.where(labels_T == IGNORE, 0.0, label_log_prob_T)
    entropy_T = log_sum_T - weighted_T / sum_T
    mean_T = log_sum_T
    vocab_size_T = None
    if mean:
        vocab_size_T = by_kind[5].sum(0)
        mean_T = by_kind[4].sum(0) / vocab_size_T
    return Stats(log_probs_T, max_T + log_sum_T, entropy_T, mean_T), vocab_size_T


def local_labels(labels_C: Tensor, vocab_start: int, rows: int) -> tuple[Tensor, Tensor]:
    """The labels as indices of this rank's vocabulary rows (any row for other ranks' labels), and which are local."""
    index_C = labels_C - vocab_start
    return index_C.clamp(0, rows - 1), (index_C >= 0) & (index_C < rows)


# Gradients of the statistics: from those of the scores to those of the logits, hidden states, weight and bias, chunk by
# chunk. Only the (T, D) and (V, D) sums stay in memory.


class UpstreamGrads(NamedTuple):
    """The gradients of a chunk's scores, regrouped by the terms of the logits' gradient.

    With p the softmax: `d log p(label) = onehot - p`, `d entropy = -p (log p + entropy)`, `d log z = p`,
    `d mean log p = 1 / V - p`.
    """

    label: Tensor  # of the onehot; 0 where the label is IGNORE
    p: Tensor  # of -p
    entropy: Tensor | None = None
    uniform: Tensor | None = None  # the same for all logits of a token

    def chunk(self, rows: slice) -> UpstreamGrads:
        return UpstreamGrads(*(None if one is None else one[rows] for one in self))  # type: ignore[arg-type]


class LocalLabels(NamedTuple):
    """The labels of a chunk in a sharded vocabulary, from `local_labels`."""

    row: Tensor  # among this rank's rows
    is_local: Tensor  # whether this rank owns the label


def logit_gradient_(
    raw_CV: Tensor,
    labels_C: Tensor,
    log_z_C: Tensor,
    entropy_C: Tensor,
    upstream: UpstreamGrads,
    spec: HeadSpec,
    local: LocalLabels | None = None,
) -> Tensor:
    """The gradient with respect to the head's output `raw_CV`, which it may overwrite."""
    kernels = fused_kernels(raw_CV, spec) if local is None else None
    if kernels is not None:
        return kernels.to_gradient_(raw_CV, labels_C, log_z_C, entropy_C, *upstream, spec.factor)
    logits_CV = logits_of(raw_CV, spec)
    log_p_CV = logits_CV - log_z_C[:, None]
    p_CV = log_p_CV.exp()
    inner_CV = upstream.p[:, None]
    if upstream.entropy is not None:
        d_entropy_C1 = upstream.entropy[:, None]
        inner_CV = log_p_CV.add_(entropy_C[:, None]).mul_(d_entropy_C1).add_(inner_CV)
    d_logits_CV = p_CV.mul_(inner_CV).neg_()
    if upstream.uniform is not None:
        d_logits_CV += upstream.uniform[:, None]
    if local is None:
        index_C = labels_C.clamp(min=0)
        d_label_C = upstream.label
    else:
        index_C = local.row
        d_label_C = torch.where(local.is_local, upstream.label, 0.0)
    d_logits_CV.scatter_add_(-1, index_C[:, None], d_label_C[:, None])
    if spec.softcap is not None:
        d_logits_CV *= 1 - (logits_CV * (spec.temperature / spec.softcap)).square_()
    return (d_logits_CV * spec.factor).to(spec.dtype)


class HeadGradients:
    """Gradients of hidden states, weight and bias, summed up over the chunks of tokens."""

    def __init__(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        needs_grad: Sequence[bool],
        spec: HeadSpec,
    ) -> None:
        """`needs_grad`: of hidden states, weight, bias; what follows is not read."""
        self.weight = weight_VD.to(spec.dtype)
        self.spec = spec
        self.dtypes = [None if x is None else x.dtype for x in (hidden_TD, weight_VD, bias_V)]
        self.d_hidden_TD: Tensor | None = None
        self.d_weight_VD: Tensor | None = None
        self.d_bias_V: Tensor | None = None
        if needs_grad[0]:
            self.d_hidden_TD = torch.empty_like(hidden_TD, memory_format=torch.contiguous_format)
        if needs_grad[1]:
            self.d_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        if bias_V is not None and needs_grad[2]:
            self.d_bias_V = torch.zeros_like(bias_V, dtype=torch.float32)

    def add(self, rows: slice, hidden_CD: Tensor, d_raw_CV: Tensor) -> None:
        """Add a chunk, the tokens `rows`, from the gradient of the head's output."""
        if self.d_hidden_TD is not None:
            self.d_hidden_TD[rows] = d_raw_CV @ self.weight
        if self.d_weight_VD is not None:
            hidden_CD = hidden_CD.to(self.spec.dtype)
            if d_raw_CV.is_cuda and d_raw_CV.dtype != torch.float32:
                # Accumulated in float32 inside the GEMM: no (V, D) temporary.
                total_VD = self.d_weight_VD
                torch.addmm(total_VD, d_raw_CV.T, hidden_CD, out_dtype=torch.float32, out=total_VD)
            else:
                self.d_weight_VD += d_raw_CV.T @ hidden_CD
        if self.d_bias_V is not None:
            self.d_bias_V += d_raw_CV.sum(0, dtype=torch.float32)

    def in_input_dtypes(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """The gradients of hidden states, weight and bias in the dtypes of these, multiplied by `factor` in place."""
        gradients = [self.d_hidden_TD, self.d_weight_VD, self.d_bias_V]
        for i, dtype in enumerate(self.dtypes):
            gradient = gradients[i]
            if gradient is not None:
                gradients[i] = (gradient if factor is None else gradient.mul_(factor)).to(dtype)
        return gradients
