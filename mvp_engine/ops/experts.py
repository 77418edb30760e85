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


def grouped_experts(experts: nn.Module, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The signature of transformers' experts interface."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    dtype = autocast_dtype(hidden_TD)
    sizes = [size for weight in experts.parameters() if weight.ndim == 3 for size in weight.shape[1:]]
    if dtype is None or any(size % MULTIPLE for size in sizes):
        return grouped_mm_experts_forward(experts, hidden_TD, index_TK, weights_TK)
    low: Any = _In(experts, dtype)
    return grouped_mm_experts_forward(low, hidden_TD.to(dtype), index_TK, weights_TK)


class _In:
    """A module whose own parameters are seen in another precision."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return value.to(self.dtype) if isinstance(value, Tensor) else value
