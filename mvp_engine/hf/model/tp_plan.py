"""Tensor parallel by the plan that a transformers config carries, with transformers' own styles.

One style is ours: the norm of single heads has the same weight on every rank, and its gradient has to be summed over
the ranks. transformers all-reduces the accumulated `.grad` after each backward, which counts earlier micro-batches
again; here the all-reduce is a part of the backward itself.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from mvp_engine.errors import UserError
from mvp_engine.hf.model.config_source import num_heads
from mvp_engine.hf.model.packed_model import PackedModel

_ALL_REDUCED_GRAD = "mvp_replicated_with_grad_allreduce"


def apply_tensor_parallel(model: PackedModel, mesh: DeviceMesh) -> dict[str, str]:
    """Shard the matrices that the plan names over the ranks of `mesh`, which must be given the same batches.

    Returns the plan: styles by the names of modules, with `*` for numbers.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    # torch's own DTensor calls them, once on every rank.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    hf: Any = model.hf
    plan = dict(hf.tp_plan or {})
    _check(hf.config.get_text_config(), plan, mesh.size())
    _register_style()
    for name, style in plan.items():
        if style == "replicated_with_grad_allreduce":
            plan[name] = _ALL_REDUCED_GRAD
        elif name == "lm_head" and style == "colwise_gather_output":
            # `LanguageModel` computes from the rows of each rank. Gathering would need an even vocabulary.
            plan[name] = "colwise"
    plan = dict.fromkeys(_head_norms(hf, plan), _ALL_REDUCED_GRAD) | plan
    apply_tensor_parallelism(hf, mesh, plan)
    hf.tie_weights()  # sharding made two parameters of a tied one
    return plan


def _check(config: Any, plan: dict[str, str], ranks: int) -> None:
    if not any("layers" in name for name in plan):
        raise UserError(
            f"parallel.tensor={ranks}: {config.model_type} has no tensor-parallel plan in transformers"
        )
    if any(getattr(config, "activation_sparsity_pattern", None) or ()):
        raise UserError(
            f"parallel.tensor={ranks}: {config.model_type} keeps the largest activations of an MLP by their mean and "
            "deviation, and a rank with a slice of the MLP has only those of its slice. Set parallel.tensor=1"
        )
    heads, kv_heads = num_heads(config)
    projections = [
        style for name, style in plan.items() if name.endswith(("k_proj", "query_key_value"))
    ]
    if "colwise" in projections and (heads % ranks or kv_heads % ranks):
        raise UserError(
            f"parallel.tensor={ranks} cannot share {heads} query and {kv_heads} key/value heads "
            f"of {config.model_type}: it must divide both"
        )


def _head_norms(hf: Any, plan: dict[str, str]) -> set[str]:
    """Norms of single heads, of projections that are sharded by heads: some plans forget their all-reduce.

    A norm with a weight for each head would have to be sharded itself, which no plan says and no style does.
    """
    found = set()
    for name, module in hf.named_modules():
        generic, _, child = re.sub(r"\.\d+(?=\.|$)", ".*", name).rpartition(".")
        projections = [plan.get(f"{generic}.{other}") for other in ("q_proj", "k_proj")]
        if projections != ["colwise", "colwise"]:
            continue
        # Layers may differ in their head size.
        head_dim = getattr(hf.get_submodule(name.rpartition(".")[0]), "head_dim", None)
        shapes = {tuple(param.shape) for param in module.parameters()}
        if shapes == {(head_dim,)}:
            found.add(f"{generic}.{child}")
            continue
        per_head = any(len(shape) == 2 and shape[1] == head_dim for shape in shapes)
        if per_head and f"{generic}.{child}" not in plan:
            raise UserError(
                f"parallel.tensor > 1: {name} has a weight for each head, and transformers' plan for "
                f"{hf.config.get_text_config().model_type} does not say how to shard it. Set parallel.tensor=1."
            )
    return found


def _register_style() -> None:
    from transformers.distributed import tensor_parallel

    class AllReducedGrad(tensor_parallel.TensorParallelLayer):
        @contextlib.contextmanager
        def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
            own = dict(module._parameters)
            group = mesh.get_group()
            for name, param in own.items():
                if param is not None:
                    module._parameters[name] = SummedGrad.apply(param, group)
            try:
                yield
            finally:
                module._parameters.update(own)

    untyped: Any = tensor_parallel
    untyped.ALL_PARALLEL_STYLES.register(_ALL_REDUCED_GRAD, AllReducedGrad())


class SummedGrad(Function):
    """The identity; its backward sums the gradient over a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
