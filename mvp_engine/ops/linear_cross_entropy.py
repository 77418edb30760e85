"""Scores of tokens straight from hidden states: the logits of a whole batch never exist at once.

Legend: T tokens, C tokens of a chunk, D width, V vocabulary (of this rank, where ranks share it), R ranks.

The head's matmul and the softmax run in chunks of tokens; backward computes each chunk's logits again. What is alive at
a time is one (C, V) block of logits instead of (T, V), and the gradient of the weight is summed in float32.

Ranks may share the vocabulary, each with a slice of the head's rows. A few numbers per token say all that the others
need to know of a slice, so forward has one collective, whatever the number of chunks; backward sums each chunk's
gradient of the hidden states while the next chunk is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

IGNORE = -100


class Scores(NamedTuple):
    """Float32, (T,) each; all carry gradients."""

    log_probs: Tensor  # of the labels; 0 where there is none
    entropy: Tensor
    log_z: Tensor  # the logarithm of the softmax's denominator
    mean_log_probs: Tensor | None  # over the whole vocabulary, if asked for: what label smoothing looks at


def linear_log_probs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    bias_V: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk: int = 2048,
    mean: bool = False,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
) -> Scores:
    """What a head makes of hidden states.

    The logits are `(hidden @ weight.T + bias) * scale`, then soft-capped, then divided by the temperature. Under
    autocast the matmuls run in its dtype, in backward too.

    With a `group`, `weight` and `bias` are this rank's rows of the vocabulary, at least one, beginning with row
    `vocab_start` of the whole; hidden states and labels (of the whole vocabulary) are the same on all ranks. So are the
    results, to the bit. All ranks must give the same loss, which counts once: the gradients of weight and bias are
    those of this rank's rows, that of the hidden states is complete on every rank.
    """
    if (group is None) != (vocab_start is None):
        raise ValueError(
            "group and vocab_start go together: which ranks share the vocabulary, and this one's first row"
        )
    device = hidden_TD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_TD.dtype
    how = (scale, softcap, temperature, dtype)
    with torch.autocast(device, enabled=False):
        given = _LinearLogProbs.apply(hidden_TD, weight_VD, bias_V, labels_T, how, chunk, mean, group, vocab_start or 0)
    return Scores(*given)


@torch.no_grad()
def linear_argmax(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None = None,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk: int = 2048,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
) -> Tensor:
    """The most likely token after each position, (T,) int64; the lower of two that are equal. Arguments as above."""
    device = hidden_TD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_TD.dtype
    how = (scale, softcap, 1.0, dtype)
    with torch.autocast(device, enabled=False):
        best = [_logits(hidden_CD, weight_VD, bias_V, how).max(-1) for hidden_CD in hidden_TD.split(chunk)]
    value_T, index_T = torch.cat([one.values for one in best]), torch.cat([one.indices for one in best])
    if group is None:
        return index_T
    ranks = dist.get_world_size(group)
    values_RT, indices_RT = (like.new_empty(ranks, len(like)) for like in (value_T, index_T))
    dist.all_gather_into_tensor(values_RT.view(-1), value_T, group=group)
    dist.all_gather_into_tensor(indices_RT.view(-1), index_T + (vocab_start or 0), group=group)
    return indices_RT.gather(0, values_RT.argmax(0)[None])[0]


def _logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, how: tuple[Any, ...]) -> Tensor:
    scale, softcap, temperature, dtype = how
    bias_V = None if bias_V is None else bias_V.to(dtype)
    logits_CV = torch.nn.functional.linear(hidden_CD.to(dtype), weight_VD.to(dtype), bias_V).float()
    if scale != 1.0:
        logits_CV *= scale
    if softcap is not None:
        logits_CV = softcap * torch.tanh(logits_CV / softcap)
    if temperature != 1.0:
        logits_CV /= temperature
    return logits_CV


def _whole(logits_CV: Tensor, labels_C: Tensor, mean: bool) -> tuple[Tensor, ...]:
    """Log-probs, norms, entropies and mean logits of a chunk, from the logits of the whole vocabulary."""
    norm_C = logits_CV.logsumexp(-1)
    picked_C = logits_CV.gather(-1, labels_C.clamp(min=0)[:, None])[:, 0]
    log_probs_C = torch.where(labels_C == IGNORE, 0.0, picked_C - norm_C)
    probs_CV = (logits_CV - norm_C[:, None]).exp_()
    entropy_C = norm_C - torch.linalg.vecdot(probs_CV, logits_CV)
    return log_probs_C, norm_C, entropy_C, logits_CV.mean(-1) if mean else norm_C


def _slice(logits_CV: Tensor, labels_C: Tensor, vocab_start: int, mean: bool) -> tuple[Tensor, ...]:
    """What the other ranks must know of this one's logits; the sums are relative to its own maximum.

    The label's logit is -inf where another rank has it, so a label that no rank has gives a loss that is not finite.
    """
    max_C = logits_CV.amax(-1)
    index_C, mine_C = _rows(labels_C, vocab_start, logits_CV.shape[1])
    picked_C = logits_CV.gather(-1, index_C[:, None])[:, 0].masked_fill(~mine_C, float("-inf"))
    total_C = (logits_CV.sum(-1), torch.full_like(max_C, logits_CV.shape[1])) if mean else ()
    logits_CV -= max_C[:, None]
    exp_CV = logits_CV.exp()
    return max_C, exp_CV.sum(-1), torch.linalg.vecdot(exp_CV, logits_CV), picked_C, *total_C


def _join(slices_NT: Tensor, labels_T: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """The results of `_whole`, from those of `_slice` on every rank; and the size of the vocabulary, for the mean."""
    ranks, (numbers, tokens) = dist.get_world_size(group), slices_NT.shape
    slices_RNT = slices_NT.new_empty(ranks * numbers, tokens)
    dist.all_gather_into_tensor(slices_RNT, slices_NT, group=group)
    max_RT, sum_RT, dot_RT, picked_RT, *total_RT = slices_RNT.view(ranks, numbers, tokens).unbind(1)
    max_T = max_RT.amax(0)
    below_RT = max_RT - max_T
    share_RT = below_RT.exp()
    sum_T = (share_RT * sum_RT).sum(0)
    dot_T = (share_RT * (dot_RT + below_RT * sum_RT)).sum(0)
    log_sum_T = sum_T.log()
    log_probs_T = torch.where(labels_T == IGNORE, 0.0, picked_RT.amax(0) - max_T - log_sum_T)
    mean_T, rows_T = (total_RT[0].sum(0) / total_RT[1].sum(0), total_RT[1].sum(0)) if total_RT else (log_sum_T,) * 2
    return log_probs_T, max_T + log_sum_T, log_sum_T - dot_T / sum_T, mean_T, rows_T


def _rows(labels_C: Tensor, vocab_start: int, size: int) -> tuple[Tensor, Tensor]:
    """Where the labels are among this rank's rows (any row for those that are not), and whether they are."""
    index_C = labels_C - vocab_start
    return index_C.clamp(0, size - 1), (index_C >= 0) & (index_C < size)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        how: tuple[Any, ...],
        chunk: int,
        mean: bool,
        group: dist.ProcessGroup | None,
        vocab_start: int,
    ) -> tuple[Tensor | None, ...]:
        ctx.how, ctx.chunk, ctx.group, ctx.vocab_start = how, chunk, group, vocab_start
        chunks = []
        for hidden_CD, labels_C in zip(hidden_TD.split(chunk), labels_T.split(chunk), strict=True):
            logits_CV = _logits(hidden_CD, weight_VD, bias_V, ctx.how)
            chunks.append(
                _whole(logits_CV, labels_C, mean) if group is None else _slice(logits_CV, labels_C, vocab_start, mean)
            )
        columns = [torch.cat(column) for column in zip(*chunks, strict=True)]
        rows_T = torch.full_like(columns[0], len(weight_VD))  # of the vocabulary
        if group is not None:
            *columns, rows_T = _join(torch.stack(columns), labels_T, group)
        log_probs_T, norm_T, entropy_T, mean_T = columns
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, labels_T, norm_T, entropy_T, rows_T)
        return log_probs_T, entropy_T, norm_T, mean_T - norm_T if mean else None

    @staticmethod
    def backward(
        ctx: Any, d_log_probs_T: Tensor, d_entropy_T: Tensor, d_log_z_T: Tensor, d_mean_T: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, labels_T, norm_T, entropy_T, rows_T = ctx.saved_tensors
        scale, softcap, temperature, dtype = ctx.how
        weight_low = weight_VD.to(dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden_TD = torch.empty_like(hidden_TD, memory_format=torch.contiguous_format) if needs_hidden else None
        d_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        d_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        pending = []
        for start in range(0, len(hidden_TD), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            hidden_CD, labels_C = hidden_TD[rows], labels_T[rows]
            logits_CV = _logits(hidden_CD, weight_VD, bias_V, ctx.how)
            log_p_CV = logits_CV - norm_T[rows, None]
            p_CV = log_p_CV.exp()
            # d log p(label) = onehot - p;  d entropy = -p (log p + entropy);  d log z = p;  d mean log p = 1 / V - p
            d_label_C = torch.where(labels_C == IGNORE, 0.0, d_log_probs_T[rows].float())
            d_entropy_C = d_entropy_T[rows].float()
            d_p_C = d_label_C - d_log_z_T[rows]
            if d_mean_T is not None:
                d_p_C = d_p_C + d_mean_T[rows]
            inner_CV = log_p_CV.add_(entropy_T[rows, None]).mul_(d_entropy_C[:, None]).add_(d_p_C[:, None])
            d_logits_CV = p_CV.mul_(inner_CV).neg_()
            if d_mean_T is not None:
                d_logits_CV += (d_mean_T[rows] / rows_T[rows])[:, None]
            if ctx.group is None:
                index_C = labels_C.clamp(min=0)
            else:
                index_C, mine_C = _rows(labels_C, ctx.vocab_start, len(weight_VD))
                d_label_C = torch.where(mine_C, d_label_C, 0.0)
            d_logits_CV.scatter_add_(-1, index_C[:, None], d_label_C[:, None])
            if softcap is not None:
                capped_CV = logits_CV.mul_(temperature / softcap)
                d_logits_CV *= 1 - capped_CV.square_()
            d_logits_CV = (d_logits_CV * (scale / temperature)).to(dtype)
            if d_hidden_TD is not None:
                d_hidden_TD[rows] = d_logits_CV @ weight_low
                if ctx.group is not None:
                    pending.append(dist.all_reduce(d_hidden_TD[rows], group=ctx.group, async_op=True))
            if d_weight_VD is not None:
                d_weight_VD += d_logits_CV.T @ hidden_CD.to(dtype)
            if d_bias_V is not None:
                d_bias_V += d_logits_CV.sum(0, dtype=torch.float32)
        for work in pending:
            work.wait()
        d_weight = None if d_weight_VD is None else d_weight_VD.to(weight_VD.dtype)
        d_bias = None if d_bias_V is None else d_bias_V.to(bias_V.dtype)
        return d_hidden_TD, d_weight, d_bias, None, None, None, None, None, None
