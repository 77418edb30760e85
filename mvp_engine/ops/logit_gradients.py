"""Gradients of softmax statistics: from those of the scores to those of the logits, hidden states, weight and bias.

Legend: T tokens, C tokens of a chunk, D hidden size, V vocabulary rows on this rank.

Gradients are computed chunk by chunk; only the (T, D) and (V, D) sums stay in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mvp_engine.ops.logit_stats import HeadSpec, fused_kernels, logits_of


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
        self.weight_dtype = weight_VD.dtype
        self.bias_dtype = None if bias_V is None else bias_V.dtype
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

    def multiply_(self, factor: Tensor) -> None:
        for gradient in (self.d_hidden_TD, self.d_weight_VD, self.d_bias_V):
            if gradient is not None:
                gradient.mul_(factor)

    def in_input_dtypes(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden states, weight and bias, in the dtypes of these."""
        d_weight = self.d_weight_VD
        if d_weight is not None:
            d_weight = d_weight.to(self.weight_dtype)
        d_bias = self.d_bias_V
        if d_bias is not None:
            d_bias = d_bias.to(self.bias_dtype)
        return self.d_hidden_TD, d_weight, d_bias
