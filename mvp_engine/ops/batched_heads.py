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

from mvp_engine.ops.logit_stats import IGNORE, HeadSpec, UpstreamGrads, chunk_stats, logit_gradient_
from mvp_engine.ops.precision import autocast_dtype

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


def _logits(hidden_BCD: Tensor, weight_BVD: Tensor) -> Tensor:
    """(B * C, V): the rows of all heads as those of one, for the functions of a single head."""
    return torch.bmm(hidden_BCD, weight_BVD.transpose(1, 2)).flatten(0, 1)


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
        spec = HeadSpec(1.0, None, 1.0, dtype)
        found: list[Tensor] = []
        for start in range(0, hidden_BND.shape[1], rows):
            chunk = slice(start, start + rows)
            labels_BC = labels_BN[:, chunk]
            raw_RV = _logits(hidden_BND[:, chunk].to(dtype), weight)
            stats = chunk_stats(raw_RV, labels_BC.flatten(), spec, mean=False)
            of_rows = torch.stack([stats.log_probs, stats.log_z, stats.entropy])
            found.append(of_rows.view(3, *labels_BC.shape))
        log_probs_BN, log_z_BN, entropy_BN = torch.cat(found, 2)
        ctx.save_for_backward(hidden_BND, weight_BVD, labels_BN, log_z_BN, entropy_BN)
        ctx.rows = rows
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return log_probs_BN, entropy_BN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_BND, weight_BVD, labels_BN, log_z_BN, entropy_BN = ctx.saved_tensors
        d_log_probs, d_entropy = grads
        spec: HeadSpec = ctx.spec
        weight = weight_BVD.to(spec.dtype)
        d_label_BN = torch.zeros_like(log_z_BN)
        if d_log_probs is not None:
            d_label_BN = torch.where(labels_BN == IGNORE, 0.0, d_log_probs)
        d_weight_BVD = torch.zeros_like(weight_BVD, dtype=torch.float32)
        d_hidden_BND = torch.empty_like(hidden_BND, memory_format=torch.contiguous_format)
        for start in range(0, hidden_BND.shape[1], ctx.rows):
            chunk = slice(start, start + ctx.rows)
            hidden_BCD = hidden_BND[:, chunk].to(spec.dtype)
            raw_RV = _logits(hidden_BCD, weight)
            d_label_R = d_label_BN[:, chunk].flatten()
            of_entropy = None if d_entropy is None else d_entropy[:, chunk].flatten()
            d_raw_RV = logit_gradient_(
                raw_RV,
                labels_BN[:, chunk].flatten(),
                log_z_BN[:, chunk].flatten(),
                entropy_BN[:, chunk].flatten(),
                UpstreamGrads(d_label_R, d_label_R, of_entropy),
                spec,
            )
            d_raw_BCV = d_raw_RV.view(len(weight), -1, weight.shape[1])
            d_hidden_BND[:, chunk] = torch.bmm(d_raw_BCV, weight)
            d_weight_BVD += torch.bmm(d_raw_BCV.transpose(1, 2), hidden_BCD)
        return d_hidden_BND, d_weight_BVD.to(weight_BVD.dtype), None, None, None
