"""FSDP2 on an untouched model: one FSDP module per block, then the root. Gradients are summed, never averaged.

DDPReducer: all-reduces the gradients of data-parallel replicas in buckets, while backward still runs.

There is no wrapper module: `p.grad` is a view into a bucket from the start, so nothing is copied in or out. Unlike in
torch's DDP a rank may have no micro-batch at all in a step, and a parameter may get no gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from mvp_engine.distributed.dtensor import local_tensor


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype = torch.float32,
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
    reshard: bool = True,
) -> None:
    """Shard the parameters over the mesh's last dimension and replicate them over its first, if it has two.

    `experts`: modules inside of blocks that expert-parallel ranks share already; sharded over `expert_mesh`.
    `reshard=False`: blocks keep their gathered parameters after a forward.

    Parameters and gradient sums are float32; parameters are cast to `dtype` before the all-gather (those of layers in
    FP8 are quantized: `hf/experts/fp8_layers.py`). FSDP2 cannot shard parameters of 0 dimensions, such as CLIP's
    `logit_scale`: they stay replicated, their gradients to be all-reduced.
    """
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    scalars = {param for param in model.parameters() if param.ndim == 0}
    meshes: list[tuple[nn.Module | list[nn.Module], DeviceMesh]] = []
    if expert_mesh is not None:
        meshes += [(part, expert_mesh) for part in experts]  # before the blocks around them
    meshes += [(part, mesh) for part in [*_sharing(blocks(model)), model]]
    for part, its_mesh in meshes:
        fully_shard(
            part,
            mesh=its_mesh,
            mp_policy=policy,
            reshard_after_forward=None if reshard else False,
            ignored_params=scalars,
            shard_placement_fn=partial(even_placement, ranks=its_mesh.shape[-1]),
        )
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def even_placement(param: nn.Parameter, ranks: int) -> Shard:
    """The dimension by which FSDP shards a parameter: the first one, unless stacked matrices would be shared unevenly.

    By the first one, 8 stacked experts on 16 ranks would lie on 8 of them. FSDP2 needs other dimensions to divide
    evenly. Of a tensor-parallel parameter, a dimension that is sharded already stays as it is.
    """
    local = local_tensor(param)
    placements = param.placements if isinstance(param, DTensor) else ()
    taken = {getattr(placement, "dim", None) for placement in placements}
    if local.ndim > 2 and local.shape[0] % ranks:
        for dim in range(1, local.ndim):
            if dim not in taken and local.shape[dim] % ranks == 0:
                return Shard(dim)
    return Shard(0)


def _sharing(found: list[nn.Module]) -> list[nn.Module | list[nn.Module]]:
    """Blocks; those that share parameters, as in Zamba, in one list, which FSDP2 gathers and shards together."""
    groups: list[list[nn.Module]] = []
    group_of: dict[nn.Parameter, list[nn.Module]] = {}
    for block in found:
        group = next((group_of[param] for param in block.parameters() if param in group_of), None)
        if group is None:
            groups.append(group := [])
        group.append(block)
        group_of |= dict.fromkeys(block.parameters(), group)
    return [group if len(group) > 1 else group[0] for group in groups]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the entries of its outermost nn.ModuleLists.

    A list with `holds_no_blocks` is left out: the model reads the weights of its entries without calling them.
    """
    found: list[nn.Module] = []
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            found += blocks(child)
        elif not getattr(child, "holds_no_blocks", False):
            found += [entry for entry in child if any(True for _ in entry.parameters())]
    return found


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


class UnusedParameterTracker:
    """Which parameters got a gradient on this rank, in this step.

    FSDP2 reduce-scatters zeros for a parameter that this rank did not use, since ranks that reduce different sets of
    gradients would mix them up. Weight decay would change a parameter by a zero gradient, so the engine removes the
    gradient of a parameter that no rank used. Before torch 2.13 FSDP2 cannot be asked for zeros (`can_differ`), and a
    step in which ranks differ fails.
    """

    def __init__(self, model: nn.Module) -> None:
        self.used: set[nn.Parameter] = set()
        self.can_differ = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
        self._watched: set[nn.Parameter] = set()
        for part, places in _parameters_by_part(model).items():
            if self.can_differ:
                part.set_reduce_scatter_unused_params(True, recurse=False)
            part.register_forward_pre_hook(self._watch(places))  # type: ignore[attr-defined]

    def _watch(self, places: list[_Place]) -> Callable[..., None]:
        # The hooks hold `used` and not self: Python cannot collect a reference cycle through a tensor hook.
        used = self.used

        @torch.compiler.disable
        def before_forward(*_: object) -> None:
            for place in places:
                gathered = place.module._parameters[place.name]  # the same object in every forward
                if gathered is not None and gathered not in self._watched:
                    self._watched.add(gathered)
                    gathered.register_post_accumulate_grad_hook(
                        lambda _, param=place.param: used.add(param)
                    )

        return before_forward


class _Place(NamedTuple):
    """Where a parameter is registered. During a forward FSDP2 puts the gathered one there."""

    module: nn.Module
    name: str
    param: nn.Parameter


