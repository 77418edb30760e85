"""FSDP2 applied to an untouched model: each block, then the rest. Gradients are summed, never averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from mvp_engine.errors import UserError


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> None:
    """Shard the parameters over the mesh's last dimension and replicate them over its first, if it has two.

    They are kept and their gradients summed in float32; on the way to a computation in `dtype` they travel as that.
    """
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: the entries of its outermost lists of modules."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += [entry for entry in child if any(True for _ in entry.parameters())]
        else:
            found += blocks(child)
    return found


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


class UnusedParameterTracker:
    """Which parameters got a gradient in this step, on any rank.

    FSDP2 is told to give the others zeros, since ranks that sum different sets of gradients would sum wrong ones. An
    optimizer would decay a parameter with zeros, which it leaves alone without a gradient: so they are taken away.
    Before torch 2.13 FSDP2 cannot be told (`can_differ`), and the step fails: in the sum, if that notices first.
    """

    def __init__(self, model: nn.Module, host_group: dist.ProcessGroup | None) -> None:
        self._host_group = host_group
        self._params = {
            name: param for name, param in model.named_parameters() if param.requires_grad
        }
        self._used: set[nn.Parameter] = set()
        self._watched: set[nn.Parameter] = set()
        homes: dict[FSDPModule, list[tuple[nn.Module, str, nn.Parameter]]] = {}
        _homes(model, None, homes)
        self.can_differ = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
        for part, places in homes.items():
            if self.can_differ:
                part.set_reduce_scatter_unused_params(True, recurse=False)
            part.register_forward_pre_hook(self._watch(places))  # type: ignore[attr-defined]

    def _watch(self, places: list[tuple[nn.Module, str, nn.Parameter]]) -> Callable[..., None]:
        used = self._used  # and not self, which holds what is gathered: Python cannot collect a circle through a hook

        @torch.compiler.disable
        def before_forward(*_: object) -> None:
            for owner, name, param in places:
                gathered = owner._parameters[name]  # the same object in every forward
                if gathered is not None and gathered not in self._watched:
                    self._watched.add(gathered)
                    gathered.register_post_accumulate_grad_hook(
                        lambda _, param=param: used.add(param)
                    )

        return before_forward

    def clear(self) -> None:
        self._used.clear()

    def drop_the_others(self) -> None:
        """No gradient where no rank had one."""
        count = torch.tensor(
            [param in self._used for param in self._params.values()], dtype=torch.int32
        )
        if self._host_group:
            dist.all_reduce(count, group=self._host_group)
        ranks = self._host_group.size() if self._host_group else 1
        for (name, param), used in zip(self._params.items(), count.tolist(), strict=True):
            if used == 0:
                param.grad = None
            elif used < ranks and not self.can_differ:
                raise UserError(
                    f"{name} was used on {used} of {ranks} ranks, which FSDP2 of torch {torch.__version__} cannot sum: "
                    "install torch 2.13, or set parallel.shard=1"
                )


def _homes(module: nn.Module, part: FSDPModule | None, found: dict[FSDPModule, list[Any]]) -> None:
    """For each sharded part: the parameters that it gathers, and where they lie."""
    part = module if isinstance(module, FSDPModule) else part
    if part is not None:
        owned = [
            (module, name, p)
            for name, p in module._parameters.items()
            if p is not None and p.requires_grad
        ]
        found.setdefault(part, []).extend(owned)
    for child in module.children():
        _homes(child, part, found)
