"""The training step of a config on ranks that need not exist: the engine's own code, in this process.

Process groups are torch's fake ones, whose collectives do nothing. Parameters are fake tensors, which have shapes and
no memory. Small integer tensors, such as the boundaries of packed sequences, keep their values: code on the host reads
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.data.loader import StepPlan
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.engine import StepContext
from mvp_engine.errors import UserError
from mvp_engine.hf.experts import moe_layers
from mvp_engine.kit.loss import TokenNormedLossKit
from mvp_engine.kit.model import MLLMModelKit
from mvp_engine.kit.optim import OptimKit, OptimSettings
from mvp_engine.kit.plan.record import Collective, CollectiveRecorder
from mvp_engine.log import MetricStore
from mvp_engine.model_engine import Settings, engine_class
from mvp_engine.model_engine.fsdp.engine import FSDPEngine
from mvp_engine.model_engine.fsdp.init_weights import allocate
from mvp_engine.model_engine.fsdp.lockstep import media_kinds
from mvp_engine.model_engine.fsdp.parallelize import freeze
from mvp_engine.model_engine.fsdp.step_status import Places
from mvp_engine.model_engine.optim import build_optimizer

FEW_RANKS = 4  # so many are all simulated
WITHOUT_VALUES = (FakeTensor, DTensor, nn.Parameter)
GROUPED_BYTES = 16  # to which rows of a grouped GEMM's matrices are aligned
MOST_KNOWN = 2**22  # elements of a tensor whose values are kept


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds and calls in a step."""

    rank: int
    stage: int  # of the pipeline
    held: dict[str, int]  # bytes by kind
    parameters: int  # of this rank's shards
    calls: list[Collective]
    host_calls: int  # host collectives
    groups: dict[tuple[int, ...], str]  # names of its process groups


