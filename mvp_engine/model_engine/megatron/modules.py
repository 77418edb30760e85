"""Megatron's TransformerLayer with our attention, norm and linear layers: the only file that imports megatron.

Process groups are handed over, so there is no global parallel state. The layer has no weights of its own: it is built
on the meta device, and the weight table passes weights to each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.core.utils import get_pg_size, make_viewless_tensor
from torch import Tensor, nn

from mvp_engine.model_engine.megatron.engine import GatheredLinear, ReduceScatter

__all__ = ["build_layer", "make_viewless_tensor", "transformer_config"]


class OneRank:
    """What Megatron asks of a process group, for a dimension that is not parallel."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class Norm(nn.Module):
    """RMSNorm on any share of the tokens. The weight table sums its gradient over ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class ColumnLinear(ColumnParallelLinear):
    """Megatron's layer with cut rows; it also runs without torch.distributed, and gathers tokens on any device."""

    def forward(self, x: Tensor, *_: Any) -> tuple[Tensor, Tensor | None]:
        bias = None if self.skip_bias_add else self.bias
        if get_pg_size(self.tp_group) == 1:
            out = F.linear(x, self.weight, bias)
        else:
            out = GatheredLinear.apply(x, self.weight, bias, self.tp_group)
        return out, self.bias if self.skip_bias_add else None


class RowLinear(RowParallelLinear):
    """Megatron's layer with cut columns; see `ColumnLinear`. None of our families has a bias here."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        out = F.linear(x, self.weight)
        if get_pg_size(self.tp_group) == 1:
            return out, None
        return ReduceScatter.apply(out, self.tp_group), None


class CoreAttention(nn.Module):
    """Attention of one forward: rotary positions and our packed attention, which `attend` calls."""

    # (T, H, d), (T, K, d), (T, K, d) -> (T, H d).
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """(T, 1, H, d), (T, 1, K, d), (T, 1, K, d) -> (T, 1, H d)"""
        return self.attend(query[:, 0], key[:, 0], value[:, 0])[:, None]


class Experts(nn.Module):
    """The place of an MLP in a layer with experts, which `run` calls: (T, 1, D) -> (T, 1, D)."""

    run: Callable[[Tensor], Tensor]

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.run(x), None


def transformer_config(config: Any, attention: Any, tensor: int) -> TransformerConfig:
    """Megatron's config for that of a Hugging Face model, and one of its attention modules."""
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=attention.head_dim,
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=hasattr(attention, "q_norm"),
        add_bias_linear=False,
        add_qkv_bias=attention.q_proj.bias is not None,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,  # on the device of the context, which is meta
        perform_initialization=False,
    )


def _mlp() -> Any:
    submodules = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
    if hasattr(MLP, "as_mlp_submodule"):  # megatron-core 0.19
        return functools.partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)


def build_layer(
    config: TransformerConfig,
    number: int,
    tensor_group: dist.ProcessGroup | None,
    has_experts: bool,
) -> TransformerLayer:
    """A layer without values for its weights. `number` counts from 1."""
    groups = ProcessGroupCollection()
    for name in ("tp", "pp", "cp", "ep", "expt_tp", "tp_ep", "tp_cp", "expt_dp", "tp_dp_cp"):
        setattr(groups, name, OneRank())
    if tensor_group is not None:
        groups.tp = groups.tp_cp = tensor_group
    qk_norm = Norm if config.qk_layernorm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnLinear,
        core_attention=CoreAttention,
        linear_proj=RowLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    submodules = TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=attention,
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=Norm,
        mlp=Experts if has_experts else _mlp(),
        mlp_bda=get_bias_dropout_add,
    )
    with torch.device("meta"):
        return TransformerLayer(config, submodules, layer_number=number, pg_collection=groups)
