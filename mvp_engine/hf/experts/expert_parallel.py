"""Expert parallel: the ranks of a group share the experts of each layer, and tokens travel to them.

Legend: T tokens of this rank, K experts per token, D hidden size, E experts, e of this rank; N rows.

A layer sorts its rows, one for each token and expert, by expert. Ranks hold neighbouring experts, so the rows of a rank
are neighbours: one all-to-all sends them, the rank runs its experts, and another sends the outputs back. The router
stays on the rank of its tokens, and so do the routing weights. Gradients travel the same way, so an expert's gradient
sums over all tokens of the group; FSDP sums over the groups. A rank without a row of its own still takes part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import SAC_IGNORED_OPS

from mvp_engine.errors import UserError
from mvp_engine.hf.experts import moe_layers as local_experts
from mvp_engine.hf.model.packed_model import PackedModel

# FSDP annotates its work for the profiler. FSDP modules inside of a block, as these experts are, annotate more in the
# second forward of activation checkpointing than in the first, which torch takes for another computation.
_ANNOTATIONS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}


def apply_expert_parallel(model: PackedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Keep this rank's experts of each layer, on a mesh (expert, tensor); returns the modules that hold them."""
    found = local_experts.modules(model)
    ranks = mesh.size(0)
    config: Any = model.hf.config
    if not found:
        raise UserError(
            f"parallel.expert={ranks}: {config.model_type} has no experts that transformers runs through its experts "
            "interface. Set parallel.expert=1"
        )
    SAC_IGNORED_OPS.update(_ANNOTATIONS)
    for name, experts in found.items():
        _check(name, experts, ranks)
        for part in experts.modules():  # with its adapters
            for key, param in list(part.named_parameters(recurse=False)):
                part._parameters[key] = _own_slice(param, mesh)
        experts.expert_group = mesh.get_group("expert")  # type: ignore[assignment]
    return list(found.values())


def _check(name: str, experts: nn.Module, ranks: int) -> None:
    total = local_experts.num_experts(experts)
    if total % ranks:
        raise UserError(
            f"parallel.expert={ranks} does not divide the {total} experts of {name}: choose a divisor"
        )
    for key, param in experts.named_parameters():
        if param.shape[0] != total:
            raise UserError(
                f"parallel.expert={ranks}: {name}.{key} is not stacked by expert, so it cannot be shared. "
                "Set parallel.expert=1"
            )


def _own_slice(param: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """A DTensor of the experts on this rank. A tensor-parallel parameter keeps its placement on that dimension."""
    whole = param.detach()
    of_tensor: Placement = Replicate()
    if isinstance(whole, DTensor):
        of_tensor = whole.placements[0]
        whole = whole.to_local()
    own = whole.chunk(mesh.size(0))[mesh.get_local_rank("expert")].clone()
    sliced = DTensor.from_local(
        own,
        mesh,
        [Shard(0), of_tensor],
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    return nn.Parameter(sliced, requires_grad=param.requires_grad)


# Its sizes follow from the routing, so compiled code would stop here anyway.
@torch.compiler.disable
def dispatched_experts(
    experts: nn.Module, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """The experts of all ranks of the group, on this rank's tokens."""
    group: Any = experts.expert_group
    ranks = dist.get_world_size(group)
    total = local_experts.num_experts(experts)
    order = local_experts.RowOrder.of(index_TK)
    dtype = local_experts.dtype_of(experts, hidden_TD)
    rows_ND = order.rows(hidden_TD.to(dtype or hidden_TD.dtype))
    sent_RE = local_experts.counts(order.expert, total).long().view(ranks, -1)
    received_RE = torch.empty_like(sent_RE)
    dist.all_to_all_single(received_RE, sent_RE, group=group)
    # The host has to know the sizes of what it sends and receives: the one host sync of the layer.
    sent, received = torch.stack([sent_RE.sum(1), received_RE.sum(1)]).tolist()
    assert sum(sent) == len(rows_ND), "an expert index outside of the layer"

    arrived_ND = _exchange(rows_ND, received, sent, group)
    own = torch.arange(total // ranks, device=rows_ND.device).repeat(ranks)
    own_N = own.repeat_interleave(received_RE.view(-1), output_size=sum(received))
    ones_N1 = arrived_ND.new_ones(len(own_N), 1)
    mine = _OwnExperts(experts, ranks)
    out_ND = local_experts.run(mine, arrived_ND, own_N[:, None], ones_N1, dtype)
    back_ND = _exchange(out_ND, sent, received, group)

    return order.combine(back_ND, weights_TK).to(back_ND.dtype)


def _exchange(
    rows_ND: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send slices of rows to the ranks of a group; with gradients, which travel back."""
    operator = torch.ops._c10d_functional.all_to_all_single
    pending = operator(rows_ND.contiguous(), received, sent, group.group_name)
    arrived: Tensor = functional.wait_tensor(pending)
    return arrived


class _OwnExperts(local_experts.View):
    """This rank's experts only, as plain tensors."""

    def __init__(self, module: Any, ranks: int) -> None:
        super().__init__(module)
        self.ranks = ranks

    @property
    def num_experts(self) -> int:
        return local_experts.num_experts(self.module) // self.ranks

    def change(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def of_child(self, child: Any) -> Any:
        return _OwnExperts(child, self.ranks)
