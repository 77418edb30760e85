"""Log-probs and entropy of tokens straight from hidden states: the logits of a whole batch never exist at once.

Legend: T tokens, C tokens of a chunk, D width, V vocabulary.

The head's matmul and the softmax run in chunks of tokens; backward computes each chunk's logits again. What is alive at
a time is one (C, V) block of logits instead of (T, V), and the gradient of the weight is summed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORE = -100


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
) -> tuple[Tensor, Tensor]:
    """Float32 (log_probs, entropy), each (T,); log_probs is 0 where the label is IGNORE. Both carry gradients.

    The logits are `(hidden @ weight.T + bias) * scale`, then soft-capped, then divided by the temperature. Under
    autocast the matmuls run in its dtype, in backward too.
    """
    device = hidden_TD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_TD.dtype
    how = (scale, softcap, temperature, dtype)
    with torch.autocast(device, enabled=False):
        return _LinearLogProbs.apply(hidden_TD, weight_VD, bias_V, labels_T, how, chunk)


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
    ) -> tuple[Tensor, Tensor]:
        ctx.how, ctx.chunk = how, chunk
        log_probs, norms, entropies = [], [], []
        for hidden_CD, labels_C in zip(hidden_TD.split(chunk), labels_T.split(chunk), strict=True):
            logits_CV = _logits(hidden_CD, weight_VD, bias_V, ctx.how)
            norm_C = logits_CV.logsumexp(-1)
            picked_C = logits_CV.gather(-1, labels_C.clamp(min=0)[:, None])[:, 0]
            log_probs.append(torch.where(labels_C == IGNORE, 0.0, picked_C - norm_C))
            probs_CV = (logits_CV - norm_C[:, None]).exp_()
            entropies.append(norm_C - torch.linalg.vecdot(probs_CV, logits_CV))
            norms.append(norm_C)
        entropy_T = torch.cat(entropies)
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, labels_T, torch.cat(norms), entropy_T)
        return torch.cat(log_probs), entropy_T

    @staticmethod
    def backward(ctx: Any, d_log_probs_T: Tensor, d_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, labels_T, norm_T, entropy_T = ctx.saved_tensors
        scale, softcap, temperature, dtype = ctx.how
        weight_low = weight_VD.to(dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        d_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        d_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        for start in range(0, len(hidden_TD), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            hidden_CD, labels_C = hidden_TD[rows], labels_T[rows]
            logits_CV = _logits(hidden_CD, weight_VD, bias_V, ctx.how)
            log_p_CV = logits_CV - norm_T[rows, None]
            p_CV = log_p_CV.exp()
            # d log p(label) = onehot - p;  d entropy = -p (log p + entropy)
            d_label_C = torch.where(labels_C == IGNORE, 0.0, d_log_probs_T[rows].float())
            d_entropy_C = d_entropy_T[rows].float()
            inner_CV = log_p_CV.add_(entropy_T[rows, None]).mul_(d_entropy_C[:, None]).add_(d_label_C[:, None])
            d_logits_CV = p_CV.mul_(inner_CV).neg_()
            d_logits_CV.scatter_add_(-1, labels_C.clamp(min=0)[:, None], d_label_C[:, None])
            if softcap is not None:
                capped_CV = logits_CV.mul_(temperature / softcap)
                d_logits_CV *= 1 - capped_CV.square_()
            d_logits_CV = (d_logits_CV * (scale / temperature)).to(dtype)
            if d_hidden_TD is not None:
                d_hidden_TD[rows] = d_logits_CV @ weight_low
            if d_weight_VD is not None:
                d_weight_VD += d_logits_CV.T @ hidden_CD.to(dtype)
            if d_bias_V is not None:
                d_bias_V += d_logits_CV.sum(0, dtype=torch.float32)
        d_weight = None if d_weight_VD is None else d_weight_VD.to(weight_VD.dtype)
        d_bias = None if d_bias_V is None else d_bias_V.to(bias_V.dtype)
        return d_hidden_TD, d_weight, d_bias, None, None, None
