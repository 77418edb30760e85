"""Log-probs, entropies or loss of tokens straight from hidden states, without the logits of the whole batch.

Legend: T tokens, C tokens of a chunk, D hidden size, V vocabulary rows on this rank, R ranks.

The head's matmul and the softmax run in chunks of tokens; backward computes each chunk's logits again. One (C, V) block
of logits is in memory at a time instead of (T, V), and the gradient of the weight is summed in float32. `linear_loss`
computes its gradient up to a factor while it still has the logits, so it computes no logits twice.

With a sharded vocabulary (tensor parallel) each rank has some rows of the head. Forward makes one all-gather of a few
numbers per token, whatever the number of chunks. Backward all-reduces each chunk's gradient of the hidden states while
the next chunk is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mvp_engine.errors import UserError
from mvp_engine.ops.logit_stats import (
    IGNORE,
    HeadGradients,
    HeadSpec,
    LocalLabels,
    Stats,
    UpstreamGrads,
    VocabShard,
    chunk_stats,
    head_output,
    local_labels,
    logit_gradient_,
    logits_of,
    merge_shard_stats,
    shard_stats,
)
from mvp_engine.ops.precision import autocast_dtype

__all__ = [
    "IGNORE",
    "Scores",
    "linear_argmax",
    "linear_log_probs",
    "linear_logits",
    "linear_loss",
    "map_logits",
]


class Scores(NamedTuple):
    """Scores of each token under a head's softmax: float32, (T,) each, all with gradients."""

    log_probs: Tensor  # of the labels; 0 where the label is IGNORE
    entropy: Tensor
    log_z: Tensor  # the logarithm of the softmax's denominator
    mean_log_probs: Tensor | None  # over the vocabulary, with `mean`: the term of label smoothing


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
    excluded: tuple[int, ...] = (),
) -> Scores:
    """The scores of the labels, in chunks of `chunk` tokens.

    The logits are `(hidden @ weight.T + bias) * scale`, then soft-capped, then divided by the temperature. Under
    autocast the matmuls run in its dtype, in backward too. `excluded`: rows of `weight` that have probability 0.

    With a `group`, `weight` and `bias` are this rank's rows of the vocabulary, at least one, beginning with row
    `vocab_start` of the whole; hidden states and labels (of the whole vocabulary) are the same on all ranks. So are the
    results, bit by bit. All ranks must compute the same loss, which counts once: the gradients of weight and bias are
    those of this rank's rows, that of the hidden states is complete on every rank.
    """
    shard = _vocab_shard(group, vocab_start)
    spec = _head_spec(hidden_TD, scale, softcap, temperature, excluded)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        scores = _LinearLogProbs.apply(
            hidden_TD, weight_VD, bias_V, labels_T, spec, chunk, mean, shard
        )
    return Scores(*scores)


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
    excluded: tuple[int, ...] = (),
) -> Tensor:
    """The most likely next token of each position, (T,) int64; the lower of two equal ones. Arguments as above."""
    spec = _head_spec(hidden_TD, scale, softcap, 1.0, excluded)
    weight_VD = weight_VD.to(spec.dtype)
    values = []
    indices = []
    with torch.autocast(hidden_TD.device.type, enabled=False):
        for hidden_CD in hidden_TD.split(chunk):
            best = logits_of(head_output(hidden_CD, weight_VD, bias_V, spec), spec).max(-1)
            values.append(best.values)
            indices.append(best.indices)
    value_T = torch.cat(values)
    index_T = torch.cat(indices)
    if group is None:
        return index_T
    ranks = dist.get_world_size(group)
    values_RT = value_T.new_empty(ranks, len(value_T))
    indices_RT = index_T.new_empty(ranks, len(index_T))
    dist.all_gather_into_tensor(values_RT.view(-1), value_T, group=group)
    dist.all_gather_into_tensor(indices_RT.view(-1), index_T + (vocab_start or 0), group=group)
    return indices_RT.gather(0, values_RT.argmax(0)[None])[0]


@torch.no_grad()
def linear_logits(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None = None,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
) -> Tensor:
    """All logits of a few positions, in float32; with a `group`, padded to a multiple of its ranks' rows."""
    spec = _head_spec(hidden_TD, scale, softcap)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        logits_TV = logits_of(head_output(hidden_TD, weight_VD.to(spec.dtype), bias_V, spec), spec)
    if group is None:
        return logits_TV
    ranks = dist.get_world_size(group)
    rows = torch.tensor(len(weight_VD), device=hidden_TD.device)
    dist.all_reduce(rows, dist.ReduceOp.MAX, group)  # the last rank may have fewer
    padded_TV = F.pad(logits_TV, (0, int(rows) - logits_TV.shape[1]), value=float("-inf"))
    logits_RTV = padded_TV.new_empty(ranks, *padded_TV.shape)
    dist.all_gather_into_tensor(logits_RTV.flatten(0, 1), padded_TV.contiguous(), group=group)
    return logits_RTV.transpose(0, 1).flatten(1)


