"""One rank of a job that need not exist: the engine's own code on torch's fake process group, without values.

Parameters are fake tensors, which have shapes and no memory. Small integer tensors, such as the boundaries of packed
sequences, keep their values: code on the host reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from mvp_engine.distributed import World
from mvp_engine.errors import UserError
from mvp_engine.model_engine.fsdp.engine import FSDPEngine
from mvp_engine.model_engine.fsdp.init_weights import allocate
from mvp_engine.tools.plan.record import CollectiveRecorder


class FakeWorld(World):
    """A rank among `size`, in this process alone. A host collective answers as if all ranks said the same."""

    host_calls: int = 0  # host collectives since the last reset

    def broadcast(self, value: Any, source: int = 0) -> Any:
        self.host_calls += 1
        return value

    def all_gather(self, value: Any) -> list[Any]:
        self.host_calls += 1
        return [value] * self.size

    def any(self, *flags: bool) -> list[bool]:
        self.host_calls += 1
        return list(flags)

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
    """A context for a step on fake tensors: operators on known integers run, others only compute shapes."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake

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
        if _has_known_values(func, args, kwargs):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func is torch.ops.aten._grouped_mm.default:  # its shape function accepts bfloat16 only
            low = tree_map_only(FakeTensor, _as_bfloat16, (args, kwargs))
            return func(*low[0], **low[1]).to(args[0].dtype)
        return func(*args, **kwargs)


def _as_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def _has_known_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Integers and flags that do not depend on a parameter or an activation."""
    if func.namespace != "aten":
        return False
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if tensors:
        return all(
            type(one) is Tensor and one.is_cpu and not one.is_floating_point() for one in tensors
        ) and not _makes_floats(kwargs)
    device = torch.device(kwargs.get("device") or "cpu")
    dtype = kwargs.get("dtype")
    if dtype is None:
        numbers = tree_leaves(args)
        is_range = func.overloadpacket is torch.ops.aten.arange
        return is_range and device.type == "cpu" and all(type(one) is int for one in numbers)
    return device.type == "cpu" and not dtype.is_floating_point


def _makes_floats(kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    return dtype is not None and dtype.is_floating_point


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

    def _materialize(self, skeleton: nn.Module) -> None:
        with self.fake:
            allocate(self.model, self.world.device)

    def _prepare_training(self) -> None:
        with self.fake:
            super()._prepare_training()

    def _update(self, code: Tensor, loss: Tensor) -> None:
        self.optimizer.step()  # whether a step is skipped depends on values


def simulated_step(
    engine_class: type[Any],
    build: Callable[[type[Any]], Any],
    step: Callable[[Any], object],
) -> tuple[Any, ShapesOnly]:
    """An engine that `build` makes and initializes, after one `step(engine)`; and the collectives of the step."""
    kind = type(f"Simulated{engine_class.__name__}", (_WithoutValues, engine_class), {})
    engine = build(kind)
    recorder = ShapesOnly(engine.fake)
    with recorder:
        step(engine)
    return engine, recorder
