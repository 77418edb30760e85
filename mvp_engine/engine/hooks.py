"""EngineHooks: the methods that a recipe defines or overrides. Their names are public API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from mvp_engine.config.schema import Config
from mvp_engine.data import SampleLoader
from mvp_engine.data.loader import StepPlan
from mvp_engine.distributed import Layout
from mvp_engine.errors import UserError
from mvp_engine.log.metrics import MetricStore
from mvp_engine.model_engine import ModelEngine, ModelSource, engine_class
from mvp_engine.model_engine.base import StepNumbers, eval_weights
from mvp_engine.model_engine.optim import build_optimizer, build_scheduler


@dataclass
class StepContext:
    """One step on its way through the hooks. Hooks may change `micro_batches` and set `stop`."""

    step: int  # counted from 1; 0 in an evaluation before any training
    epoch: int  # counted from 0
    split: str  # "train", or the split that is evaluated
    metrics: MetricStore
    micro_batches: list[Any] = field(default_factory=list)
    # What the loader planned for all ranks. A hook that changes the number of micro-batches, or their media, sets it to
    # None on all ranks; the ranks then communicate instead.
    plan: StepPlan | None = None
    numbers: StepNumbers | None = None  # set after the step
    is_dummy: bool = False  # a dummy forward that this rank runs for others: nothing of it counts
    stop: bool = False  # a hook sets it to end the training after this step (on any rank)

    def log(self, name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add to a weighted mean: `value` is a sum over `weight` items. Averaged over the interval and all ranks."""
        if not self.is_dummy:
            self.metrics.add(name, value, weight)

    def count(self, name: str, amount: Tensor | float) -> None:
        """Add to a total, such as tokens; it is logged as a rate per second too."""
        if not self.is_dummy:
            self.metrics.count(name, amount)


@dataclass(frozen=True)
class StageResult:
    """What a stage of `mvp check` found out."""

    says: str  # one line, for the terminal
    facts: dict[str, Any]  # for `--json`, under the name of the stage
    figures: list[tuple[str, str]] = field(default_factory=list)  # name and text, at the end
    warnings: list[str] = field(default_factory=list)


# A stage gets the log records of the steps of a check.
CheckStage = Callable[[list[dict[str, Any]]], StageResult]


class EngineHooks:
    config_class: type[Config] = Config
    config: Config
    device: torch.device
    layout: Layout
    model_engine: ModelEngine
    checkpoint: Path | None
    total_steps: int | None
    batch_unit = "sample"  # what `global_batch_size` counts
    # How a global batch is divided, for the log; by default among ranks and micro-batches.
    batch_division = ""
    # Config keys that say how large a step is.
    batch_size_keys: tuple[str, ...] = ("data.global_batch_size", "data.pack_tokens")
    trains_in_process = True  # False: parameters, gradients and optimizer are in other processes

    # ---- Parts ----------------------------------------------------------------------------------------------------

    def prepare_model(self) -> nn.Module:
        """The model. By default the Hugging Face model that `config.model` describes."""
        model = self.config.model
        if model.type == "module":
            raise UserError(
                f"{type(self).__name__} must define prepare_model(), or the config name a model.type and a model.path"
            )
        source = ModelSource(model.path, model.config)
        return engine_class(model.type, model.backend).build_model(source)

    def prepare_dataloader(self, split: str) -> Iterable[Any] | None:
        """An iterable of micro-batches for "train" or "eval"; one iteration is one epoch."""
        raise NotImplementedError(f"{type(self).__name__} must define prepare_dataloader(split)")

    def prepare_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(model, self.config.optim)

    def prepare_scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return build_scheduler(optimizer, self.config.optim, self.total_steps)

    # ---- A training step ------------------------------------------------------------------------------------------

    def train_pre_step(self, ctx: StepContext) -> None:
        """Before the step; may change `ctx.micro_batches`."""

    def forward_step(self, ctx: StepContext, micro_batch: Any) -> tuple[Tensor, Tensor | float]:
        """The loss *summed* over the micro-batch, and its weight (valid tokens, samples, ...). Never a mean."""
        raise NotImplementedError(
            f"{type(self).__name__} must define forward_step(ctx, micro_batch)"
        )

    def train_post_step(self, ctx: StepContext) -> None:
        """After the step; may set `ctx.stop`."""

    # ---- Evaluation -----------------------------------------------------------------------------------------------

    def eval_step(self, ctx: StepContext, micro_batch: Any) -> None:
        """One micro-batch of an evaluation; by default logs the loss of `forward_step`. Log more with `ctx.log`."""
        loss_sum, weight = self.forward_step(ctx, micro_batch)
        ctx.log("loss", loss_sum, weight)

    def eval_end(self, ctx: StepContext) -> None:
        """After the last micro-batch of an evaluation, on all ranks together: metrics that need all of them."""

    def eval_tasks(self, ctx: StepContext) -> None:
        """After `eval_end`: benchmarks of other packages, which log their scores."""

    def eval_weights(self) -> AbstractContextManager[None]:
        """A context in which the model has the weights to evaluate and to export: with `optim.ema` their EMA."""
        return eval_weights(self.model_engine, self.config.optim.ema, self.checkpoint)

    # ---- State ----------------------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        """State of the recipe for the checkpoint: tensors, numbers, strings, lists and dicts of them."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `extra_state` returned."""

    # ---- What commands ask ----------------------------------------------------------------------------------------

    def describe_layout(self) -> str:
        """The ranks that train, and their device."""
        return f"{self.layout.world.size} x {self.device.type}"

    def describe_training(self) -> dict[str, Any]:
        """What summaries and model cards say of this kind of training; it is noted in run.json.

        `method`: its name, with `{how}` in place of "LoRA" or "fine-tuning of all weights". `headline`: the metric that
        says how it went, by default the loss. `keys`: config keys for the model card, with those of the size of a step.
        `next_steps`: commands by what they do, with `{export}` in place of the newest export.
        """
        return {}

    @property
    def samples_per_step(self) -> float | None:
        """Samples that a step trains on, over all ranks; None if they vary."""
        return self.global_batch_size

    def check_stages(self) -> Mapping[str, CheckStage]:
        """More stages of `mvp check`, by name: they run after its training steps."""
        return {}

    @classmethod
    def check_command(cls, config: Any, command: str, run: Path | None, step: int) -> None:
        """Raise `UserError` if `mvp profile` or `mvp check RUN` cannot train with this config in its process.

        `run`: the folder of a run whose step is to be repeated.
        """

    # ---- For use in hooks -----------------------------------------------------------------------------------------

    @property
    def global_batch_size(self) -> int:
        """Samples in one optimizer step, over all ranks."""
        data = self.config.data
        return data.global_batch_size or data.micro_batch_size * self.layout.data_size

    def sample_loader(
        self,
        dataset: Dataset[Any],
        split: str,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool | None = None,
    ) -> SampleLoader:
        """A loader over a map-style dataset, with the batch sizes, ranks, workers and seed of the config.

        `shuffle`: by default the "train" split is shuffled in each epoch, and other splits keep their order.
        """
        is_training = split == "train"
        return SampleLoader(
            dataset,
            micro_batch_size=self.config.data.micro_batch_size,
            global_batch_size=self.global_batch_size if is_training else None,
            rank=self.layout.data_rank,
            world_size=self.layout.data_size,
            seed=self.config.seed,
            shuffle=is_training if shuffle is None else shuffle,
            collate_fn=collate_fn,
            num_workers=self.config.data.num_workers,
            pin_memory=self.device.type == "cuda",
        )
