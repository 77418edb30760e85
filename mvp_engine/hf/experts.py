"""Mixture-of-experts layers in the autocast dtype, registered with transformers.

Autocast does not cover grouped GEMMs: transformers computes them in the dtype of the weights, which is float32 on ranks
that do not shard them. On a GPU that takes ten times as long. Compiled, it also costs a host sync in every layer, since
grouped GEMM has no float32 kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.hf.attention import config_tree
from mvp_engine.ops.autocast import autocast_dtype

NAME = "mvp_grouped"
MULTIPLE = 8  # the half-precision kernels need matrix sizes that are multiples of this


def use(config: Any) -> None:
    """Set these experts in every part of a model that would use transformers' own grouped GEMM."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, grouped_experts)
    for part in config_tree(config):
        if part._experts_implementation == "grouped_mm":
            # Not through the setter, which would also set all sub-configs.
            part._experts_implementation_internal = NAME


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of stacked experts that run through `grouped_experts`, by name."""
    found = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        # Only transformers' decorator for its experts interface sets the first.
        if "has_gate" in vars(module) and getattr(config, "_experts_implementation", "") == NAME:
            found[name] = module
    return found


def num_experts(experts: nn.Module) -> int:
    return int(experts.num_experts)  # type: ignore[arg-type]


def counts(expert_N: Tensor, experts: int) -> Tensor:
    """How many rows each expert gets; without a host sync, unlike `bincount`."""
    # histc counts integers on the GPU only, and floats exactly up to 16.7 million rows.
    kind = torch.int32 if expert_N.is_cuda else torch.float64
    return torch.histc(expert_N.to(kind), bins=experts, min=0, max=experts - 1)


def grouped_experts(
    experts: nn.Module, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """transformers' grouped experts in the autocast dtype, with transformers' experts signature."""
    if hasattr(experts, "expert_group"):
        from mvp_engine.hf.expert_parallel import dispatched_experts

        return dispatched_experts(experts, hidden_TD, index_TK, weights_TK)
    dtype = dtype_of(experts, hidden_TD)
    return run(experts, hidden_TD, index_TK, weights_TK, dtype)


def dtype_of(experts: nn.Module, hidden_TD: Tensor) -> torch.dtype | None:
    """The dtype to compute in; None: that of the weights."""
    return autocast_dtype(hidden_TD) if _sizes_fit(experts) else None


def run(
    experts: Any, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, dtype: torch.dtype | None
) -> Tensor:
    """The experts of a module, or of a view of one, on this rank."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    view = experts
    if dtype is not None:
        view = _CastExperts(experts, dtype)
        hidden_TD = hidden_TD.to(dtype)
    if not experts.has_bias:
        return grouped_mm_experts_forward(view, hidden_TD, index_TK, weights_TK)
    # Such a norm, of newer transformers, would be computed before the bias is added.
    assert not getattr(experts, "has_post_expert_norm", False), "experts with a bias and a norm"
    # transformers sorts the rows by expert before its GEMMs; the biases need the same order.
    expert_of_row = torch.sort(index_TK.reshape(-1)).values
    without_bias: Any = _BiasOutOfPlace(view, expert_of_row)
    out_TD = grouped_mm_experts_forward(without_bias, hidden_TD, index_TK, weights_TK)
    bias_ED = view.down_proj_bias
    weights_TE = weights_TK.new_zeros(len(index_TK), len(bias_ED))
    weights_TE = weights_TE.scatter(1, index_TK, weights_TK).to(bias_ED.dtype)
    return out_TD + (weights_TE @ bias_ED).to(out_TD.dtype)


def _sizes_fit(experts: nn.Module) -> bool:
    """The half-precision kernels support all matrices of these experts, (E, in, out) each."""
    matrices = [weight for weight in experts.parameters() if weight.ndim == 3]
    return all(
        weight.shape[1] % MULTIPLE == 0 and weight.shape[2] % MULTIPLE == 0 for weight in matrices
    )


class _CastExperts:
    """A view of an experts module that returns its parameters cast to another dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module = module
        self.dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return value.to(self.dtype) if isinstance(value, Tensor) else value


class _BiasOutOfPlace:
    """A view of an experts module without biases but those of the first GEMM, added in the function after it.

    transformers adds them in place, to an output that `model.activation_checkpointing=selective` has saved.
    """

    has_bias = False

    def __init__(self, experts: Any, expert_of_row: Tensor) -> None:
        self.experts = experts
        self.expert_of_row = expert_of_row

    def __getattr__(self, name: str) -> Any:
        return getattr(self.experts, name)

    def _apply_gate(self, rows: Tensor) -> Tensor:
        return self.experts._apply_gate(rows + self.experts.gate_up_proj_bias[self.expert_of_row])

    def act_fn(self, rows: Tensor) -> Tensor:
        return self.experts.act_fn(rows + self.experts.up_proj_bias[self.expert_of_row])
