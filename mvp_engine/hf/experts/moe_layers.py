"""Mixture-of-experts layers in the autocast dtype, registered with transformers.

Autocast does not cover grouped GEMMs: transformers computes them in the dtype of the weights, which is float32 on ranks
that do not shard them. On a GPU that takes ten times as long. Compiled, it also costs a host sync in every layer, since
grouped GEMM has no float32 kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import SAC_IGNORED_OPS

from mvp_engine.errors import UserError
from mvp_engine.hf.experts import grouped_mm
from mvp_engine.hf.experts.grouped_mm import fp8_grouped_linear
from mvp_engine.hf.model.attention import config_tree
from mvp_engine.ops import fp8, triton_ops
from mvp_engine.ops.precision import autocast_dtype

if TYPE_CHECKING:
    from mvp_engine.hf.model.packed_model import PackedModel

NAME = "mvp_grouped"
MULTIPLE = 8  # the half-precision kernels need matrix sizes that are multiples of this
ROUTERS = ("gate", "router")  # names of routers next to their experts


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
        return dispatched_experts(experts, hidden_TD, index_TK, weights_TK)
    dtype = dtype_of(experts, hidden_TD)
    return run(experts, hidden_TD, index_TK, weights_TK, dtype)


def dtype_of(experts: nn.Module, hidden_TD: Tensor) -> torch.dtype | None:
    """The dtype to compute in; None: that of the weights."""
    return autocast_dtype(hidden_TD) if sizes_fit(experts) else None


def run(
    experts: Any, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, dtype: torch.dtype | None
) -> Tensor:
    """The experts of a module, or of a view of one, on this rank.

    As transformers' `grouped_mm_experts_forward`, with LoRA, and without changing an output in place, which
    `model.activation_checkpointing=selective` may have saved. Offsets stay on the device: there is no host sync.
    Routing weights scale the input of a linear down projection, which is narrower than its output.
    """
    if dtype is not None:
        experts = _CastExperts(experts, dtype)
        hidden_TD = hidden_TD.to(dtype)
    order = RowOrder.of(index_TK)
    ends_E = counts(order.expert, experts.num_experts).cumsum(0, dtype=torch.int32)
    rows = _Rows(order.expert, ends_E)
    x_ND = order.rows(hidden_TD)
    has_norm = getattr(experts, "has_post_expert_norm", False)
    is_linear = not (experts.has_bias or has_norm)
    up_name = "gate_up_proj" if experts.has_gate else "up_proj"
    scales_N = order.weights(weights_TK) if is_linear else None
    x_NF = _activated(experts, _linear(experts, up_name, x_ND, rows), scales_N)
    out_ND = _linear(experts, "down_proj", x_NF, rows)
    if has_norm:
        out_ND = experts.post_expert_norm(out_ND)
    return order.combine(out_ND, None if is_linear else weights_TK).to(hidden_TD.dtype)


def _activated(experts: Any, projected_N: Tensor, scales_N: Tensor | None) -> Tensor:
    """(N, F): the activation of the rows, times `scales_N`."""
    if (
        scales_N is not None
        and _is_swiglu(experts)
        and triton_ops.gated_rows_is_supported(projected_N)
    ):
        return triton_ops.gated_rows(projected_N, scales_N)
    apply = experts._apply_gate if experts.has_gate else experts.act_fn
    x_NF = apply(projected_N)
    return x_NF if scales_N is None else (x_NF * scales_N[:, None]).to(x_NF.dtype)


def _is_swiglu(experts: Any) -> bool:
    from transformers.integrations.moe import _default_apply_gate

    module = experts
    while isinstance(module, View):
        module = module.module
    if not module.has_gate or type(module)._apply_gate is not _default_apply_gate:
        return False
    return type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The rows of a layer, one for each token and expert, sorted by expert."""

    expert: Tensor  # (N,) of each row
    order: Tensor  # (N,) its place in the order of tokens
    place: Tensor  # (N,) the inverse: where the rows of tokens are when sorted
    top_k: int

    @classmethod
    def of(cls, index_TK: Tensor) -> RowOrder:
        expert_N, order_N = torch.sort(index_TK.reshape(-1), stable=True)
        place_N = torch.empty_like(order_N)
        place_N[order_N] = torch.arange(len(order_N), device=order_N.device)
        return cls(expert_N, order_N, place_N, index_TK.shape[1])

    def rows(self, hidden_TD: Tensor) -> Tensor:
        """The token of each row."""
        return _RowsOfTokens.apply(hidden_TD, self.order, self.place, self.top_k)

    def weights(self, weights_TK: Tensor) -> Tensor:
        """(N,): the routing weight of each row."""
        return _Permuted.apply(weights_TK.reshape(-1), self.order, self.place)

    def combine(self, out_ND: Tensor, weights_TK: Tensor | None) -> Tensor:
        """The sum of the rows of each token, times its weights unless they are in the rows already."""
        by_token_ND = _Permuted.apply(out_ND, self.place, self.order)
        out_TKD = by_token_ND.view(-1, self.top_k, out_ND.shape[-1])
        if weights_TK is not None:
            out_TKD = out_TKD * weights_TK[..., None]
        return out_TKD.sum(1)


