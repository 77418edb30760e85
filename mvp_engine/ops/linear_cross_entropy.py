"""Scores or loss of tokens straight from hidden states: the logits of a whole batch never exist at once.

Legend: T tokens, C tokens of a chunk, D width, V vocabulary (of this rank, where ranks share it), R ranks.

The head's matmul and the softmax run in chunks of tokens; backward computes each chunk's logits again. What is alive at
a time is one (C, V) block of logits instead of (T, V), and the gradient of the weight is summed in float32.
`linear_loss` knows its gradient up to a factor while it still has the logits, and computes nothing twice.

Ranks may share the vocabulary, each with a slice of the head's rows. A few numbers per token say all that the others
need to know of a slice, so forward has one collective, whatever the number of chunks; backward sums each chunk's
gradient of the hidden states while the next chunk is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mvp_engine.ops.autocast import autocast_dtype

IGNORE = -100


class Scores(NamedTuple):
    """Float32, (T,) each; all carry gradients."""

    log_probs: Tensor  # of the labels; 0 where there is none
    entropy: Tensor
    log_z: Tensor  # the logarithm of the softmax's denominator
    mean_log_probs: (
        Tensor | None
    )  # over the whole vocabulary, if asked for: what label smoothing looks at


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
    how = _how(hidden_TD, scale, softcap, temperature)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        given = _LinearLogProbs.apply(
            hidden_TD, weight_VD, bias_V, labels_T, how, chunk, mean, group, vocab_start or 0
        )
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
    how = _how(hidden_TD, scale, softcap, 1.0)
    weight_VD = weight_VD.to(how.dtype)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        best = [
            _logits(_raw(part_CD, weight_VD, bias_V, how), how).max(-1)
            for part_CD in hidden_TD.split(chunk)
        ]
    value_T, index_T = (
        torch.cat([one.values for one in best]),
        torch.cat([one.indices for one in best]),
    )
    if group is None:
        return index_T
    ranks = dist.get_world_size(group)
    values_RT, indices_RT = (like.new_empty(ranks, len(like)) for like in (value_T, index_T))
    dist.all_gather_into_tensor(values_RT.view(-1), value_T, group=group)
    dist.all_gather_into_tensor(indices_RT.view(-1), index_T + (vocab_start or 0), group=group)
    return indices_RT.gather(0, values_RT.argmax(0)[None])[0]


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
) -> tuple[Tensor, Tensor]:
    """The cross-entropy summed over all labels that are not IGNORE: `-linear_log_probs(...)[0].sum()`, a third quicker.

    Gradients are computed on the way forward, so one matmul in four is saved, and memory for the weight's is held until
    backward, which can run once. Beside the sum is what it is a sum of: the loss of each token, without a gradient.
    """
    needs = any(x is not None and x.requires_grad for x in (hidden_TD, weight_VD, bias_V))
    if not (torch.is_grad_enabled() and needs):
        options: dict[str, Any] = {
            "scale": scale,
            "softcap": softcap,
            "temperature": temperature,
            "chunk": chunk,
        }
        log_probs_T = linear_log_probs(hidden_TD, weight_VD, labels_T, bias_V, **options)[0]
        return -log_probs_T.sum(), -log_probs_T
    how = _how(hidden_TD, scale, softcap, temperature)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        return _LinearLoss.apply(hidden_TD, weight_VD, bias_V, labels_T, how, chunk)


class _How(NamedTuple):
    scale: float
    softcap: float | None
    temperature: float
    dtype: torch.dtype  # of the matmuls

    @property
    def factor(self) -> float:
        return self.scale / self.temperature


def _how(hidden_TD: Tensor, scale: float, softcap: float | None, temperature: float) -> _How:
    return _How(scale, softcap, temperature, autocast_dtype(hidden_TD) or hidden_TD.dtype)


def _kernels(logits_CV: Tensor, how: _How) -> Any:
    """The fused kernels, where they serve: they save most of the time that is not matmuls."""
    if (
        not logits_CV.is_cuda
        or how.softcap is not None
        or logits_CV.dtype not in (torch.bfloat16, torch.float16)
    ):
        return None
    from mvp_engine.ops import logit_kernels

    return logit_kernels


def _raw(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, how: _How) -> Tensor:
    """What the head gives; the weight has the dtype of the matmuls already."""
    bias_V = None if bias_V is None else bias_V.to(how.dtype)
    return torch.nn.functional.linear(hidden_CD.to(how.dtype), weight_VD, bias_V)


def _logits(raw_CV: Tensor, how: _How) -> Tensor:
    logits_CV = raw_CV.float()
    if how.scale != 1.0:
        logits_CV = logits_CV * how.scale
    if how.softcap is not None:
        logits_CV = how.softcap * torch.tanh(logits_CV / how.softcap)
    if how.temperature != 1.0:
        logits_CV = logits_CV / how.temperature
    return logits_CV


def _numbers(raw_CV: Tensor, labels_C: Tensor, how: _How, mean: bool) -> tuple[Tensor, ...]:
    """Log-probs, norms, entropies and mean logits of a chunk."""
    if kernels := _kernels(raw_CV, how):
        return kernels.row_numbers(raw_CV, labels_C, how.factor)
    return _whole(_logits(raw_CV, how), labels_C, mean)


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
    mean_T, rows_T = (
        (total_RT[0].sum(0) / total_RT[1].sum(0), total_RT[1].sum(0))
        if total_RT
        else (log_sum_T,) * 2
    )
    return log_probs_T, max_T + log_sum_T, log_sum_T - dot_T / sum_T, mean_T, rows_T


def _rows(labels_C: Tensor, vocab_start: int, size: int) -> tuple[Tensor, Tensor]:
    """Where the labels are among this rank's rows (any row for those that are not), and whether they are."""
    index_C = labels_C - vocab_start
    return index_C.clamp(0, size - 1), (index_C >= 0) & (index_C < size)