class Simulation:
    """`parallel`: the section of the layout, which in an RL config is that of the actor."""

    def __init__(
        self, config: Any, size: int, gpus_per_node: int = 8, parallel: Any = None
    ) -> None:
        self.config = config
        self.parallel = parallel or config.parallel
        self.size = size
        self.gpus_per_node = gpus_per_node
        self._codes = dict[int, int]()  # see ShapesOnly
        precision = "bf16" if config.train.precision == "auto" else config.train.precision
        settings = Settings.from_config(config, precision)
        # Neither changes a collective.
        self.settings = replace(settings, compile=None, offload_outside_steps="none")
        self.engine_class = engine_class(config.model.type, config.model.backend)

    def ranks(self, more: str | None = None) -> list[int]:
        """The ranks to simulate; raises a UserError if the layout does not fit the number of ranks."""
        with fake_world(0, self.size, self.gpus_per_node) as world:
            return chosen_ranks(Layout.of(world, self.parallel), more)

    def check(self) -> None:
        """Build rank 0: what a training would refuse at its start is refused here, by the same code."""
        with fake_world(0, self.size, self.gpus_per_node) as world:
            self._build(
                _mixed(_WithoutParameters, self.engine_class), Layout.of(world, self.parallel)
            )

    def run(self, rank: int, micro_batches: list[PackedBatch]) -> RankPlan:
        with fake_world(rank, self.size, self.gpus_per_node) as world:
            layout = Layout.of(world, self.parallel)

            def step(engine: Any) -> None:
                world.host_calls = 0
                self._train_batch(engine, micro_batches)

            engine, recorder = simulated_step(
                self.engine_class, lambda kind: self._build(kind, layout), step, self._codes
            )
            return RankPlan(
                rank,
                layout.stage,
                held_bytes(engine),
                sum(local_tensor(param).numel() for param in engine.model.parameters()),
                recorder.calls,
                world.host_calls,
                group_names(layout),
            )

    def _build(self, kind: type[Any], layout: Layout) -> Any:
        config = self.config
        model = MLLMModelKit(getattr(config, "lora", None)).build(config.model, config.model.type)
        engine = kind(model, layout, self.settings)
        if isinstance(config.optim, OptimSettings):
            engine.initialize(OptimKit(config.optim, config.seed).build_optimizer)
        else:
            engine.initialize(lambda model: build_optimizer(model, config.optim))
        return engine

    def _train_batch(self, engine: Any, micro_batches: list[PackedBatch]) -> None:
        batches = [_without_values(batch) for batch in micro_batches]
        kinds = tuple(media_kinds(batch) for batch in batches)
        plan = StepPlan((kinds,) * engine.layout.data_size)
        ctx = StepContext(1, 0, "train", MetricStore(engine.world), batches, plan)
        loss = TokenNormedLossKit(getattr(self.config, "loss", None))

        def forward_step(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
            if "log_probs" in engine.model.provides:
                return loss(ctx, engine.model, batch)
            return engine.model(batch, ["values"])["values"].sum(), batch.num_loss_tokens

        engine.train_batch(batches, forward_step, plan)


def _without_values(batch: PackedBatch) -> PackedBatch:
    """The batch with media as fake tensors; of an assumed batch they are on the meta device."""
    media = dict[str, Media]()
    for kind, item in batch.media.items():
        media[kind] = replace(item, values=torch.empty(item.values.shape, dtype=torch.float32))
    return replace(batch, media=media)


def held_bytes(engine: Any) -> dict[str, int]:
    """Bytes that this rank holds between steps, by kind."""
    params = list(engine.model.parameters())
    states = tree_leaves(list(engine.optimizer.state.values()))
    if getattr(engine.optimizer, "offload", False):
        states = []  # on the host
    kinds = {
        "weights": [*params, *engine.model.buffers()],
        "gradients": [param.grad for param in params if param.grad is not None],
        "optimizer states": [state for state in states if isinstance(state, Tensor)],
    }
    return {kind: sum(local_tensor(t).nbytes for t in kinds[kind]) for kind in kinds}


# ---- Ranks and process groups --------------------------------------------------------------------------------------


def chosen_ranks(layout: Layout, more: str | None) -> list[int]:
    """The ranks to simulate: the first and the last one, the last of each group of rank 0, and one of each stage.

    Ranks between the first and the last of a group do the same with other data, on shards of a size between theirs.
    `more` names others. Nothing here knows a dimension of the layout by name; of pipeline stages, whose ranks hold
    different layers, it knows that they are blocks of neighbouring ranks.
    """
    size = layout.world.size
    if more == "all" or size <= FEW_RANKS:
        return list(range(size))
    words = [word.strip() for word in more.split(",")] if more else []
    for word in words:
        if not word.isdigit() or int(word) >= size:
            raise UserError(f"--ranks {more}: {word!r} is no rank below {size}; or write all")
    chosen = {0, size - 1, *map(int, words), *range(0, size, layout.stage_size)}
    for ranks in sorted(_lines_through_rank0(layout.world), key=len):
        if len(chosen & set(ranks)) < 2:  # a larger group may have two of smaller ones already
            chosen.add(ranks[-1])
    return sorted(chosen)


def _lines_through_rank0(world: World) -> Iterator[list[int]]:
    """For each dimension of the layout's meshes: rank 0 with the ranks that differ in it alone."""
    for mesh in world.meshes:
        for dim in range(mesh.ndim):
            line = mesh.mesh[tuple(slice(None) if d == dim else 0 for d in range(mesh.ndim))]
            if len(line) > 1:
                yield line.tolist()


def group_names(layout: Layout) -> dict[tuple[int, ...], str]:
    """The names of this rank's process groups, by their ranks: those of the layout's fields and mesh dimensions."""
    names = dict[tuple[int, ...], str]()
    for name, group in _groups(layout, ""):
        names.setdefault(tuple(dist.get_process_group_ranks(group)), name)
    names.setdefault(tuple(range(layout.world.size)), "all ranks")
    return names


def _groups(value: Any, name: str) -> Iterator[tuple[str, dist.ProcessGroup]]:
    if isinstance(value, dist.ProcessGroup):
        yield name.removesuffix("s").removesuffix("_group"), value
    elif isinstance(value, DeviceMesh):
        for dim, dim_name in enumerate(value.mesh_dim_names or (name,) * value.ndim):
            yield dim_name, value.get_group(dim)
    elif isinstance(value, tuple):
        for item in value:
            yield from _groups(item, name)
    elif is_dataclass(value) and not isinstance(value, World):
        for field in fields(value):
            yield from _groups(getattr(value, field.name), field.name)


class FakeWorld(World):
    """A rank among `size`, in this process alone. A host collective answers as if all ranks said the same."""

    host_calls: int = 0  # host collectives since the last reset

    def broadcast(self, value: Any, source: int = 0) -> Any:
        self.host_calls += 1
        return value

    def all_gather(self, value: Any) -> list[Any]:
        self.host_calls += 1
        return [value] * self.size

    def all_reduce(self, values: list[float], reduce: Any) -> list[float]:
        self.host_calls += 1
        return values

    def close(self) -> None:
        dist.destroy_process_group()
        self._forget_groups()


@contextmanager
def fake_world(rank: int, size: int, gpus_per_node: int) -> Iterator[FakeWorld]:
    """Process groups as rank `rank` of `size` would have them; their collectives do nothing."""
    if dist.is_initialized():
        raise UserError("mvp plan simulates ranks: run it outside of torchrun, in one process")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    local = min(gpus_per_node, size)
    world = FakeWorld(rank, size, rank % local, local, torch.device("cpu"))
    try:
        yield world
    finally:
        world.close()


# ---- Tensors without values ----------------------------------------------------------------------------------------


class ShapesOnly(CollectiveRecorder):
    """A context for a step on fake tensors: operators on known values run, others only compute shapes.

    A collective on known values answers as if all ranks held the same. `codes` are the integers that a rank sends to
    the next pipeline stage, by its stage; a later stage receives them.
    """

    def __init__(self, fake: FakeTensorMode, rank: int, codes: dict[int, int]) -> None:
        super().__init__()
        self.fake = fake
        self.rank = rank
        self.codes = codes

    def __enter__(self) -> ShapesOnly:
        self.fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.record(func, args, kwargs)
        leaves = list[Any]()
        _add_leaves([*args, *kwargs.values()], leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func.namespace == "aten" and _has_known_values(func, kwargs, leaves, tensors):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func is torch.ops.aten._grouped_mm.default:  # its shape function accepts bfloat16 only
            return _grouped_mm_shape(*args, **kwargs)
        if func.namespace == "c10d":
            with _disable_current_modes():
                self._answer(args)
        if any(type(tensor) is not Tensor and _is_known(tensor) for tensor in tensors):
            args, kwargs = tree_map_only(Tensor, _as_plain, (args, kwargs))
        return func(*args, **kwargs)

    def _answer(self, args: tuple[Any, ...]) -> None:
        """Values of a collective on known values."""
        call = self.calls[-1]
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if not tensors or not all(map(_is_known, tensors)):
            return
        if call.kind == "all-to-all" and not call.sent:
            # Each rank sends to this one what this one would send to itself.
            output, given = tensors
            own = given.chunk(len(call.ranks))[call.ranks.index(self.rank)]
            output.copy_(torch.cat([own] * len(call.ranks)))
        elif call.kind == "send":
            self.calls.pop()  # a training sends codes once, in its first forward before the first step
            self.codes[call.ranks.index(self.rank)] = int(tensors[0])
        elif call.kind == "receive":
            self.calls.pop()
            assert call.peer is not None
            tensors[0].fill_(self.codes[call.ranks.index(call.peer)])


def _grouped_mm_shape(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Any:
    """The output of a grouped GEMM, without values. Groups are a dimension, or rows or columns up to `offs`."""
    for matrix in (a, b):
        wide = max(matrix.stride()[-2:]) * matrix.element_size()
        if matrix.element_size() == 2 and wide % GROUPED_BYTES:
            raise UserError(
                f"experts have matrices whose rows have {wide} bytes on a rank, and grouped GEMMs of GPUs need a "
                f"multiple of {GROUPED_BYTES}: lower parallel.tensor, or use other sizes"
            )
    shape = [a.shape[-2], b.shape[-1]]
    if a.ndim == b.ndim:
        shape.insert(0, a.shape[0] if offs is None else len(offs))
    return a.new_empty(shape)


def _add_leaves(values: Sequence[Any], leaves: list[Any]) -> None:
    """Append the arguments of an operator without their lists; torch's pytree takes longer than the operator."""
    for value in values:
        if type(value) is list or type(value) is tuple:
            _add_leaves(value, leaves)
        else:
            leaves.append(value)


def _is_known(tensor: Tensor) -> bool:
    # The type first: the device of a fake tensor is an operator of its own.
    return not isinstance(tensor, WITHOUT_VALUES) and tensor.is_cpu


def _as_plain(tensor: Tensor) -> Tensor:
    """A known tensor without the subclass, which fake tensors do not mix with."""
    is_other = type(tensor) is not Tensor and _is_known(tensor)
    return tensor.as_subclass(Tensor) if is_other else tensor


def _has_known_values(
    func: Any, kwargs: dict[str, Any], leaves: list[Any], tensors: list[Tensor]
) -> bool:
    """Integers and flags, and what is computed from them alone, unless the result is large.

    `leaves`: all arguments; `tensors`: those among them.
    """
    if tensors:
        if not all(map(_is_known, tensors)):
            return False
        return len(tensors) == 1 or _broadcast_size(tensors) <= MOST_KNOWN
    dtype = kwargs.get("dtype")
    device = torch.device(kwargs.get("device") or "cpu")
    numbers = [leaf for leaf in leaves if type(leaf) is int]
    if device.type != "cpu" or prod(max(1, number) for number in numbers) > MOST_KNOWN:
        return False
    if dtype is None:  # torch.arange(3) has integers
        is_range = func.overloadpacket is torch.ops.aten.arange
        return is_range and not any(isinstance(leaf, float) for leaf in leaves)
    return not dtype.is_floating_point


def _broadcast_size(tensors: list[Tensor]) -> int:
    try:
        return prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    except RuntimeError:  # an operator that does not broadcast
        return sum(tensor.numel() for tensor in tensors)


# ---- A model engine without values ---------------------------------------------------------------------------------


def balance_routing(model: nn.Module) -> None:
    """Send tokens to experts in turn, whatever the router says: plans have no values, and count even loads."""

    def route(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def in_turn(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.is_floating_point():
                return value
            slots = torch.arange(value.numel()).view(value.shape)
            return slots % moe_layers.num_experts(module)

        return tuple(map(in_turn, args)), {name: in_turn(one) for name, one in kwargs.items()}

    for module in moe_layers.modules(model).values():
        module.register_forward_pre_hook(route, with_kwargs=True)


class _WithoutValues(FSDPEngine):
    """A mixin that comes before a model engine's class: its step without reading a value."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        for name in ("preflight", "preflight_gradients", "preflight_media"):
            setattr(self.adapter, name, lambda *_, **__: None)  # checks that compare values
        freeze(self.model, self.settings.freeze)
        named = self.model.named_parameters()
        self._names = [name for name, param in named if param.requires_grad]  # of all stages
        balance_routing(self.model)

    def _materialize(self, skeleton: nn.Module) -> None:
        with self.fake:
            allocate(self.model, self.world.device)

    def _prepare_training(self) -> None:
        with self.fake:
            super()._prepare_training()

    def _places(self) -> Places | None:
        # The stages gather these names from each other; here this rank knows the model before it was cut.
        if self._link is None:
            return None
        names = {param: name for name, param in self.model.named_parameters()}
        places = {name: place for place, name in enumerate(self._names)}
        return Places([places[names[param]] for param in self.params], len(places))

    def _update(self, code: Tensor, loss: Tensor) -> None:
        self.optimizer.step()  # whether a step is skipped depends on values


class _WithoutParameters(_WithoutValues):
    """The same for what comes before a step alone: parameters stay on the meta device."""

    def _materialize(self, skeleton: nn.Module) -> None: ...

    def _prepare_training(self) -> None: ...


def _mixed(mixin: type[Any], engine_class: type[Any]) -> type[Any]:
    return type(f"Simulated{engine_class.__name__}", (mixin, engine_class), {})


def simulated_step(
    engine_class: type[Any],
    build: Callable[[type[Any]], Any],
    step: Callable[[Any], object],
    codes: dict[int, int] | None = None,
) -> tuple[Any, ShapesOnly]:
    """An engine that `build` makes and initializes, after one `step(engine)`; and the collectives of the step.

    Ranks of later pipeline stages need the `codes` that the stages before them left there.
    """
    engine = build(_mixed(_WithoutValues, engine_class))
    recorder = ShapesOnly(engine.fake, engine.world.rank, {} if codes is None else codes)
    with recorder:
        step(engine)
    return engine, recorder
