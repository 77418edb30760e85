"""Experts in the precision of autocast, registered with transformers.

Products over groups of rows are none that autocast knows: transformers computes them in the precision of the weights,
which is float32 on ranks that do not shard them. That takes ten times as long on a GPU, and compiled it waits for the
GPU in every layer, since there are no float32 kernels for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.ops.attention import config_tree
from mvp_engine.ops.autocast import autocast_dtype

NAME = "mvp_grouped"
MULTIPLE = 8  # of which the sizes of matrices must be, where kernels take half precision


def use(config: Any) -> None:
    """In all parts of a model that would take transformers' own grouped products."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, grouped_experts)
    for part in config_tree(config):
        if part._experts_implementation == "grouped_mm":
            part._experts_implementation_internal = NAME  # the setter would set all below


def grouped_experts(
    experts: nn.Module, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """The signature of transformers' experts interface."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    dtype = autocast_dtype(hidden_TD)
    sizes = [
        size for weight in experts.parameters() if weight.ndim == 3 for size in weight.shape[1:]
    ]
    seen: Any = experts
    if dtype is not None and not any(size % MULTIPLE for size in sizes):
        seen, hidden_TD = _In(experts, dtype), hidden_TD.to(dtype)
    if experts.has_bias:
        seen = _Biased(
            seen, torch.sort(index_TK.reshape(-1)).values
        )  # the rows' experts, in the order of products
    return grouped_mm_experts_forward(seen, hidden_TD, index_TK, weights_TK)


class _In:
    """A module whose own parameters are seen in another precision."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return value.to(self.dtype) if isinstance(value, Tensor) else value


class _Biased:
    """Experts whose biases come with what follows each product: transformers would add them in place, to a product
    that `model.activation_checkpointing=selective` keeps."""

    has_bias, has_post_expert_norm = False, True

    def __init__(self, experts: Any, experts_N: Tensor) -> None:
        self.experts, self.experts_N = experts, experts_N

    def __getattr__(self, name: str) -> Any:
        return getattr(self.experts, name)

    def _apply_gate(self, rows: Tensor) -> Tensor:
        return self.experts._apply_gate(rows + self.experts.gate_up_proj_bias[self.experts_N])

    def act_fn(self, rows: Tensor) -> Tensor:
        return self.experts.act_fn(rows + self.experts.up_proj_bias[self.experts_N])

    def post_expert_norm(self, rows: Tensor) -> Tensor:
        rows = rows + self.experts.down_proj_bias[self.experts_N]
        return self.experts.post_expert_norm(rows) if self.experts.has_post_expert_norm else rows
