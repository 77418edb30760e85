"""The model engine: one model on one parallel layout. This page is its whole API, and the registry of those there are.

A *backend* is a way to put a model on hardware (`fsdp`): it implements every abstract method. A *model type* is what
comes out of the model (`language_model`, `value_model`): it is a backend's class with a `build_model`. Trainers and
workers know neither; they ask `engine_class(model_type, backend)` and use what is declared here.
"""

from __future__ import annotations

import abc
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mvp_engine.checkpoint.format import publish_leftover
from mvp_engine.checkpoint.state import SavedState, save
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout
from mvp_engine.errors import UserError

ForwardStep = Callable[[Any], tuple[Tensor, Tensor | float]]


@dataclass(frozen=True)
class Settings:
    """How a model engine is to run its model."""

    precision: str = (
        "fp32"  # of the computation: fp32, bf16 or fp16; weights and sums of gradients stay float32
    )
    clip_grad_norm: float | None = None
    spike_sigmas: float | None = None  # a loss so far above those before it is not learnt from
    seed: int = 0  # of weights that are not read from anywhere
    freeze: tuple[str, ...] = ()  # parts, or patterns of parameter names, that do not train
    activation_checkpointing: str | Mapping[Any, str] = (
        "none"  # none, selective or full; or one of them by part
    )
    compile: str | Mapping[Any, str | None] | None = (
        None  # a backend of torch.compile, for each block; or by part; or auto
    )
    fp8: bool | Mapping[Any, bool] = False  # products of linear layers on 8-bit floats; or by part
    offload: str = "none"  # none, optimizer or all: in host memory outside of train_mode; eval_mode has the model

    def __post_init__(self) -> None:
        modes = (
            self.activation_checkpointing.values()
            if isinstance(self.activation_checkpointing, Mapping)
            else [self.activation_checkpointing]
        )
        for key, given, known in (
            ("precision", [self.precision], ("fp32", "bf16", "fp16")),
            ("activation_checkpointing", modes, ("none", "selective", "full")),
            ("offload", [self.offload], ("none", "optimizer", "all")),
        ):
            if wrong := [value for value in given if value not in known]:
                raise UserError(f"Settings: {key}={wrong[0]!r} is none of {', '.join(known)}")


def precision_on(device: torch.device, wanted: str) -> str:
    """What `auto` means there."""
    if wanted != "auto":
        return wanted
    return (
        "bf16"
        if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        else "fp32"
    )


@dataclass(frozen=True)
class ModelSource:
    """Where a Hugging Face model comes from: a folder, settings over its config, or a config alone."""

    path: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepNumbers:
    """What one step gave, still on the device. Loss and weight are this rank's; the norm is the global one."""

    loss_sum: Tensor
    weight: Tensor
    grad_norm: Tensor


@dataclass(frozen=True)
class Outcome:
    """How a step ended. `reason` is None when the weights were updated."""

    reason: str | None
    overflow: bool = False  # fp16 only: the loss scale was too high, which is routine