class _RowsOfTokens(torch.autograd.Function):
    """Copies of tokens. autograd would add up their gradients one by one, in any order: an index has no inverse."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, order_N: Tensor, place_N: Tensor, top_k: int
    ) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.top_k = top_k
        return hidden_TD[order_N // top_k]

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        (place_N,) = ctx.saved_tensors
        tokens = len(place_N) // ctx.top_k
        return grad_ND[place_N].view(tokens, ctx.top_k, grad_ND.shape[-1]).sum(1), None, None, None


class _Permuted(torch.autograd.Function):
    """Rows in another order, with an inverse known to backward."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, place_N: Tensor, order_N: Tensor) -> Tensor:
        ctx.save_for_backward(order_N)
        return rows_ND[place_N]

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (order_N,) = ctx.saved_tensors
        return grad_ND[order_N], None, None


class _Rows(NamedTuple):
    """Rows sorted by expert."""

    expert: Tensor  # of each row
    ends: Tensor  # the end of each expert's rows


def _linear(experts: Any, name: str, x_NI: Tensor, rows: _Rows) -> Tensor:
    """The linear layer `name` of the expert of each row, with bias and adapter, if there are any."""
    out_NO = _projected(experts, name, x_NI, rows.ends)
    if experts.has_bias:
        out_NO = out_NO + getattr(experts, f"{name}_bias")[rows.expert]
    adapter = getattr(experts, adapter_name(name), None)
    if adapter is None:
        return out_NO
    low_NR = _grouped_linear(x_NI, adapter.lora_A, rows.ends)
    scaling = experts.lora_scaling
    if experts.lora_switch is not None:
        scaling = scaling * experts.lora_switch
    return out_NO + _grouped_linear(low_NR, adapter.lora_B, rows.ends) * scaling


def _projected(experts: Any, name: str, x_NI: Tensor, ends_E: Tensor) -> Tensor:
    is_bf16 = isinstance(experts, _CastExperts) and experts.dtype == torch.bfloat16
    if is_bf16 and is_fp8(experts):
        weight = getattr(experts, fp8.quantized_name(name), None) or experts.uncast(name)
        return fp8_grouped_linear(x_NI, weight, ends_E, is_transposed=experts.is_transposed)
    weight = getattr(experts, name)
    return _grouped_linear(x_NI, weight, ends_E, is_transposed=experts.is_transposed)


def _grouped_linear(
    x_NI: Tensor, weight: Tensor, ends_E: Tensor, is_transposed: bool = False
) -> Tensor:
    """Each row times the matrix of its expert. `is_transposed`: matrices are (in, out)."""
    # torch 2.11 does not compile `from transformers.integrations import moe`, a lazy module, in a block.
    from transformers.integrations.moe import _grouped_linear as grouped_linear

    if not grouped_mm.needs_operator(weight):
        return grouped_linear(x_NI, weight, ends_E, is_transposed=is_transposed)
    matrices_EIO = weight if is_transposed else weight.transpose(-2, -1)
    return grouped_mm.opaque_grouped_mm(x_NI.to(weight.dtype), matrices_EIO, ends_E)


def adapter_name(name: str) -> str:
    """The child module of experts with the LoRA adapter of a stacked parameter: `lora_experts.py`."""
    return f"{name}_adapter"


def sizes_fit(experts: nn.Module) -> bool:
    """The half-precision kernels support all matrices of these experts, (E, in, out) each."""
    return _are_multiples([*experts.parameters()], MULTIPLE)


