"""Tensor parallel by the plan that a transformers config carries, with transformers' own styles.

One style is ours: norms over the heads that a rank holds have the same weight on every rank, and their gradient has to
be summed over the ranks. transformers sums the accumulated `.grad` once per backward, which counts earlier
micro-batches again; here the sum is a part of the backward itself.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from mvp_engine.errors import UserError
from mvp_engine.hf.config_facts import num_heads
from mvp_engine.hf.packed_model import PackedModel

_SUMMED = "mvp_replicated_with_summed_gradient"


def apply_tensor_parallel(model: PackedModel, mesh: DeviceMesh) -> None:
    """From now on the ranks of `mesh` share the matrices that the plan names. They must be given the same batches."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    hf: Any = model.hf
    config = hf.config.get_text_config()
    plan = dict(hf.tp_plan or {})
    ranks = mesh.size()
    if not any("layers" in name for name in plan):
        raise UserError(
            f"parallel.tensor={ranks}: {config.model_type} has no tensor-parallel plan in transformers"
        )
    heads, kv_heads = num_heads(config)
    by_heads = any(
        name.endswith(("k_proj", "query_key_value")) and style == "colwise"
        for name, style in plan.items()
    )
    if by_heads and (heads % ranks or kv_heads % ranks):
        raise UserError(
            f"parallel.tensor={ranks} cannot share {heads} query and {kv_heads} key/value heads "
            f"of {config.model_type}: it must divide both"
        )
    _register()
    plan = {
        name: _SUMMED if style == "replicated_with_grad_allreduce" else style
        for name, style in plan.items()
    }
    plan = dict.fromkeys(_norms_of_heads(hf, plan), _SUMMED) | plan
    apply_tensor_parallelism(hf, mesh, plan)
    hf.tie_weights()  # sharding made new parameters of what was one


def _norms_of_heads(hf: Any, plan: dict[str, str]) -> set[str]:
    """Norms of single heads beside projections that are cut by heads: some plans forget that they need a sum, too.

    Norms with a weight for each head would have to be cut, which no plan says and no style does.
    """
    found = set()
    for name, module in hf.named_modules():
        generic, _, child = re.sub(r"\.\d+(?=\.|$)", ".*", name).rpartition(".")
        if not all(plan.get(f"{generic}.{other}") == "colwise" for other in ("q_proj", "k_proj")):
            continue
        head = getattr(
            hf.get_submodule(name.rpartition(".")[0]), "head_dim", None
        )  # layers may differ in it
        shapes = {tuple(param.shape) for param in module.parameters()}
        if shapes == {(head,)}:
            found.add(f"{generic}.{child}")
        elif f"{generic}.{child}" not in plan and any(len(s) == 2 and s[1] == head for s in shapes):
            raise UserError(
                f"parallel.tensor > 1: {name} has a weight for each head, and transformers' plan for "
                f"{hf.config.get_text_config().model_type} does not say how it is shared. Set parallel.tensor=1."
            )
    return found


def _register() -> None:
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    class SummedGradient(TensorParallelLayer):
        @contextlib.contextmanager
        def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
            own = dict(module._parameters)
            group = mesh.get_group()
            module._parameters.update(
                {
                    name: _SumGradient.apply(param, group)
                    for name, param in own.items()
                    if param is not None
                }
            )
            try:
                yield
            finally:
                module._parameters.update(own)

    styles: Any = ALL_PARALLEL_STYLES
    styles.register(_SUMMED, SummedGradient())


class _SumGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
