"""ModelEngine: one model on one parallel layout. This file is the whole API; `registry.py` finds implementations.

A *backend* is a way to run a model on hardware (`fsdp`): it implements every abstract method. A *model type* is what
the model outputs (`language_model`, `value_model`): it is a backend's class with a `build_model`. Trainers and workers
depend on neither; they call `engine_class(model_type, backend)` and use what is declared here.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mvp_engine.checkpoint.format import publish_leftover
from mvp_engine.checkpoint.state import SavedState, save
from mvp_engine.config.schema import CHECKPOINTING_MODES, Config, Experts
from mvp_engine.data.batch import PackedBatch
from mvp_engine.data.step_plan import StepPlan
from mvp_engine.distributed import Layout
from mvp_engine.errors import UserError
from mvp_engine.model_engine.ema import WeightEMA

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
    offload: str = "none"  # to host memory outside of train_mode: none, optimizer, all
    trainable_only: bool | None = None  # checkpoints without frozen weights; None: only with LoRA
    experts: Experts = field(default_factory=Experts)  # how experts are balanced

    def __post_init__(self) -> None:
        checkpointing = self.activation_checkpointing
        by_part = isinstance(checkpointing, Mapping)
        self._check("precision", [self.precision], tuple(DTYPES))
        self._check("offload", [self.offload], ("none", "optimizer", "all"))
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
            clip_grad_norm=config.loop.clip_grad_norm,
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
    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        """Offload to host memory ("cpu") or load back ("cuda"), to free the GPU's memory in between."""

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
    def optimizer_step(self) -> StepNumbers:
        """Divide by the weight accumulated since `optimizer_zero_grad`, clip, update; or skip a non-finite step.

        All ranks update or skip together.
        """

    @abc.abstractmethod
    def lr_scheduler_step(self) -> None: ...

    def train_batch(
        self,
        micro_batches: list[Any],
        forward_step: ForwardStep,
        plan: StepPlan | None = None,
        mark: Callable[[str], None] | None = None,
    ) -> StepNumbers:
        """One optimizer step over this rank's micro-batches (a rank may have none).

        `mark` is called with "optimizer" after the last backward, by those who time it.
        """
        self.optimizer_zero_grad()
        self.forward_backward_batch(micro_batches, forward_step, plan)
        if mark:
            mark("optimizer")
        return self.optimizer_step()

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
        """Write what `mvp merge` needs to know into a checkpoint, if the model can be merged."""

    @abc.abstractmethod
    def export_hf(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a complete Hugging Face folder. All ranks call it, each writes its share of the files."""

    @abc.abstractmethod
    def get_per_tensor_param(
        self, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight as (Hugging Face name, full tensor). All ranks iterate together."""

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
