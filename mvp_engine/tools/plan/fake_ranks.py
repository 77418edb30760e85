"""One rank of a job that need not exist: the engine's own code on torch's fake process group, without values.

Parameters are fake tensors, which have shapes and no memory. Small integer tensors, such as the boundaries of packed
sequences, keep their values: code on the host reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from mvp_engine.distributed import World
from mvp_engine.errors import UserError
from mvp_engine.hf import experts
from mvp_engine.model_engine.fsdp.engine import FSDPEngine
from mvp_engine.model_engine.fsdp.init_weights import allocate
from mvp_engine.model_engine.fsdp.parallelize import freeze
from mvp_engine.model_engine.fsdp.unused_params import Places
from mvp_engine.tools.plan.record import CollectiveRecorder

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
            return slots % experts.num_experts(module)

        return tuple(map(in_turn, args)), {name: in_turn(one) for name, one in kwargs.items()}

    for module in experts.modules(model).values():
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