class ModelEngine(abc.ABC):
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler

    def __init__(self, model: nn.Module, layout: Layout, settings: Settings | None = None) -> None:
        self.model, self.layout, self.world = model, layout, layout.world
        self.settings = settings or Settings()
        self.rates: dict[str, float] = {}  # the learning rates of the last update

    @classmethod
    def build_model(cls, source: ModelSource) -> nn.Module:
        """A model of this type, on the meta device; `initialize` gives it its weights."""
        raise UserError(
            f"{cls.__name__} has no model of its own to build: give it one (prepare_model)"
        )

    # ---- Building -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def initialize(
        self,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        """Put the model on its layout, with weights; then make optimizer and schedule.

        Without a schedule the rates stay as they are, without an optimizer the model is for inference only.
        """

    @abc.abstractmethod
    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        """Move to the host ("cpu") or back ("cuda"), so that others can use the GPU's memory in between."""

    # ---- A step ---------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """Everything is where training needs it, for the time of this context."""

    @abc.abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """No gradients, no dropout; the weights are where inference needs them, for the time of this context."""

    @abc.abstractmethod
    def optimizer_zero_grad(self) -> None: ...

    @abc.abstractmethod
    def forward_backward_batch(
        self, micro_batches: list[Any], forward_step: ForwardStep, aside: ForwardStep | None = None
    ) -> Tensor:
        """Add the gradients of the summed loss; gives this rank's [loss_sum, weight], on the device.

        May be called several times before `optimizer_step`; ranks may have different numbers of micro-batches. A rank
        with fewer may have to run along, which does not count: `aside` is what it runs then, if that is another step.
        """

    @abc.abstractmethod
    def optimizer_step(self) -> StepNumbers:
        """Divide by the weight of all that was added since `optimizer_zero_grad`, clip and update; or skip, if anything
        is not finite, on all ranks together."""

    @abc.abstractmethod
    def lr_scheduler_step(self) -> None: ...

    def train_batch(
        self, micro_batches: list[Any], forward_step: ForwardStep, aside: ForwardStep | None = None
    ) -> StepNumbers:
        """One optimizer step over this rank's micro-batches (there may be none)."""
        self.optimizer_zero_grad()
        self.forward_backward_batch(micro_batches, forward_step, aside)
        return self.optimizer_step()

    @abc.abstractmethod
    def settle(self) -> None:
        """Take in how the last step ended: the schedule moves only when the weights did."""

    @abc.abstractmethod
    def take_outcomes(self) -> list[Outcome]:
        """The outcomes, in order, of the steps that ended since this was last asked."""

    @abc.abstractmethod
    def infer_step(self, micro_batch: Any, step: Callable[[Any], Any]) -> Any:
        """`step` on one micro-batch, on the device and in the training precision; call it inside `eval_mode`."""

    @abc.abstractmethod
    def infer_batch(
        self, batch: PackedBatch, outputs: Iterable[str], budget: int | None = None
    ) -> dict[str, Tensor]:
        """Outputs by name over all tokens of a packed batch, in its order; at most `budget` tokens in a pass."""

    @abc.abstractmethod
    def in_step(self, micro_batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        """All micro-batches of all ranks, for an evaluation; each with whether it counts on this rank."""

    # ---- State ----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The small state beside weights and moments."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @abc.abstractmethod
    def collect(self, shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Tensor]:
        """What this rank writes into a checkpoint: its part of weights and moments, and small state of the caller."""

    @abc.abstractmethod
    def restore(self, folder: Path) -> SavedState:
        """Put back weights, moments and schedule from a checkpoint of any layout; gives the caller's small state."""

    def save_checkpoint(self, folder: str | Path) -> None:
        """Weights, optimizer and schedule; complete or not there. All ranks call it, each writes its part.

        A checkpoint that is there already is replaced, but no other folder is.
        """
        self.settle()
        save(Path(folder).expanduser().resolve(), self.collect({}, {}), self.world, self.describe)

    def load_checkpoint(self, folder: str | Path) -> None:
        """What `save_checkpoint`, or a training, wrote on any layout; without an optimizer, the weights of it."""
        place = Path(folder).expanduser().resolve()
        if self.world.is_main:
            publish_leftover(place)
        self.world.barrier()
        self.restore(place)

    @abc.abstractmethod
    def describe(self, folder: Path) -> None:
        """Write beside a checkpoint what `mvp merge` needs to know, if the model can be merged."""

    @abc.abstractmethod
    def export_hf(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """A complete Hugging Face folder. All ranks call it, each writes its share of the files."""

    @abc.abstractmethod
    def get_per_tensor_param(
        self, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Each weight by its Hugging Face name, whole, one after the other. All ranks iterate together."""

    # ---- Who am I -------------------------------------------------------------------------------------------------

    @property
    def data_parallel_rank(self) -> int:
        return self.layout.data_rank

    @property
    def data_parallel_size(self) -> int:
        return self.layout.data_size

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        return self.layout.data_group

    @property
    def is_mp_src_rank_with_outputs(self) -> bool:
        """Is this the rank, among those that work on the same data, whose outputs are to be collected?"""
        return self.layout.is_mp_src_rank


_REGISTRY: dict[tuple[str, str], type[ModelEngine]] = {}


def register(model_type: str, backend: str) -> Callable[[type[ModelEngine]], type[ModelEngine]]:
    """A class decorator: this is the model engine for a model type on a backend."""

    def add(engine: type[ModelEngine]) -> type[ModelEngine]:
        if not (isinstance(engine, type) and issubclass(engine, ModelEngine)):
            raise TypeError(
                f"({model_type}, {backend}): {engine!r} is no class that derives from ModelEngine"
            )
        if missing := sorted(engine.__abstractmethods__):
            raise TypeError(
                f"({model_type}, {backend}): {engine.__qualname__} lacks {', '.join(missing)}"
            )
        known = _REGISTRY.setdefault((model_type, backend), engine)
        if (known.__module__, known.__qualname__) != (engine.__module__, engine.__qualname__):
            raise ValueError(f"({model_type}, {backend}) is {known.__qualname__} already")
        _REGISTRY[model_type, backend] = engine  # the same class, if its file was loaded once more
        return engine

    return add


def is_registered(model_type: str, backend: str = "fsdp") -> bool:
    return (model_type, backend) in _REGISTRY


def engine_class(model_type: str, backend: str = "fsdp") -> type[ModelEngine]:
    """The model engine that is registered for them, or an explanation."""
    if not is_registered(model_type, backend):
        known = ", ".join(f"{t} on {b}" for t, b in sorted(_REGISTRY))
        near = difflib.get_close_matches(model_type, {t for t, _ in _REGISTRY}, 1)
        hint = f" Did you mean {near[0]}?" if near and near[0] != model_type else ""
        raise UserError(
            f"model.type={model_type} on model.backend={backend} is not known here.{hint} There are: {known}."
        )
    return _REGISTRY[model_type, backend]