def linear_loss(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    bias_V: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk: int = 2048,
    excluded: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """The cross-entropy summed over all labels that are not IGNORE, and that of each token without gradients.

    The sum is `-linear_log_probs(...)[0].sum()` in two thirds of its time: gradients are computed in forward, which
    saves one matmul in four. The price: the gradient of the weight is in memory until backward, which can run once.
    """
    inputs = (hidden_TD, weight_VD, bias_V)
    needs_grad = any(x is not None and x.requires_grad for x in inputs)
    spec = _head_spec(hidden_TD, scale, softcap, temperature, excluded)
    arguments = (*inputs, labels_T, spec, chunk)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        if torch.is_grad_enabled() and needs_grad:
            return _LinearLoss.apply(*arguments)
        log_probs_T = _LinearLogProbs.apply(*arguments, False, None)[0]
    return -log_probs_T.sum(), -log_probs_T


def map_logits(
    compute: Callable[..., Tensor],
    hidden_TD: Tensor,
    head: Mapping[str, Any],
    *per_token: Tensor,
) -> Tensor:
    """`compute(logits, *per_token)` in chunks of tokens, for an output of your own that needs all logits of a token.

    `hidden_TD` and `head` are what `LanguageModel.add_output` passes. `compute` gets float32 logits (C, V) with
    gradients and the same C rows of each tensor in `per_token`, and returns C rows. Backward computes each chunk's
    logits again, so one (C, V) block is in memory, not (T, V).
    """
    if "group" in head:
        raise UserError(
            "map_logits needs all logits of a token on one rank: set parallel.tensor=1, or shard the weights "
            "with parallel.shard"
        )
    for tensor in per_token:
        if len(tensor) != len(hidden_TD):
            raise UserError(
                f"map_logits has hidden states of {len(hidden_TD)} tokens and a tensor of {len(tensor)}. With "
                "parallel.context or parallel.ulysses a rank has some of the tokens: cut the tensor by "
                "model.shard.cut"
            )
    spec = _head_spec(hidden_TD, head["scale"], head["softcap"])

    def of_chunk(hidden_CD: Tensor, *inputs: Tensor) -> Tensor:
        # The weight is cast here, so that the gradients of the chunks are added in its own dtype.
        weight_VD = head["weight_VD"].to(spec.dtype)
        return compute(
            logits_of(head_output(hidden_CD, weight_VD, head["bias_V"], spec), spec), *inputs
        )

    chunks = zip(*(tensor.split(head["chunk"]) for tensor in (hidden_TD, *per_token)), strict=True)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        values = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.cat(values)


def _head_spec(
    hidden_TD: Tensor,
    scale: float,
    softcap: float | None,
    temperature: float = 1.0,
    excluded: tuple[int, ...] = (),
) -> HeadSpec:
    dtype = autocast_dtype(hidden_TD) or hidden_TD.dtype
    return HeadSpec(scale, softcap, temperature, dtype, excluded)


def _vocab_shard(group: dist.ProcessGroup | None, vocab_start: int | None) -> VocabShard | None:
    if (group is None) != (vocab_start is None):
        raise ValueError(
            "group and vocab_start go together: set both for a sharded vocabulary, or neither"
        )
    return None if group is None or vocab_start is None else VocabShard(group, vocab_start)


class _Saved(NamedTuple):
    """The tensors that `_LinearLogProbs` saves for backward."""

    hidden: Tensor  # (T, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    labels: Tensor  # (T,), as all below
    log_z: Tensor
    entropy: Tensor
    vocab_size: Tensor | None  # with `mean`


class _ScoreGrads(NamedTuple):
    """The gradients of the fields of `Scores`; None for those that the loss does not use."""

    log_probs: Tensor | None
    entropy: Tensor | None
    log_z: Tensor | None
    mean_log_probs: Tensor | None


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        spec: HeadSpec,
        chunk: int,
        mean: bool,
        shard: VocabShard | None,
    ) -> tuple[Tensor | None, ...]:
        weight = weight_VD.to(spec.dtype)
        chunks = zip(hidden_TD.split(chunk), labels_T.split(chunk), strict=True)
        if shard is None:
            by_chunk = [
                chunk_stats(head_output(hidden_CD, weight, bias_V, spec), labels_C, spec, mean)
                for hidden_CD, labels_C in chunks
            ]
            stats = Stats.cat(by_chunk)
            vocab_size_T = torch.full_like(stats.log_z, len(weight_VD)) if mean else None
        else:
            of_shard = []
            for hidden_CD, labels_C in chunks:
                raw_CV = head_output(hidden_CD, weight, bias_V, spec)
                of_shard.append(shard_stats(logits_of(raw_CV, spec), labels_C, shard.start, mean))
            stats_NT = torch.cat(of_shard, dim=1)
            stats, vocab_size_T = merge_shard_stats(stats_NT, labels_T, shard.group, mean)
        saved = _Saved(
            hidden_TD, weight_VD, bias_V, labels_T, stats.log_z, stats.entropy, vocab_size_T
        )
        ctx.save_for_backward(*saved)
        ctx.spec = spec
        ctx.chunk = chunk
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        mean_log_probs_T = stats.mean_logits - stats.log_z if mean else None
        return stats.log_probs, stats.entropy, stats.log_z, mean_log_probs_T

    @staticmethod
    def backward(ctx: Any, *d_scores: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = _Saved(*ctx.saved_tensors)
        shard: VocabShard | None = ctx.shard
        upstream = _upstream(d_scores, saved)
        gradients = HeadGradients(
            saved.hidden, saved.weight, saved.bias, ctx.needs_input_grad, ctx.spec
        )
        all_reduces = []
        for start in range(0, len(saved.hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            hidden_CD = saved.hidden[rows]
            labels_C = saved.labels[rows]
            raw_CV = head_output(hidden_CD, gradients.weight, saved.bias, ctx.spec)
            local = None
            if shard is not None:
                local = LocalLabels(*local_labels(labels_C, shard.start, len(saved.weight)))
            d_raw_CV = logit_gradient_(
                raw_CV,
                labels_C,
                saved.log_z[rows],
                saved.entropy[rows],
                upstream.chunk(rows),
                ctx.spec,
                local,
            )
            gradients.add(rows, hidden_CD, d_raw_CV)
            if shard is not None and gradients.d_hidden_TD is not None:
                d_hidden_CD = gradients.d_hidden_TD[rows]
                # Asynchronous: it overlaps with the matmuls of the next chunk.
                all_reduces.append(dist.all_reduce(d_hidden_CD, group=shard.group, async_op=True))
        for work in all_reduces:
            work.wait()
        return *gradients.in_input_dtypes(), None, None, None, None, None


def _upstream(d_scores: tuple[Tensor | None, ...], saved: _Saved) -> UpstreamGrads:
    # Contiguous: the gradient of a sum is one number with stride 0, which the kernels cannot read.
    d = _ScoreGrads(*(None if d is None else d.float().contiguous() for d in d_scores))
    if d.log_probs is None:
        label_T = torch.zeros_like(saved.log_z)
    else:
        label_T = torch.where(saved.labels == IGNORE, 0.0, d.log_probs)
    p_T = label_T
    if d.log_z is not None:
        p_T = p_T - d.log_z
    uniform_T = None
    if d.mean_log_probs is not None:
        assert saved.vocab_size is not None
        p_T = p_T + d.mean_log_probs
        uniform_T = d.mean_log_probs / saved.vocab_size
    return UpstreamGrads(label_T, p_T, d.entropy, uniform_T)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        spec: HeadSpec,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        gradients = HeadGradients(hidden_TD, weight_VD, bias_V, ctx.needs_input_grad, spec)
        loss_T = hidden_TD.new_empty(len(hidden_TD), dtype=torch.float32)
        for start in range(0, len(hidden_TD), chunk):
            rows = slice(start, start + chunk)
            hidden_CD = hidden_TD[rows]
            labels_C = labels_T[rows]
            raw_CV = head_output(hidden_CD, gradients.weight, bias_V, spec)
            stats = chunk_stats(raw_CV, labels_C, spec, mean=False)
            loss_T[rows] = -stats.log_probs
            d_log_probs_C = -(labels_C != IGNORE).float()
            upstream = UpstreamGrads(label=d_log_probs_C, p=d_log_probs_C)
            gradients.add(
                rows,
                hidden_CD,
                logit_gradient_(raw_CV, labels_C, stats.log_z, stats.entropy, upstream, spec),
            )
        ctx.gradients = gradients
        ctx.mark_non_differentiable(loss_T)
        return loss_T.sum(), loss_T

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients: HeadGradients | None = ctx.gradients
        ctx.gradients = None
        if gradients is None:
            raise RuntimeError(
                "linear_loss computed its gradients in forward and has already returned them: backward runs once"
            )
        return *gradients.in_input_dtypes(d_loss), None, None, None
