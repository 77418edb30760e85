"""ModelEngine: one model on one parallel layout. This file is the whole API, and the registry of implementations.

A *backend* is a way to run a model on hardware (`fsdp`): it implements every abstract method. A *model type* is what
the model outputs (`language_model`, `value_model`): it is a backend's class with a `build_model`. Trainers and workers
depend on neither; they call `engine_class(model_type, backend)` and use what is declared here.

An exponential moving average (EMA) of the weights, whatever the optimizer.

An optimizer may keep it itself, as one more state of each parameter, and then has a context `averaged()`: that of the
optimizer kit does. For any other optimizer the model engine keeps it. Both are saved under the same names.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mvp_engine import plugins
from mvp_engine.checkpoint.format import Reader, publish_leftover
from mvp_engine.checkpoint.state import SavedState, ema_name, save
from mvp_engine.config.schema import CHECKPOINTING_MODES, Config, Experts
from mvp_engine.data.batch import PackedBatch
from mvp_engine.data.loader import StepPlan
from mvp_engine.distributed import Layout
from mvp_engine.distributed.dtensor import full_tensor, local_shards, local_tensor
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.hf.lora.lora_export import adapter_config, adapter_tensors
from mvp_engine.hf.lora.lora_layers import adapters_off
from mvp_engine.hf.weights.pretrained import Delta, Deltas


class WeightEMA:
    """The EMA of parameters, updated with each optimizer step that is not skipped."""

    def __init__(self, params: Iterable[Tensor], decay: float, device: torch.device) -> None:
        self.params = list(params)
        self.decay = decay
        self.averages: dict[Tensor, Tensor] = {}  # by parameter, in float32 and in its layout
        self.steps = torch.zeros((), dtype=torch.float32, device=device)  # that were not skipped
        self._is_swapped_in = False

    def before_step(self) -> None:
        """The average of a parameter starts at its value before the first step."""
        if self._is_swapped_in:
            raise RuntimeError(
                "the EMA weights are swapped in: leave averaged() before the next step"
            )
        for param in self.params:
            if param not in self.averages:
                self.averages[param] = param.detach().to(torch.float32, copy=True)

    @torch.no_grad()
    def after_step(self, found_inf: Tensor | None) -> None:
        self.steps += 1 if found_inf is None else 1 - found_inf
        for param, average in self.averages.items():
            local = local_tensor(average)
            update_ema_(local_tensor(param), local, self.steps, self.decay, found_inf)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model has the EMA weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        swap_ema_(self.averages)
        self._is_swapped_in = not self._is_swapped_in


def update_ema_(
    weight: Tensor, ema: Tensor, step: Tensor, decay: float, found_inf: Tensor | None
) -> None:
    """Move the EMA towards the weights of this rank, unless the step is skipped.

    The decay of the first steps is smaller, so that the initial weights leave the average: after ten steps with a
    decay of 0.999 they would still be 99 % of it; with the smaller decay they are less than 0.01 %.
    """
    early_decay = (1 + step) / (10 + step)
    share = 1 - early_decay.clamp(max=decay)
    if found_inf is not None:
        share = share * (1 - found_inf)
    difference = weight - ema
    ema.add_(difference.mul_(share))


@torch.no_grad()
def swap_ema_(averages: Mapping[Tensor, Tensor]) -> None:
    """Swap the values of each parameter and its EMA, in place."""
    for param, average in averages.items():
        weight = local_tensor(param)
        ema = local_tensor(average)
        previous = weight.clone()
        weight.copy_(ema)
        ema.copy_(previous)


def eval_weights(
    model_engine: ModelEngine, decay: float | None, checkpoint: Path | None
) -> AbstractContextManager[None]:
    """A context in which the model has the weights to evaluate and to export: with a `decay`, the EMA weights.

    In training they are swapped in for the context. A model engine without an optimizer loads them from the checkpoint
    at the first call, and keeps them.
    """
    if decay is None:
        return nullcontext()
    if hasattr(model_engine, "optimizer"):
        return model_engine.averaged()
    if not model_engine.has_ema_weights and checkpoint is not None:
        _load_ema_weights(model_engine, checkpoint)
        model_engine.has_ema_weights = True
    return nullcontext()


def _load_ema_weights(model_engine: ModelEngine, checkpoint: Path) -> None:
    with raise_on_all_ranks(model_engine.world.host_group):
        reader = Reader(checkpoint)
        averages: dict[str, Tensor] = {}
        for name, param in model_engine.model.named_parameters():
            if ema_name(name) in reader.entries:  # frozen parameters have none
                averages[ema_name(name)] = param.detach()
        if not averages:
            raise UserError(
                f"checkpoint {checkpoint} has no EMA weights: it was trained without optim.ema"
            )
        reader.fill(averages)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ForwardStep = Callable[[Any], tuple[Tensor, Tensor | float]]


@dataclass(frozen=True)
class Settings:
    """How a model engine runs its model: the settings that engine, `mvp check` and `mvp plan` share."""

    precision: str = "fp32"  # of the computation; master weights and gradient sums stay float32
    clip_grad_norm: float | None = None
    ema: float | None = None  # the decay of an EMA of the weights
    spike_sigmas: float | None = None  # skip a step with a loss so many deviations above the others
    seed: int = 0  # of randomly initialized weights
    freeze: tuple[str, ...] = ()  # parts, or patterns of parameter names
    activation_checkpointing: str | Mapping[Any, str] = "none"  # a mode; or modes by part
    compile: str | Mapping[Any, str | None] | None = None  # torch.compile backend, auto; or by part
    fp8: Any = False  # linear layers and experts in FP8; all: weight gradients too; or by part
    quantize: Mapping[Any, str] = field(default_factory=dict)  # nf4 by part; needs LoRA
    offload_outside_steps: str = (
        "none"  # to host memory outside of train_mode: none, optimizer, all
    )
    trainable_only: bool | None = None  # checkpoints without frozen weights; None: only with LoRA
    experts: Experts = field(default_factory=Experts)  # how experts are balanced

    def __post_init__(self) -> None:
        checkpointing = self.activation_checkpointing
        by_part = isinstance(checkpointing, Mapping)
        self._check("precision", [self.precision], tuple(DTYPES))
        self._check(
            "offload_outside_steps", [self.offload_outside_steps], ("none", "optimizer", "all")
        )
        modes = checkpointing.values() if by_part else [checkpointing]  # type: ignore[union-attr]
        if checkpointing == "auto":
            raise UserError(
                "model.activation_checkpointing=auto is a choice of MLLMEngine and its subclasses for training: set "
                f"one of {', '.join(CHECKPOINTING_MODES)}"
            )
        self._check("activation_checkpointing", modes, CHECKPOINTING_MODES)
        fp8 = self.fp8.values() if isinstance(self.fp8, Mapping) else [self.fp8]
        self._check("fp8", fp8, (False, True, "all"))

    @staticmethod
    def _check(key: str, values: Iterable[Any], known: tuple[Any, ...]) -> None:
        wrong = [value for value in values if value not in known]
        if wrong:
            raise UserError(f"Settings: {key}={wrong[0]!r} is none of {', '.join(map(str, known))}")

    @classmethod
    def from_config(cls, config: Config, precision: str, **more: Any) -> Self:
        """The settings of a config, for a precision that is not "auto"; `more` are fields of a subclass."""
        names = {field.name for field in dataclasses.fields(Settings)}
        from_model = {name: value for name, value in config.model if name in names}
        return cls(
            **{**from_model, "freeze": tuple(config.model.freeze)},
            precision=precision,
            clip_grad_norm=config.optim.max_grad_norm,
            spike_sigmas=config.guard.spike_sigmas,
            ema=config.optim.ema,
            seed=config.seed,
            trainable_only=config.checkpoint.trainable_only,
            experts=config.experts,
            **more,
        )


def precision_on(device: torch.device, wanted: str) -> str:
    """The precision that "auto" stands for: bf16 on a GPU that has it, fp32 elsewhere."""
    if wanted != "auto":
        return wanted
    on_gpu = device.type == "cuda"
    return "bf16" if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


@dataclass(frozen=True)
class ModelSource:
    """Where a Hugging Face model comes from: a folder, a folder with changes to its config, or a config alone."""

    path: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepNumbers:
    """Results of one step, still on the device. Loss and weight are this rank's; the norm is the global one."""

    loss_sum: Tensor
    weight: Tensor
    grad_norm: Tensor
    # bool; the loss of a skipped step counts nowhere. An fp16 overflow is not skipped here.
    skipped: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # of all ranks, equal on each


