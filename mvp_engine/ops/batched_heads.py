"""Log-probs and entropies of several heads, each on hidden states of its own, as batched GEMMs.

Legend: B heads, N rows of each head, C rows of a chunk, D hidden size, V vocabulary of a head.

The heads of a code predictor differ, and each reads another position of the same frames. One matmul over all heads runs
where a loop over 15 small heads would wait for kernel launches. Logits exist for one chunk of rows at a time; backward
computes them again. The gradient of the weights is summed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mvp_engine.ops.autocast import autocast_dtype
from mvp_engine.ops.logit_stats import IGNORE

CHUNK_LOGITS = 2**26  # of one chunk: 256 MB in float32


def batched_log_probs(
    hidden_BND: Tensor, weight_BVD: Tensor, labels_BN: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """The log-probs of the labels (0 where the label is IGNORE) and the entropies, (B, N) float32, with gradients.

    Under autocast the matmuls run in its dtype, in backward too.
    """
    heads, vocab_size, _ = weight_BVD.shape
    rows = chunk or max(1, CHUNK_LOGITS // (heads * vocab_size))
    dtype = autocast_dtype(hidden_BND) or hidden_BND.dtype
    with torch.autocast(hidden_BND.device.type, enabled=False):
        return _BatchedLogProbs.apply(hidden_BND, weight_BVD, labels_BN, rows, dtype)


def _log_softmax(hidden_BCD: Tensor, weight_BVD: Tensor) -> Tensor:
    return torch.bmm(hidden_BCD, weight_BVD.transpose(1, 2)).float().log_softmax(-1)


class _BatchedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_BND: Tensor,
        weight_BVD: Tensor,
        labels_BN: Tensor,
        rows: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        weight = weight_BVD.to(dtype)
        log_probs: list[Tensor] = []
        entropies: list[Tensor] = []
        for start in range(0, hidden_BND.shape[1], rows):
            chunk = slice(start, start + rows)
            log_p_BCV = _log_softmax(hidden_BND[:, chunk].to(dtype), weight)
            labels_BC = labels_BN[:, chunk]
            of_labels = log_p_BCV.gather(-1, labels_BC.clamp(min=0)[..., None])[..., 0]
            log_probs.append(torch.where(labels_BC == IGNORE, 0.0, of_labels))
            entropies.append(-(log_p_BCV.exp() * log_p_BCV).sum(-1))
        entropy_BN = torch.cat(entropies, 1)
        ctx.save_for_backward(hidden_BND, weight_BVD, labels_BN, entropy_BN)
        ctx.rows = rows
        ctx.dtype = dtype
        ctx.set_materialize_grads(False)
        return torch.cat(log_probs, 1), entropy_BN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_BND, weight_BVD, labels_BN, entropy_BN = ctx.saved_tensors
        d_log_probs, d_entropy = grads
        weight = weight_BVD.to(ctx.dtype)
        d_weight_BVD = torch.zeros_like(weight_BVD, dtype=torch.float32)
        d_hidden: list[Tensor] = []
        for start in range(0, hidden_BND.shape[1], ctx.rows):
            chunk = slice(start, start + ctx.rows)
            hidden_BCD = hidden_BND[:, chunk].to(ctx.dtype)
            log_p_BCV = _log_softmax(hidden_BCD, weight)
            p_BCV = log_p_BCV.exp()
            d_logits_BCV = torch.zeros_like(p_BCV)
            if d_log_probs is not None:
                labels_BC = labels_BN[:, chunk]
                d_BC1 = torch.where(labels_BC == IGNORE, 0.0, d_log_probs[:, chunk])[..., None]
                d_logits_BCV -= d_BC1 * p_BCV
                d_logits_BCV.scatter_add_(-1, labels_BC.clamp(min=0)[..., None], d_BC1)
            if d_entropy is not None:
                above_BCV = log_p_BCV + entropy_BN[:, chunk, None]
                d_logits_BCV -= d_entropy[:, chunk, None] * p_BCV * above_BCV
            d_raw_BCV = d_logits_BCV.to(ctx.dtype)
            d_hidden.append(torch.bmm(d_raw_BCV, weight))
            d_weight_BVD += torch.bmm(d_raw_BCV.transpose(1, 2), hidden_BCD)
        d_hidden_BND = torch.cat(d_hidden, 1).to(hidden_BND.dtype)
        return d_hidden_BND, d_weight_BVD.to(weight_BVD.dtype), None, None, None
