"""The engine: what happens when. A recipe subclasses it and says what.

    train = before_train -> do_train -> after_train

and one step of `do_train` is: take micro-batches, `train_pre_step`, forward and backward and update (the model engine),
`train_post_step`, log, evaluate, save. Hooks are the public methods below "What a recipe brings".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from mvp_engine.checkpoint import CheckpointManager
from mvp_engine.config.schema import Config
from mvp_engine.data import (
    SampleLoader,
    accumulation_steps,
    derived_seed,
    rng_state,
    seed_everything,
    set_rng_state,
)
from mvp_engine.distributed import Layout, World
from mvp_engine.engine.context import StepContext
from mvp_engine.engine.feed import Feed
from mvp_engine.engine.guard import SkipGuard
from mvp_engine.engine.meter import Meter
from mvp_engine.engine.resume import record_config
from mvp_engine.engine.state import collect_state, restore_state
from mvp_engine.errors import Interrupted, UserError
from mvp_engine.hf.parts import table
from mvp_engine.log import LogHub, MetricStore
from mvp_engine.log.backends import RunInfo
from mvp_engine.model_engine import (
    ModelEngine,
    ModelSource,
    Settings,
    StepNumbers,
    engine_class,
    precision_on,
)
from mvp_engine.model_engine.optim import build_optimizer, build_scheduler
from mvp_engine.process.signals import StopSignals
from mvp_engine.runs import Run


class Engine:
    config_class: type[Config] = Config

    def __init__(
        self,
        config: Config,
        world: World,
        run: Run,
        checkpoint: Path | None = None,
        greeting: str = "",
    ) -> None:
        self.config, self.world, self.run, self.checkpoint = config, world, run, checkpoint
        self.greeting = (
            greeting  # how this launch came to its run and checkpoint; the first line of the log
        )
        self.device = world.device
        self.layout = Layout.of(world, config.parallel)
        self.logger = logging.getLogger("mvp_engine")
        self.step = 0  # optimizer steps made
        self.epoch = 0  # passes over the data, the current one not counted
        self.total_steps: int | None = None
        self.best: dict[str, Any] | None = None  # the best evaluation: metric, value, step
        self.metrics = self._metric_store()
        self.saved_at = (
            self.evaluated_at
        ) = -1  # the steps of the last checkpoint and the last evaluation
        self._stopped = False
        self._training = False
        self._eval_loader: Iterable[Any] | None = None
        self._closing = ExitStack()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: Any) -> None:
        """However it ended: finish the checkpoint under way, then close the log."""
        self._closing.__exit__(*error)

    # ---- What a recipe brings -------------------------------------------------------------------------------------

    def prepare_model(self) -> nn.Module:
        """By default the Hugging Face model that `config.model` describes."""
        model = self.config.model
        if model.type == "module":
            raise UserError(
                f"{type(self).__name__} must define prepare_model(), or the config name a model.type and a model.path"
            )
        return engine_class(model.type, model.backend).build_model(
            ModelSource(model.path, model.config)
        )

    def prepare_dataloader(self, split: str) -> Iterable[Any] | None:
        """An iterable of micro-batches for "train" or "eval", one epoch an iteration."""
        raise NotImplementedError(f"{type(self).__name__} must define prepare_dataloader(split)")

    def forward_step(self, ctx: StepContext, micro_batch: Any) -> tuple[Tensor, Tensor | float]:
        """The loss *summed* over the micro-batch, and its weight (valid tokens, samples, ...). Never a mean."""
        raise NotImplementedError(
            f"{type(self).__name__} must define forward_step(ctx, micro_batch)"
        )

    def prepare_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(model, self.config.optim)

    def prepare_scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return build_scheduler(optimizer, self.config.optim, self.total_steps)

    def train_pre_step(self, ctx: StepContext) -> None:
        """Before the step; may change `ctx.micro_batches`."""

    def train_post_step(self, ctx: StepContext) -> None:
        """After the step; may set `ctx.stop`."""

    def eval_step(self, ctx: StepContext, micro_batch: Any) -> None:
        """One micro-batch of an evaluation; by default the loss of `forward_step`. Log more with `ctx.log`."""
        loss_sum, weight = self.forward_step(ctx, micro_batch)
        ctx.log("loss", loss_sum, weight)

    def eval_end(self, ctx: StepContext) -> None:
        """After the last micro-batch of an evaluation, on all ranks together: metrics that need them all."""

    def extra_state(self) -> dict[str, Any]:
        """State of the recipe's own for the checkpoint: tensors, numbers, strings, lists and dicts of them."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take back what `extra_state` gave."""

    def sample_loader(
        self,
        dataset: Dataset[Any],
        split: str,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> SampleLoader:
        """A loader over a map-style dataset, with the batch sizes, ranks, workers and seed of the config."""
        data, training = self.config.data, split == "train"
        return SampleLoader(
            dataset,
            micro_batch_size=data.micro_batch_size,
            global_batch_size=self.global_batch_size if training else None,
            rank=self.layout.data_rank,
            world_size=self.layout.data_size,
            seed=self.config.seed,
            shuffle=training,
            collate_fn=collate_fn,
            num_workers=data.num_workers,
            pin_memory=self.device.type == "cuda",
        )

    # ---- Workflows ------------------------------------------------------------------------------------------------

    def train(self) -> None:
        message = "finishing this step, then saving. Ctrl-C once more leaves at once."
        with StopSignals(message) as self.signals:
            self.before_train()
            with self.model_engine.train_mode():
                self.do_train()
                self.after_train()

    def evaluate(self) -> dict[str, float | None]:
        """Evaluate on the "eval" split: inside a training, or as a workflow on the checkpoint that `resume` names."""
        if not self._training:
            self.before_evaluate()
        return self._evaluate()

    # ---- Training -------------------------------------------------------------------------------------------------

    def before_train(self) -> None:
        """Data, model, optimizer, and where the run left off."""
        config = self.config
        if config.loop.total_steps is None and config.loop.epochs is None:
            raise UserError("how long to train? Set loop.total_steps or loop.epochs")
        self._training = True
        accumulation = accumulation_steps(
            self.global_batch_size, config.data.micro_batch_size, self.layout.data_size
        )
        self.feed = self._closing.enter_context(
            closing(Feed(self._loader("train"), accumulation, self.world))
        )
        self.total_steps = self._planned_steps()
        self.model_engine = self._build_model_engine()
        self.model_engine.initialize(self.prepare_optimizer, self.prepare_scheduler)
        self.guard = SkipGuard(config.guard, self.run.dir, self.world.rank)
        self.meter = Meter(self.world, self.global_batch_size)
        seed_everything(derived_seed(config.seed, "rank", self.layout.dropout_rank))
        if self.checkpoint:
            restore_state(self, self.checkpoint)
        self._open_log()
        if self.world.is_main:
            self.model_engine.describe(self.run.dir / "hf")
        manager = CheckpointManager(
            self.run.checkpoints, config.checkpoint, self.world, self.run.dir / "hf"
        )
        self.checkpoints = self._closing.enter_context(manager)
        if self.best and self.best["step"] <= self.step:
            manager.mark_best(self.best["step"])
        self.logger.info("run %s: %s", self.run.dir, self._summary(accumulation))
        if parts := table(self.model, self.model_engine.optimizer):
            self.logger.info("what trains:\n%s", parts)
        if self.done:
            self.logger.info(
                "nothing left to do: raise loop.total_steps or loop.epochs to train on"
            )

    def do_train(self) -> None:
        while not self.done:
            micro_batches = self.feed.take()
            if not any(self.world.any(bool(micro_batches))):
                self._settle()
                self.feed.next_epoch()
                self.epoch = self.feed.epoch
                continue
            ctx = StepContext(self.step + 1, self.epoch, "train", self.metrics, micro_batches)
            self.guard.watch(ctx.step, self.feed.advance(len(micro_batches)))
            self.train_pre_step(ctx)
            aside = replace(
                ctx, metrics=self._metric_store(), counts=False
            )  # for passes that do not count
            step, beside = partial(self.forward_step, ctx), partial(self.forward_step, aside)
            ctx.numbers = self.model_engine.train_batch(ctx.micro_batches, step, beside)
            self.step = ctx.step
            self.train_post_step(ctx)
            self._after_step(ctx, ctx.numbers)

    def after_train(self) -> None:
        self._settle()
        # Left to do only if the end came as a surprise, with a loader of unknown length. A checkpoint of this step
        # would not know of it, and is written again.
        if any(self.world.any(not self.metrics.empty)):
            self._log_interval()
            self.saved_at = -1
        if self.config.loop.eval_interval and self.evaluated_at != self.step:
            self._evaluate_and_track()
            self.saved_at = -1
        self._save_surely()
        self.logger.info("finished at step %d; everything is in %s", self.step, self.run.dir)

    @property
    def done(self) -> bool:
        loop = self.config.loop
        by_steps = loop.total_steps is not None and self.step >= loop.total_steps
        return self._stopped or by_steps or (loop.epochs is not None and self.epoch >= loop.epochs)

    @property
    def global_batch_size(self) -> int:
        return (
            self.config.data.global_batch_size
            or self.config.data.micro_batch_size * self.layout.data_size
        )

    def save(self) -> None:
        """Write a checkpoint of this moment in the background, unless there is one already."""
        if self.saved_at != self.step:
            self._settle()
            self.saved_at = self.step
            tensors = collect_state(self)
            self.checkpoints.save(self.step, tensors, {"epoch": self.epoch, "best": self.best})
        if self.best and self.best["step"] == self.step:
            self.checkpoints.mark_best(self.step)

    def _save_surely(self) -> None:
        """Save and wait; a write that failed is tried once more, and then is an error."""
        for _ in range(2):
            self.save()
            self.checkpoints.wait()
            if not self.world.any(self.checkpoints.failed)[0]:
                return
            self.saved_at = -1
        raise UserError(
            f"the state at step {self.step} could not be saved in {self.run.checkpoints}: the log says why. "
            "Older checkpoints are whole; resume=auto goes on from the newest."
        )

    # ---- Inside ---------------------------------------------------------------------------------------------------

    def _after_step(self, ctx: StepContext, numbers: StepNumbers) -> None:
        config = self.config
        self.metrics.add("loss", numbers.loss_sum, numbers.weight)
        if (
            self.world.is_main
        ):  # it is the same on all ranks, and a step counts once, however many they are
            self.metrics.add("grad_norm", numbers.grad_norm)
        self.guard.take(self.model_engine.take_outcomes(), self.feed)
        self.meter.steps += 1
        asked, self._stopped = self.world.any(self.signals.requested is not None, ctx.stop)
        last = self.done or self.step == self.total_steps
        if self.step % config.log.interval == 0 or last:
            self._log_interval()
        best = False
        if config.loop.eval_interval and (self.step % config.loop.eval_interval == 0 or last):
            best = self._evaluate_and_track()
        if best or (config.checkpoint.interval and self.step % config.checkpoint.interval == 0):
            with self.meter.paused():
                self.save()
        if asked and not last:
            self.logger.warning(
                "%s: saving at step %d",
                self.signals.requested or "another rank was told to stop",
                self.step,
            )
            self._save_surely()
            raise Interrupted(
                f"stopped and saved at step {self.step}; resume=auto goes on from here"
            )

    def _log_interval(self) -> None:
        self._settle()
        partial_interval = self.metrics.resumed
        means, totals = self.metrics.reduce()
        remaining = self.total_steps - self.step if self.total_steps else None
        perf = self.meter.read(
            {} if partial_interval else totals, self.feed.take_waited(), remaining
        )
        record = {
            "step": self.step,
            "epoch": self.epoch,
            "split": "train",
            **means,
            **self.model_engine.rates,
        }
        self.hub.metrics({**record, "skipped": self.guard.total, "totals": totals, "perf": perf})

    def _evaluate(self) -> dict[str, float | None]:
        outside = rng_state()  # an evaluation leaves no trace in the training
        if self._eval_loader is None:
            self._eval_loader = self._loader("eval")
        limited = islice(self._eval_loader, self.config.loop.eval_batches)
        ctx, aside = (
            StepContext(
                self.step, self.epoch, "eval", self._metric_store(forgiving=False), counts=counts
            )
            for counts in (True, False)
        )
        batches = 0
        self.world.broadcast_from_rank0_(
            list(self.model.buffers())
        )  # running statistics: rank 0's count
        with self.model_engine.eval_mode():
            for micro_batch, counts in self.model_engine.in_step(limited):
                self.model_engine.infer_step(
                    micro_batch, partial(self.eval_step, ctx if counts else aside)
                )
                batches += counts
            self.eval_end(ctx)
        set_rng_state(outside)
        if not any(self.world.any(batches > 0)):
            raise UserError(
                "the eval loader gave no batch; check what prepare_dataloader('eval') returns"
            )
        means, _ = ctx.metrics.reduce()
        self.hub.metrics({"step": ctx.step, "epoch": ctx.epoch, "split": "eval", **means})
        return means

    def _evaluate_and_track(self) -> bool:
        """Evaluate; is it the best so far?"""
        self.evaluated_at = self.step
        with self.meter.paused():
            means = self.evaluate()
        name = self.config.checkpoint.best_metric
        if name is None:
            return False
        if name not in means:
            raise UserError(
                f"checkpoint.best_metric={name} is not among the eval metrics: {', '.join(means)}"
            )
        value, sign = means[name], 1 if self.config.checkpoint.best_mode == "max" else -1
        if value is None or (self.best is not None and sign * value <= sign * self.best["value"]):
            return False
        self.best = {"metric": name, "value": value, "step": self.step}
        return True

    def before_evaluate(self) -> None:
        """The model with the checkpoint's weights, ready for `evaluate` or for a workflow of your own."""
        self.model_engine = self._build_model_engine()
        self.model_engine.initialize()
        if self.checkpoint:
            shared = self.model_engine.restore(self.checkpoint).shared
            if "step" in shared:  # else it is of a model engine, not of a training
                self.step, self.epoch = shared["step"], shared["feed"]["epoch"]
                self.load_extra_state(shared["extra"])
        self._open_log()
        if not self.checkpoint:
            self.logger.warning("no checkpoint is loaded: the weights are those of prepare_model()")

    def _metric_store(self, forgiving: bool = True) -> MetricStore:
        return MetricStore(self.world, counts=self.layout.is_mp_src_rank, forgiving=forgiving)

    def _settle(self) -> None:
        self.model_engine.settle()
        self.guard.take(self.model_engine.take_outcomes(), self.feed)

    def _build_model_engine(self) -> ModelEngine:
        config, model = self.config, self.config.model
        kind = engine_class(model.type, model.backend)
        seed_everything(derived_seed(config.seed, "model"))
        self.model = self.prepare_model()
        settings = Settings(
            precision=precision_on(self.device, config.loop.precision),
            clip_grad_norm=config.loop.clip_grad_norm,
            spike_sigmas=config.guard.spike_sigmas,
            seed=config.seed,
            freeze=tuple(model.freeze),
            activation_checkpointing=model.activation_checkpointing,
            compile=model.compile,
            fp8=model.fp8,
            offload=model.offload,
        )
        return kind(self.model, self.layout, settings)

    def _loader(self, split: str) -> Iterable[Any]:
        seed_everything(derived_seed(self.config.seed, "data", split))
        loader = self.prepare_dataloader(split)
        if loader is None:
            raise UserError(f"prepare_dataloader({split!r}) gave None, so there is no data for it")
        return loader

    def _planned_steps(self) -> int | None:
        loop = self.config.loop
        of_ranks = self.world.all_gather(
            self.feed.steps_per_epoch
        )  # loaders may have different lengths
        per_epoch = None if None in of_ranks else max(of_ranks)
        by_epochs = (
            loop.epochs * per_epoch if loop.epochs is not None and per_epoch is not None else None
        )
        return min((n for n in (loop.total_steps, by_epochs) if n is not None), default=None)

    def _open_log(self) -> None:
        config = self.config
        info = RunInfo(
            self.run,
            config.project.name,
            config.workflow,
            config.model_dump(),
            self.step,
            self.total_steps,
        )
        self.hub = self._closing.enter_context(LogHub(info, config.log.backends, self.world.rank))
        self.logger.info("%s", self.greeting)
        if self._training and self.world.is_main:
            record_config(self.run, config.to_yaml(), self.step)

    def _summary(self, accumulation: int) -> str:
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in self.model.parameters())
        of = f" of {total:,}" if trained != total else ""
        ranks = f"{self.layout.data_size} data rank(s) x {accumulation} micro-batch(es)"
        precision = self.model_engine.settings.precision
        return (
            f"{trained:,}{of} parameters train, {precision} on {self.world.size} x {self.device.type}"
            f"; steps {self.step} to {self.total_steps or '?'}; {self.global_batch_size} samples a step = "
            f"{self.config.data.micro_batch_size} x {ranks}"
        )