@dataclass(frozen=True)
class StepStatus:
    """How a step ended. `reason` says why it was skipped, and is None if the weights were updated."""

    reason: str | None
    overflow: bool = False  # fp16 only: the loss scale was too high, which is routine
    loss: float | None = None  # the mean over all ranks
    micro_batches: tuple[int, ...] = ()  # those of this rank with a non-finite loss or weight


Shard = tuple[tuple[int, ...], Tensor]  # offset in the full tensor, and values


class ModelEngine(abc.ABC):
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    ema: WeightEMA | None = None  # unless the optimizer keeps it itself
    has_ema_weights = False  # True: those of the checkpoint, in an engine without an optimizer
    is_dummy = False  # True while `forward_step` runs on a dummy batch: its loss does not count

    def __init__(self, model: nn.Module, layout: Layout, settings: Settings | None = None) -> None:
        self.model = model
        self.layout = layout
        self.world = layout.world
        self.settings = settings or Settings()
        self.learning_rates: dict[str, float] = {}  # of the last update
        self._deltas = Deltas()

    @staticmethod
    def check_packages() -> None:
        """Raise an error if a package of this backend is missing; called before data is read."""
        return

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer: parameters by learning rate and weight decay."""
        return self.optimizer.param_groups

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
        """Parallelize the model and give it weights; then build optimizer and learning-rate schedule.

        Without a schedule the learning rates stay constant; without an optimizer the engine is for inference only.
        """

    @abc.abstractmethod
    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = False
    ) -> None:
        """Offload to host memory ("cpu") or load back ("cuda"), to free the GPU's memory in between.

        `grad`: gradients go with the weights, so that their step can continue afterwards; else they are dropped.
        """

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether weights are in host memory outside of `train_mode` and `eval_mode`."""
        return self.settings.offload_outside_steps == "all"

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether optimizer states are in host memory outside of `train_mode`."""
        return self.settings.offload_outside_steps != "none"

    # ---- A step ---------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """A context in which model and optimizer are loaded for training."""

    @abc.abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """A context for inference: no gradients, no dropout, the model loaded."""

    def autocast(self) -> AbstractContextManager[Any]:
        """A context that computes in the precision of the training."""
        return nullcontext()

    @abc.abstractmethod
    def optimizer_zero_grad(self) -> None: ...

    @abc.abstractmethod
    def forward_backward_batch(
        self, micro_batches: list[Any], forward_step: ForwardStep, plan: StepPlan | None = None
    ) -> Tensor:
        """Accumulate the gradients of the summed loss; returns this rank's [loss_sum, weight], on the device.

        May be called several times before `optimizer_step`, equally often on all ranks. Ranks may have different
        numbers of micro-batches; a `plan` says what each rank holds; without it they communicate.
        """

    @abc.abstractmethod
    def optimizer_step(self, lr: float | None = None) -> StepNumbers:
        """Divide by the weight accumulated since `optimizer_zero_grad`, clip, update; or skip a non-finite step.

        All ranks update or skip together. `lr` is the learning rate of this step in place of the schedule's, which
        advances all the same; where groups have their own, it is the highest one, and they keep their ratios.
        """

    @abc.abstractmethod
    def lr_scheduler_step(self) -> None: ...

    def train_batch(
        self,
        micro_batches: list[Any],
        forward_step: ForwardStep,
        plan: StepPlan | None = None,
        mark: Callable[[str], None] | None = None,
        lr: float | None = None,
    ) -> StepNumbers:
        """One optimizer step over this rank's micro-batches (a rank may have none); `lr` as of `optimizer_step`.

        `mark` is called with "optimizer" after the last backward, by those who time it.
        """
        self.optimizer_zero_grad()
        self.forward_backward_batch(micro_batches, forward_step, plan)
        if mark:
            mark("optimizer")
        return self.optimizer_step(lr)

    @abc.abstractmethod
    def step_status(self, wait: bool = True) -> list[StepStatus]:
        """How the steps since the last call ended, in order.

        With `wait` the last step is included, which waits for the GPU. Otherwise it may follow in a later call.
        """

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model has the EMA of its weights, for an evaluation or an export."""
        keeper: Any = self.ema or self.optimizer
        if not hasattr(keeper, "averaged"):
            raise UserError(
                f"no EMA of the weights is kept: set optim.ema, such as 0.999, on a backend that keeps it; "
                f"{type(self).__name__} with {type(keeper).__name__} does not"
            )
        context: AbstractContextManager[None] = keeper.averaged()
        return context

    @abc.abstractmethod
    def infer_micro_batches(
        self, micro_batches: Iterable[Any], step: Callable[[Any], Any]
    ) -> Iterator[Any]:
        """Yield the result of `step` for each micro-batch of this rank, on the device and in the training precision.

        Call it inside `eval_mode`, on all ranks, and iterate to the end.
        """

    @abc.abstractmethod
    def infer_batch(
        self,
        batch: PackedBatch,
        outputs: Iterable[str],
        budget: int | None = None,
        temperature: float | None = None,
    ) -> dict[str, Tensor]:
        """Per-token outputs by name for a packed batch, in its order; at most `budget` tokens in a forward.

        `temperature`: of the sampling whose log-probs are asked for; see `LanguageModel`.
        """

    # ---- State ----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Small state besides weights and optimizer states."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @abc.abstractmethod
    def collect(self, shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Tensor]:
        """What this rank writes into a checkpoint: its shards, and small state of the caller."""

    @abc.abstractmethod
    def restore(self, folder: Path) -> SavedState:
        """Load weights, optimizer states and schedule from a checkpoint of any layout; returns the caller's state."""

    def save_checkpoint(self, folder: str | Path) -> None:
        """Save weights, optimizer and schedule. All ranks call it; the folder appears when it is complete.

        It replaces an older checkpoint, but no other folder.
        """
        tensors = self.collect({}, {})
        save(Path(folder).expanduser().resolve(), tensors, self.world, self.describe)

    def load_checkpoint(self, folder: str | Path) -> None:
        """Load what `save_checkpoint`, or a training, saved on any layout; without an optimizer, the weights."""
        path = Path(folder).expanduser().resolve()
        if self.world.is_main:
            publish_leftover(path)
        self.world.barrier()
        self.restore(path)

    @abc.abstractmethod
    def describe(self, folder: Path) -> None:
        """Write what `mvp export` needs to know into a checkpoint, if the model can be merged."""

    @abc.abstractmethod
    def export_hf(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a complete Hugging Face folder. All ranks call it, each writes its share of the files."""

    @abc.abstractmethod
    def get_per_tensor_param(
        self, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight as (Hugging Face name, full tensor). All ranks iterate together."""

    def get_per_tensor_param_shard(self) -> Iterator[tuple[str, torch.Size, list[Shard]]]:
        """Yield (name, shape, this rank's shards) of each parameter, as checkpoints have them; no collective.

        A shard is (offset in the full tensor, its values). Names are those of the model, adapters are separate.
        """
        for name, param in self.model.named_parameters():
            yield name, param.shape, local_shards(param)

    def get_per_tensor_param_delta(self, dtype: torch.dtype | None = None) -> Iterator[Delta]:
        """Yield what has changed of `get_per_tensor_param` since the last call, bit by bit; first everything.

        Each rank compares and yields its share of the elements, and keeps their values in host memory: one copy of the
        weights over all ranks. All ranks iterate together, to the end. `applied_delta` puts the shares together.
        """
        return self._deltas.of(self.get_per_tensor_param(dtype), self.world.rank, self.world.size)

    # ---- Adapters -------------------------------------------------------------------------------------------------

    def disable_adapter(self) -> AbstractContextManager[None]:
        """A context in which the model computes what it did without its LoRA adapters."""
        return adapters_off(self.model)

    @property
    def peft_config(self) -> dict[str, Any] | None:
        """The adapter_config.json of the LoRA adapters; None without any."""
        return None if getattr(self.model, "lora", None) is None else adapter_config(self.model)

    def get_adapter_param(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the LoRA adapters alone, as (peft's name, full tensor). All ranks iterate together."""
        params = dict(self.model.named_parameters())
        return adapter_tensors(self.model, lambda name: full_tensor(params[name].detach()))

    # ---- Ranks ----------------------------------------------------------------------------------------------------

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
        """Among the ranks that work on the same data: is this the one to collect outputs from?"""
        return self.layout.is_mp_src_rank


_REGISTRY: dict[tuple[str, str], type[ModelEngine]] = {}


def register(model_type: str, backend: str) -> Callable[[type[ModelEngine]], type[ModelEngine]]:
    """A class decorator: registers the model engine for a model type on a backend."""

    def add(engine: type[ModelEngine]) -> type[ModelEngine]:
        key = f"({model_type}, {backend})"
        if not (isinstance(engine, type) and issubclass(engine, ModelEngine)):
            raise TypeError(f"{key}: {engine!r} is no class that derives from ModelEngine")
        if missing := sorted(engine.__abstractmethods__):
            raise TypeError(f"{key}: {engine.__qualname__} lacks {', '.join(missing)}")
        known = _REGISTRY.setdefault((model_type, backend), engine)
        if _identity(known) != _identity(engine):
            raise ValueError(f"{key} is {known.__qualname__} already")
        _REGISTRY[model_type, backend] = engine  # the same class, if its file was loaded again
        return engine

    return add


def _identity(engine: type[ModelEngine]) -> tuple[str, str]:
    return engine.__module__, engine.__qualname__


def is_registered(model_type: str, backend: str = "fsdp") -> bool:
    return (model_type, backend) in _REGISTRY or _plugin(model_type, backend) in _plugins()


def model_types() -> set[str]:
    """Model types with an engine on any backend."""
    return {model_type for model_type, _ in _names()}


def engine_class(model_type: str, backend: str = "fsdp") -> type[ModelEngine]:
    """The model engine that is registered, or an error that lists those that are."""
    key = model_type, backend
    if key not in _REGISTRY:
        engine = plugins.load("model_engine", _plugin(*key))
        if engine is None:
            raise _unknown(*key)
        register(*key)(engine)
    return _REGISTRY[key]


def _unknown(model_type: str, backend: str) -> UserError:
    names = _names()
    known = ", ".join(f"{t} on {b}" for t, b in sorted(names))
    backends = {b for t, b in names if t == model_type}
    hint = (
        did_you_mean(backend, backends)
        if backends
        else did_you_mean(model_type, {t for t, _ in names})
    )
    return UserError(
        f"model.type={model_type} on model.backend={backend} is not registered.{hint} Registered: {known}."
    )


def _names() -> set[tuple[str, str]]:
    of_plugins = [name.partition(".") for name in _plugins()]
    return {*_REGISTRY, *((model_type, backend) for model_type, _, backend in of_plugins)}


def _plugins() -> dict[str, str]:
    return plugins.names("model_engine")


def _plugin(model_type: str, backend: str) -> str:
    return f"{model_type}.{backend}"