def _parameters_by_part(model: nn.Module) -> dict[FSDPModule, list[_Place]]:
    """For each FSDP module, the parameters that it gathers."""
    found: dict[FSDPModule, list[_Place]] = {}

    def walk(module: nn.Module, part: FSDPModule | None) -> None:
        part = module if isinstance(module, FSDPModule) else part
        if part is not None:
            for name, param in module._parameters.items():
                if param is not None and param.requires_grad:
                    found.setdefault(part, []).append(_Place(module, name, param))
        for child in module.children():
            walk(child, part)

    walk(model, None)
    return found


BUCKET_BYTES = 32 * 2**20


class _Bucket:
    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.kept: Tensor | None = None  # the gradients, in host memory
        self.allocate()
        self.reduced: Tensor | None = None  # what an earlier `finish` of this step has summed
        self.waiting = 0
        self.work: dist.Work | None = None

    def allocate(self) -> None:
        """Memory on the device of the parameters, with the gradients that were kept."""
        first = self.params[0]
        sizes = [param.numel() for param in self.params]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        slices = self.flat.split(sizes)
        self.views = [view.view_as(p) for view, p in zip(slices, self.params, strict=True)]
        if self.kept is not None:
            self.flat.copy_(self.kept)
            self.kept = None
            self.attach()

    def attach(self) -> None:
        """Make the gradients views of the bucket."""
        for param, view in zip(self.params, self.views, strict=True):
            param.grad = view


class DDPReducer:
    def __init__(self, params: list[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
        """`group`: the ranks that hold replicas; None: all."""
        self.group = group
        self.buckets = [_Bucket(chunk) for chunk in _buckets(params)]
        self.used: set[Tensor] = set()  # parameters that got a gradient on this rank, in this step
        self._counted: set[Tensor] = set()  # in the last backward of the step
        self._armed = False
        self._finished = False
        self._next = 0
        for bucket in self.buckets:
            for param in bucket.params:
                hook = _hook(weakref.ref(self), weakref.ref(bucket))
                param.register_post_accumulate_grad_hook(hook)

    def zero_grad(self) -> None:
        self.used.clear()
        self._finished = False
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.reduced = None
            bucket.attach()

    def begin(self) -> None:
        """More gradients of this step follow: what is reduced already must not be sent again."""
        for bucket in self.buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is None:  # the first call, or cleared by the caller
                    view.zero_()
            bucket.attach()
            if self._finished:
                bucket.reduced = bucket.flat.clone()
                bucket.flat.zero_()
        self._finished = False

    def arm(self) -> None:
        """The next backward is the last of this step: all-reduce each bucket as soon as it is complete."""
        self._armed = True
        self._next = 0
        self._counted.clear()
        for bucket in self.buckets:
            bucket.waiting = len(bucket.params)

    def finish(self) -> None:
        """All-reduce the buckets that are left, and wait for all of them."""
        if not self._armed:
            self.arm()  # this rank has no micro-batch in this step
        for bucket in self.buckets:
            bucket.waiting = 0
        self._send_ready()
        self._armed = False
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work = None
            if bucket.reduced is not None:
                bucket.flat += bucket.reduced
                bucket.reduced = None
        self._finished = True

    def release(self, keep: bool = False) -> None:
        """Free the buckets while the parameters are offloaded; `keep` their gradients in host memory."""
        for bucket in self.buckets:
            bucket.kept = bucket.flat.to("cpu", copy=True) if keep else None
            bucket.flat = bucket.flat.new_empty(0)
            bucket.views = []
            for param in bucket.params:
                param.grad = None

    def allocate(self) -> None:
        for bucket in self.buckets:
            bucket.allocate()

    def _on_gradient(self, bucket: _Bucket, param: Tensor) -> None:
        self.used.add(param)
        if not self._armed:
            return
        if param in self._counted:
            raise RuntimeError(
                "a parameter got its gradient twice in one backward, so it may have been sent too early; "
                "re-entrant activation checkpointing does that: use checkpoint(..., use_reentrant=False)"
            )
        self._counted.add(param)
        bucket.waiting -= 1
        self._send_ready()

    def _send_ready(self) -> None:
        # In the same order on every rank: collectives are matched by order.
        while self._next < len(self.buckets) and self.buckets[self._next].waiting <= 0:
            bucket = self.buckets[self._next]
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            self._next += 1


def _hook(
    reducer: weakref.ref[DDPReducer], bucket: weakref.ref[_Bucket]
) -> Callable[[Tensor], None]:
    """A hook with weak references: Python cannot collect a reference cycle that runs through a tensor hook."""

    def on_gradient(param: Tensor) -> None:
        owner = reducer()
        its_bucket = bucket()
        if owner is not None and its_bucket is not None:
            owner._on_gradient(its_bucket, param)

    return on_gradient


def _buckets(params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters by dtype and size, the last ones first: backward reaches the last layers first."""
    chunks: list[list[nn.Parameter]] = []
    current: dict[torch.dtype, list[nn.Parameter]] = {}
    room: dict[torch.dtype, int] = {}
    for param in reversed(params):
        dtype = param.dtype
        if dtype not in current or param.nbytes > room[dtype]:
            current[dtype] = []
            room[dtype] = BUCKET_BYTES
            chunks.append(current[dtype])
        current[dtype].append(param)
        room[dtype] -= param.nbytes
    return chunks
