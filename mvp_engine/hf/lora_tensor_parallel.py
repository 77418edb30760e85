"""LoRA adapters on tensor-parallel layers.

The output of a column-parallel layer is sharded, and so is `lora_B`, which makes it: each rank has the rows of its
outputs. The input of a row-parallel layer is sharded, and so is `lora_A`, which reads it: each rank has the columns of
its inputs. The other matrix is whole on every rank, with equal gradients: a rank's part of them is summed where it is
smallest, in the `rank` numbers per token between the two. Where a layer has whole inputs and outputs, so have its
adapters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.errors import UserError
from mvp_engine.hf.lora import adapted_layers
from mvp_engine.hf.lora_experts import adapted_experts
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.hf.tp_plan import SummedGrad

_COLUMN = ("colwise", "packed_colwise")
_ROW = ("rowwise",)
_WHOLE = ("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep")


def shard_adapters(model: PackedModel, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Shard the adapters of layers that are sharded already, by the styles of a tensor-parallel plan."""
    assert model.lora is not None
    if any(True for _ in adapted_experts(model)):
        raise UserError(
            f"lora.target_parameters: adapters of stacked experts do not support parallel.tensor={mesh.size()}. Set "
            "parallel.shard and parallel.expert instead"
        )
    for name, layer in adapted_layers(model):
        if not isinstance(layer.weight, DTensor):
            continue
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix("hf.")), "")
        if style in _COLUMN:
            _shard(layer.lora_B, layer, mesh)
            layer.lora_product = _product(_column_product, mesh)
        elif style in _ROW:
            if model.lora.dropout and layer.in_features % mesh.size():
                raise UserError(
                    f"lora.dropout: parallel.tensor={mesh.size()} does not divide the {layer.in_features} inputs of "
                    f"{name}, so the ranks would draw different masks. Set lora.dropout=0, or parallel.tensor=1"
                )
            _shard(layer.lora_A, layer, mesh)
            layer.lora_product = _product(_row_product, mesh)
        elif style not in _WHOLE:
            raise UserError(
                f"lora: the tensor-parallel style {style!r} of {name} takes no adapter. Leave it out of lora.targets, "
                "or set parallel.shard instead of parallel.tensor"
            )


def _shard(adapter: Any, layer: Any, mesh: DeviceMesh) -> None:
    """As the layer's own weight: a fused one has a slice of each part on a rank."""
    weight = adapter.weight
    sharded = distribute_tensor(weight.detach(), mesh, layer.weight.placements, src_data_rank=None)
    adapter.weight = nn.Parameter(sharded, requires_grad=weight.requires_grad)


def _product(product: Callable[..., Tensor], mesh: DeviceMesh) -> Callable[..., Tensor]:
    return partial(product, group=mesh.get_group())


def _column_product(layer: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    low = SummedGrad.apply(F.linear(x, layer.lora_A.weight), group)
    return F.linear(low, local_tensor(layer.lora_B.weight))


def _row_product(layer: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    low = _AllReduce.apply(F.linear(x, local_tensor(layer.lora_A.weight)), group)
    return F.linear(low, layer.lora_B.weight)


class _AllReduce(Function):
    """A sum over a group; its backward is the identity, since what follows is equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
