"""The training step of a config on simulated ranks: bytes held, parameters and collectives of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import product
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
from mvp_engine.data.step_plan import StepPlan
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import dim_slices, local_tensor
from mvp_engine.engine import StepContext
from mvp_engine.errors import UserError
from mvp_engine.hf.experts import moe_layers
from mvp_engine.kit import MLLMModelKit, OptimKit, OptimSettings, TokenNormedLossKit
from mvp_engine.log import MetricStore
from mvp_engine.model_engine import Settings, engine_class
from mvp_engine.model_engine.fsdp.engine import FSDPEngine
from mvp_engine.model_engine.fsdp.init_weights import allocate
from mvp_engine.model_engine.fsdp.lockstep import media_kinds
from mvp_engine.model_engine.fsdp.parallelize import freeze
from mvp_engine.model_engine.fsdp.unused_params import Places
from mvp_engine.model_engine.optim import build_optimizer
from mvp_engine.tools.plan.record import Collective, CollectiveRecorder

# Bytes that a rank holds between steps: of its own engine, and of other ranks, from the placements of DTensors.


def held_bytes(engine: Any) -> dict[str, int]:
    """Bytes of this rank by kind, after a step."""
    return {kind: _local_bytes(tensors) for kind, tensors in _held(engine).items()}


def _held(engine: Any) -> dict[str, list[Tensor]]:
    model = engine.model
    states = tree_leaves(list(engine.optimizer.state.values()))
    if getattr(engine.optimizer, "offload", False):
        states = []  # on the host
    return {
        "weights": [*model.parameters(), *model.buffers()],
        "gradients": [param.grad for param in model.parameters() if param.grad is not None],
        "optimizer states": [one for one in states if isinstance(one, Tensor)],
    }


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    local = [local_tensor(tensor) for tensor in tensors]
    return sum(one.numel() * one.element_size() for one in local)


def bytes_of_ranks(engine: Any) -> dict[int, int]:
    """Bytes by rank, for the ranks that share the parameters of this engine's rank.

    A rank holds what the placements of the DTensors give it, so none has to be simulated for that.
    """
    sharded = Counter[_Sharding]()
    whole = 0  # bytes of tensors that no rank shards
    for tensor in [one for tensors in _held(engine).values() for one in tensors]:
        if isinstance(tensor, DTensor):
            sharded[_Sharding.of(tensor)] += tensor.element_size()
        else:
            whole += tensor.numel() * tensor.element_size()
    if not sharded:
        return {engine.world.rank: whole}
    ranks = set.intersection(*(set(sharding.ranks) for sharding in sharded))
    found = dict.fromkeys(sorted(ranks), whole)
    for sharding, size in sharded.items():
        for rank, elements in zip(sharding.ranks, sharding.elements(), strict=True):
            if rank in found:
                found[rank] += size * elements
    return found


@dataclass(frozen=True)
class _Sharding:
    """The shape of a DTensor, and how it is placed on a mesh."""

    shape: tuple[int, ...]
    placements: tuple[Any, ...]
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]  # of the mesh, the last dimension fastest

    @classmethod
    def of(cls, tensor: DTensor) -> _Sharding:
        mesh = tensor.device_mesh
        ranks = tuple(mesh.mesh.flatten().tolist())
        return cls(tuple(tensor.shape), tuple(tensor.placements), tuple(mesh.shape), ranks)

    def elements(self) -> list[int]:
        """The elements of each rank of the mesh."""
        found = []
        for coordinate in product(*map(range, self.mesh_shape)):
            lengths = []
            for dim, size in enumerate(self.shape):
                slices = dim_slices(size, dim, self.placements, self.mesh_shape, coordinate)
                lengths.append(sum(one.length for one in slices))
            found.append(prod(lengths))
        return found


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
    bytes_of_ranks: dict[int, int]  # of all kinds, for the ranks that share its parameters


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
        precision = "bf16" if config.loop.precision == "auto" else config.loop.precision
        settings = Settings.from_config(config, precision)
        # Neither changes a collective.
        self.settings = replace(settings, compile=None, offload="none")

    def ranks(self, wanted: str | None = None) -> list[int]:
        """The ranks to simulate; raises a UserError if the layout does not fit the number of ranks."""
        with fake_world(0, self.size, self.gpus_per_node) as world:
            return chosen_ranks(Layout.of(world, self.parallel), wanted)

    def check(self) -> None:
        """Build rank 0: what a training would refuse at its start is refused here, by the same code."""
        with fake_world(0, self.size, self.gpus_per_node) as world:
            layout = Layout.of(world, self.parallel)
            model = self.config.model
            kind = engine_class(model.type, model.backend)
            check_engine(kind, lambda checked: self._build(checked, layout))

    def run(self, rank: int, micro_batches: list[PackedBatch]) -> RankPlan:
        with fake_world(rank, self.size, self.gpus_per_node) as world:
            layout = Layout.of(world, self.parallel)

            def step(engine: Any) -> None:
                world.host_calls = 0
                self._train_batch(engine, micro_batches)

            model = self.config.model
            engine, recorder = simulated_step(
                engine_class(model.type, model.backend),
                lambda kind: self._build(kind, layout),
                step,
                self._codes,
            )
            local = [local_tensor(param) for param in engine.model.parameters()]
            return RankPlan(
                rank,
                layout.stage,
                held_bytes(engine),
                sum(param.numel() for param in local),
                recorder.calls,
                world.host_calls,
                group_names(layout),
                bytes_of_ranks(engine),
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
            outputs = engine.model(batch, ["values"])
            return outputs["values"].sum(), batch.num_loss_tokens

        engine.train_batch(batches, forward_step, plan)


def _without_values(batch: PackedBatch) -> PackedBatch:
    """The batch with media as fake tensors; of an assumed batch they are on the meta device."""
    media = dict[str, Media]()
    for kind, one in batch.media.items():
        media[kind] = replace(one, values=torch.empty(one.values.shape, dtype=torch.float32))
    return replace(batch, media=media)


# Which ranks of a layout to simulate, and the names of its process groups.
#
# Nothing here knows a dimension of the layout by name; of pipeline stages, whose ranks hold different layers, it knows
# that they are blocks of neighbouring ranks.

FEW_RANKS = 4  # so many are all simulated


def chosen_ranks(layout: Layout, wanted: str | None) -> list[int]:
    """The ranks to simulate: rank 0, the last rank of each of its groups, and one rank of each pipeline stage.

    Ranks between the first and the last of a group do the same with other data. `wanted` names more ranks.
    """
    size = layout.world.size
    if wanted == "all" or size <= FEW_RANKS:
        return list(range(size))
    chosen = {0, *_listed(wanted, size)}
    chosen |= set(range(0, size, layout.stage_size))
    for ranks in sorted(_lines_through_rank0(layout.world), key=len):
        if len(chosen & set(ranks)) < 2:  # a larger group may have two of smaller ones already
            chosen.add(ranks[-1])
    return sorted(chosen)


def _listed(wanted: str | None, size: int) -> list[int]:
    if wanted is None:
        return []
    words = [word.strip() for word in wanted.split(",")]
    wrong = [word for word in words if not word.isdigit() or int(word) >= size]
    if wrong:
        raise UserError(f"--ranks {wanted}: {wrong[0]!r} is no rank below {size}; or write all")
    return [int(word) for word in words]


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
    if isinstance(value, World):
        return
    if isinstance(value, dist.ProcessGroup):
        yield name.removesuffix("s").removesuffix("_group"), value
    elif isinstance(value, DeviceMesh):
        for dim, dim_name in enumerate(value.mesh_dim_names or (name,) * value.ndim):
            yield dim_name, value.get_group(dim)
    elif isinstance(value, tuple):
        for one in value:
            yield from _groups(one, name)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _groups(getattr(value, field.name), field.name)


# One rank of a job that need not exist: the engine's own code on torch's fake process group, without values.
#
# Parameters are fake tensors, which have shapes and no memory. Small integer tensors, such as the boundaries of packed
# sequences, keep their values: code on the host reads them.

WITHOUT_VALUES = (FakeTensor, DTensor, nn.Parameter)
GROUPED_BYTES = 16  # to which rows of a grouped GEMM's matrices are aligned
MOST_KNOWN = 2**22  # elements of a tensor whose values are kept


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
        _add_leaves(args, leaves)
        _add_leaves([*kwargs.values()], leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func.namespace == "aten" and _has_known_values(func, kwargs, leaves, tensors):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func is torch.ops.aten._grouped_mm.default:  # its shape function accepts bfloat16 only
            return _grouped_mm_shape(*args, **kwargs)
        if func.namespace == "c10d":
            with _disable_current_modes():
                self._answer(func, args)
        if any(type(one) is not Tensor and _is_known(one) for one in tensors):
            args, kwargs = tree_map_only(Tensor, _as_plain, (args, kwargs))
        return func(*args, **kwargs)

    def _answer(self, func: Any, args: tuple[Any, ...]) -> None:
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
    return (
        tensor.as_subclass(Tensor) if type(tensor) is not Tensor and _is_known(tensor) else tensor
    )


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
    numbers = [one for one in leaves if type(one) is int]
    if device.type != "cpu" or prod(max(1, one) for one in numbers) > MOST_KNOWN:
        return False
    if dtype is None:  # torch.arange(3) has integers
        is_range = func.overloadpacket is torch.ops.aten.arange
        return is_range and not any(isinstance(one, float) for one in leaves)
    return not dtype.is_floating_point


def _broadcast_size(tensors: list[Tensor]) -> int:
    try:
        return prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    except RuntimeError:  # an operator that does not broadcast
        return sum(tensor.numel() for tensor in tensors)


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


class _UncheckedAdapter:
    """A model's adapter without the checks that compare values."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def preflight(self, *_: Any, **__: Any) -> None: ...

    def preflight_gradients(self, *_: Any) -> None: ...

    def preflight_media(self, *_: Any) -> None: ...


class _WithoutValues(FSDPEngine):
    """A mixin that comes before a model engine's class: its step without reading a value."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.adapter: Any = _UncheckedAdapter(self.adapter)
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


def check_engine(engine_class: type[Any], build: Callable[[type[Any]], object]) -> None:
    """Let `build` make and initialize an engine, which raises what a training would raise at its start."""
    build(type(f"Checked{engine_class.__name__}", (_WithoutParameters, engine_class), {}))


def simulated_step(
    engine_class: type[Any],
    build: Callable[[type[Any]], Any],
    step: Callable[[Any], object],
    codes: dict[int, int] | None = None,
) -> tuple[Any, ShapesOnly]:
    """An engine that `build` makes and initializes, after one `step(engine)`; and the collectives of the step.

    Ranks of later pipeline stages need the `codes` that the stages before them left there.
    """
    kind = type(f"Simulated{engine_class.__name__}", (_WithoutValues, engine_class), {})
    engine = build(kind)
    recorder = ShapesOnly(engine.fake, engine.world.rank, {} if codes is None else codes)
    with recorder:
        step(engine)
    return engine, recorder