def fp8_layers(block: nn.Module) -> list[nn.Module]:
    """The linear layers of a block that can run in FP8. Not those of routers: rounding could choose other experts."""
    in_routers: set[nn.Module] = set()
    for module in block.modules():
        around = dict(module.named_children())
        if "experts" in around or "router" in around:
            for router in (around[key] for key in ROUTERS if key in around):
                in_routers.update(router.modules())
    return [module for module in block.modules() if fp8.fits(module) and module not in in_routers]


def fit_fp8(experts: nn.Module) -> bool:
    """FP8 grouped GEMMs support all matrices of these experts; their adapters stay in bf16."""
    return sizes_fit(experts) and _are_multiples([*experts.parameters(False)], fp8.MULTIPLE)


def use_fp8(experts: nn.Module, in_fp8: bool = True) -> None:
    """Run these experts in FP8 under bf16 autocast, or no longer."""
    experts.in_fp8 = in_fp8  # type: ignore[assignment]


def is_fp8(experts: Any) -> bool:
    return getattr(experts, "in_fp8", False)


def _are_multiples(params: list[nn.Parameter], multiple: int) -> bool:
    sizes = [size for param in params if param.ndim == 3 for size in param.shape[1:]]
    return all(size % multiple == 0 for size in sizes)


class View:
    """A view of an experts module, or of a child of it, that returns its parameters changed."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def change(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    def of_child(self, child: nn.Module) -> Any:
        return child

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        if isinstance(value, Tensor):
            return self.change(value)
        is_adapter = name.endswith("_adapter") and isinstance(value, nn.Module | View)
        return self.of_child(value) if is_adapter else value


class _CastExperts(View):
    """Parameters cast to another dtype."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.dtype = dtype

    def change(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.ndim else tensor

    def of_child(self, child: Any) -> Any:
        return _CastExperts(child, self.dtype)

    def uncast(self, name: str) -> Tensor:
        weight: Tensor = getattr(self.module, name)
        return weight


# Expert parallel: the ranks of a group share the experts of each layer, and tokens travel to them.
#
# Legend: T tokens of this rank, K experts per token, D hidden size, E experts, e of this rank; N rows.
#
# A layer sorts its rows, one for each token and expert, by expert. Ranks hold neighbouring experts, so the rows of a
# rank are neighbours: one all-to-all sends them, the rank runs its experts, and another sends the outputs back. The
# router stays on the rank of its tokens, and so do the routing weights. Gradients travel the same way, so an expert's
# gradient sums over all tokens of the group; FSDP sums over the groups. A rank without a row of its own still takes
# part.

# FSDP annotates its work for the profiler. FSDP modules inside of a block, as these experts are, annotate more in the
# second forward of activation checkpointing than in the first, which torch takes for another computation.
_ANNOTATIONS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}


def apply_expert_parallel(model: PackedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Keep this rank's experts of each layer, on a mesh (expert, tensor); returns the modules that hold them."""
    found = modules(model)
    ranks = mesh.size(0)
    config: Any = model.hf.config
    if not found:
        raise UserError(
            f"parallel.expert={ranks}: {config.model_type} has no experts that transformers runs through its experts "
            "interface. Set parallel.expert=1"
        )
    SAC_IGNORED_OPS.update(_ANNOTATIONS)
    for name, experts in found.items():
        _check_parallel(name, experts, ranks)
        for part in experts.modules():  # with its adapters
            for key, param in list(part.named_parameters(recurse=False)):
                part._parameters[key] = _own_slice(param, mesh)
        experts.expert_group = mesh.get_group("expert")  # type: ignore[assignment]
    return list(found.values())


def _check_parallel(name: str, experts: nn.Module, ranks: int) -> None:
    total = num_experts(experts)
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
        own, mesh, [Shard(0), of_tensor], run_check=False, shape=param.shape, stride=param.stride()
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
    total = num_experts(experts)
    order = RowOrder.of(index_TK)
    dtype = dtype_of(experts, hidden_TD)
    rows_ND = order.rows(hidden_TD.to(dtype or hidden_TD.dtype))
    sent_RE = counts(order.expert, total).long().view(ranks, -1)
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
    out_ND = run(mine, arrived_ND, own_N[:, None], ones_N1, dtype)
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


class _OwnExperts(View):
    """This rank's experts only, as plain tensors."""

    def __init__(self, module: Any, ranks: int) -> None:
        super().__init__(module)
        self.ranks = ranks

    @property
    def num_experts(self) -> int:
        return num_experts(self.module) // self.ranks

    def change(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def of_child(self, child: Any) -> Any:
        return _OwnExperts(child, self.ranks)