class _Upstream(NamedTuple):
    """The gradients of a chunk's scores, as those of its logits need them: `d log p(label) = onehot - p`,
    `d entropy = -p (log p + entropy)`, `d log z = p`, `d mean log p = 1 / V - p`."""

    label: Tensor  # of the onehot; 0 where there is no label
    p: Tensor  # of -p
    entropy: Tensor | None = None
    flat: Tensor | None = None  # of all logits alike


def _gradient(
    raw_CV: Tensor,
    labels_C: Tensor,
    norm_C: Tensor,
    entropy_C: Tensor,
    given: _Upstream,
    how: _How,
    mine: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """That of `raw_CV`, which is used up; `mine` says which labels are among this rank's rows, and where."""
    if mine is None and (kernels := _kernels(raw_CV, how)):
        return kernels.to_gradient_(raw_CV, labels_C, norm_C, entropy_C, *given, how.factor)
    logits_CV = _logits(raw_CV, how)
    log_p_CV = logits_CV - norm_C[:, None]
    p_CV = log_p_CV.exp()
    inner_CV = given.p[:, None]
    if given.entropy is not None:
        inner_CV = log_p_CV.add_(entropy_C[:, None]).mul_(given.entropy[:, None]).add_(inner_CV)
    d_logits_CV = p_CV.mul_(inner_CV).neg_()
    if given.flat is not None:
        d_logits_CV += given.flat[:, None]
    index_C, d_label_C = labels_C.clamp(min=0), given.label
    if mine is not None:
        index_C, d_label_C = mine[0], torch.where(mine[1], d_label_C, 0.0)
    d_logits_CV.scatter_add_(-1, index_C[:, None], d_label_C[:, None])
    if how.softcap is not None:
        d_logits_CV *= 1 - (logits_CV * (how.temperature / how.softcap)).square_()
    return (d_logits_CV * how.factor).to(how.dtype)


class _Gradients:
    """Of hidden states, weight and bias, from those of the logits, one chunk of tokens after the other."""

    def __init__(
        self, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, needs: Any, how: _How
    ) -> None:
        self.weight, self.how = weight_VD.to(how.dtype), how
        self.dtypes = (weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        self.d_hidden_TD = (
            torch.empty_like(hidden_TD, memory_format=torch.contiguous_format) if needs[0] else None
        )
        self.d_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs[1] else None
        self.d_bias_V = (
            torch.zeros_like(bias_V, dtype=torch.float32)
            if bias_V is not None and needs[2]
            else None
        )

    def add(self, rows: slice, hidden_CD: Tensor, d_logits_CV: Tensor) -> None:
        if self.d_hidden_TD is not None:
            self.d_hidden_TD[rows] = d_logits_CV @ self.weight
        if self.d_weight_VD is not None:
            hidden_CD = hidden_CD.to(self.how.dtype)
            if (
                d_logits_CV.is_cuda and d_logits_CV.dtype != torch.float32
            ):  # summed inside the matmul
                torch.addmm(
                    self.d_weight_VD,
                    d_logits_CV.T,
                    hidden_CD,
                    out_dtype=torch.float32,
                    out=self.d_weight_VD,
                )
            else:
                self.d_weight_VD += d_logits_CV.T @ hidden_CD
        if self.d_bias_V is not None:
            self.d_bias_V += d_logits_CV.sum(0, dtype=torch.float32)

    def times(
        self, factor: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of hidden states, weight and bias, in their dtypes."""
        found = (self.d_hidden_TD, self.d_weight_VD, self.d_bias_V)
        if factor is not None:
            for gradient in found:
                _ = None if gradient is None else gradient.mul_(factor)
        d_hidden, d_weight, d_bias = found
        d_weight = None if d_weight is None else d_weight.to(self.dtypes[0])
        return d_hidden, d_weight, None if d_bias is None else d_bias.to(self.dtypes[1])


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        how: _How,
        chunk: int,
        mean: bool,
        group: dist.ProcessGroup | None,
        vocab_start: int,
    ) -> tuple[Tensor | None, ...]:
        ctx.how, ctx.chunk, ctx.group, ctx.vocab_start = how, chunk, group, vocab_start
        chunks, weight = [], weight_VD.to(how.dtype)
        for hidden_CD, labels_C in zip(hidden_TD.split(chunk), labels_T.split(chunk), strict=True):
            raw_CV = _raw(hidden_CD, weight, bias_V, how)
            if group is None:
                chunks.append(_numbers(raw_CV, labels_C, how, mean))
            else:
                chunks.append(_slice(_logits(raw_CV, how), labels_C, vocab_start, mean))
        columns = [torch.cat(column) for column in zip(*chunks, strict=True)]
        rows_T = torch.full_like(columns[0], len(weight_VD))  # of the vocabulary
        if group is not None:
            *columns, rows_T = _join(torch.stack(columns), labels_T, group)
        log_probs_T, norm_T, entropy_T, mean_T = columns
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, labels_T, norm_T, entropy_T, rows_T)
        ctx.set_materialize_grads(False)
        return log_probs_T, entropy_T, norm_T, mean_T - norm_T if mean else None

    @staticmethod
    def backward(ctx: Any, *d_scores: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, labels_T, norm_T, entropy_T, rows_T = ctx.saved_tensors
        # Those of a sum are one number that claims to be many, which the kernels do not know.
        d_label_T, d_entropy_T, d_log_z_T, d_mean_T = (
            None if d is None else d.float().contiguous() for d in d_scores
        )
        label_T = (
            torch.zeros_like(norm_T)
            if d_label_T is None
            else torch.where(labels_T == IGNORE, 0.0, d_label_T)
        )
        p_T = label_T if d_log_z_T is None else label_T - d_log_z_T
        p_T = p_T if d_mean_T is None else p_T + d_mean_T
        every = (label_T, p_T, d_entropy_T, None if d_mean_T is None else d_mean_T / rows_T)
        sums = _Gradients(hidden_TD, weight_VD, bias_V, ctx.needs_input_grad, ctx.how)
        pending = []
        for start in range(0, len(hidden_TD), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            hidden_CD, labels_C = hidden_TD[rows], labels_T[rows]
            raw_CV = _raw(hidden_CD, sums.weight, bias_V, ctx.how)
            given = _Upstream(*(None if d is None else d[rows] for d in every))  # type: ignore[arg-type]
            mine = None if ctx.group is None else _rows(labels_C, ctx.vocab_start, len(weight_VD))
            d_raw_CV = _gradient(
                raw_CV, labels_C, norm_T[rows], entropy_T[rows], given, ctx.how, mine
            )
            sums.add(rows, hidden_CD, d_raw_CV)
            if ctx.group is not None and sums.d_hidden_TD is not None:
                pending.append(
                    dist.all_reduce(sums.d_hidden_TD[rows], group=ctx.group, async_op=True)
                )
        for work in pending:
            work.wait()
        return *sums.times(), None, None, None, None, None, None


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        how: _How,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        sums = _Gradients(hidden_TD, weight_VD, bias_V, ctx.needs_input_grad, how)
        loss_T = hidden_TD.new_empty(len(hidden_TD), dtype=torch.float32)
        for start in range(0, len(hidden_TD), chunk):
            rows = slice(start, start + chunk)
            hidden_CD, labels_C = hidden_TD[rows], labels_T[rows]
            raw_CV = _raw(hidden_CD, sums.weight, bias_V, how)
            log_probs_C, norm_C, entropy_C, _ = _numbers(raw_CV, labels_C, how, mean=False)
            loss_T[rows] = -log_probs_C
            minus_C = -(labels_C != IGNORE).float()
            sums.add(
                rows,
                hidden_CD,
                _gradient(raw_CV, labels_C, norm_C, entropy_C, _Upstream(minus_C, minus_C), how),
            )
        ctx.sums = sums
        ctx.mark_non_differentiable(loss_T)
        return loss_T.sum(), loss_T

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError(
                "linear_loss computed its gradients on the way forward, and gave them away already"
            )
        return *sums.times(d_loss), None, None, None
