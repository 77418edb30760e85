"""Engine: the training loop and its workflows. A recipe subclasses it and defines the hooks of `hooks.py`.

    train = before_train -> do_train -> after_train

One step of `do_train`: take micro-batches, `train_pre_step`, forward, backward and update (the model engine),
`train_post_step`, log, evaluate, save.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mvp_engine.checkpoint import CheckpointManager
from mvp_engine.config.schema import Config, Parallel, recorded_reads
from mvp_engine.data import derived_seed, rng_state, seed_everything, set_rng_state
from mvp_engine.data.loader import LimitsBatches, implements
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.world import HangWatch
from mvp_engine.engine.feed import Feed, micro_batches_per_step
from mvp_engine.engine.hooks import EngineHooks, StepContext
from mvp_engine.engine.monitor import Meter, SkipGuard
from mvp_engine.engine.state import (
    collect_state,
    record_config,
    record_setup,
    refuse_beyond_the_end,
    restart_changed_data,
    restore_state,
    with_intervals,
)
from mvp_engine.errors import Interrupted, UserError
from mvp_engine.hf.weights.hub import pin_config
from mvp_engine.log import LogHub, MetricStore
from mvp_engine.log.backends import RunInfo
from mvp_engine.log.format import number
from mvp_engine.model_engine import (
    ModelEngine,
    Settings,
    StepNumbers,
    engine_class,
    precision_on,
)
from mvp_engine.model_engine.optim import ignored_keys
from mvp_engine.process.signals import StopSignals, settled
from mvp_engine.runs import Run, checkpoint_step


class Engine(EngineHooks):
    def __init__(
        self,
        config: Config,
        world: World,
        run: Run,
        checkpoint: Path | None = None,
        greeting: str = "",
    ) -> None:
        self.config = pin_config(config, world, run)
        self.world = world
        self.run = run
        self.checkpoint = checkpoint
        self.greeting = greeting  # the first line of the log: which run and checkpoint, and why
        self.can_start_again = False  # after a TryAgain; else errors are errors
        self.device = world.device
        self._engine_class = engine_class(config.model.type, config.model.backend)
        self._engine_class.check_packages()
        self.layout = Layout.of(world, config.parallel)
        self.logger = logging.getLogger("mvp_engine")
        self.step = 0  # optimizer steps made
        self.weights_step: int | None = None  # that of the weights, where it is not `step`
        self.epoch = 0  # epochs finished
        self.total_steps: int | None = None
        self.best: dict[str, Any] | None = None  # the best evaluation: metric, value, step
        self.evals_since_best = 0
        self.metrics = self._metric_store()
        self.hang = HangWatch(config.parallel.hang_seconds, world)
        self.saved_at = -1  # the step of the last checkpoint
        self.evaluated_at = -1  # the step of the last evaluation
        self.eval_metrics: dict[str, float | None] | None = None
        self._save_due = False
        self._stopped = False
        self._training = False
        self._eval_loader: Iterable[Any] | None = None
        self.has_data = False  # `open_data` was called
        self._closing = ExitStack()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: Any) -> None:
        """However the workflow ended: finish the checkpoint that is being written, then close the log."""
        self._closing.__exit__(*error)

    # ---- Workflows ------------------------------------------------------------------------------------------------

    def train(self) -> None:
        if self._training:  # it would build the model again, and an export would have those weights
            more = f"mvp_engine.load({str(self.run.dir)!r}).continue_training(steps=...)"
            raise UserError(f"this engine has trained already; {more} trains on")
        message = "finishing this step, then saving. Ctrl-C once more leaves at once."
        stop = StopSignals(message if self.world.is_main else "", failed=self.world.has_failed)
        with stop as self.signals:
            self.signals.early = True
            self.before_train()
            self.signals.early = False
            with settled(), self.hang, self.model_engine.train_mode():
                self.do_train()
                self.after_train()

    def evaluate(self) -> dict[str, float | None]:
        """Evaluate on the "eval" split: inside a training, or as a workflow on the checkpoint that `resume` names."""
        if not self._training:
            self.before_evaluate()
        self.eval_metrics = self._evaluate()
        return self.eval_metrics

    # ---- Training -------------------------------------------------------------------------------------------------

    def before_train(self) -> None:
        """Build data, model and optimizer; load the checkpoint; open the log."""
        config = self.config
        if config.train.max_steps is None and config.train.epochs is None:
            raise UserError("how long to train? Set train.max_steps or train.epochs")
        self._training = True
        self.start_data()
        self.model_engine = self._build_model_engine()
        self.model_engine.initialize(self.build_optimizer, self.prepare_scheduler)
        if config.eval.steps and self._eval_loader is None:
            # Here a stop signal ends the measuring of rows at once, and errors come before hours of training.
            self._eval_loader = self._loader("eval")
        self.guard = SkipGuard(config.guard, self.run.dir, self.world.rank)
        seed_everything(derived_seed(config.seed, "rank", self.layout.dropout_rank))
        if self.checkpoint:
            restore_state(self, self.checkpoint)
        self.meter = Meter(self.world, self.run.dir, self.step)
        if self.done:
            refuse_beyond_the_end(self.run, self.step, self.total_steps)
        self._open_log()
        self._open_checkpoints()
        record_setup(self, self.feed.accumulation)
        if self.done:
            keys = "train.max_steps or train.epochs, or checkpoint.patience"
            self.logger.info("nothing left to do: raise %s", keys)

    def do_train(self) -> None:
        while not self.done:
            self.hang.beat(self.step + 1)
            self.meter.begin(self.step + 1)
            plan = self.feed.next_plan()
            micro_batches = self.feed.take()
            self.meter.mark("other ranks")
            # A plan says without communication whether any rank has data for this step.
            has_data = plan.num_micro_batches if plan else self.world.any(bool(micro_batches))[0]
            if not has_data:
                self.meter.mark("data")
                self._read_status()
                self.feed.next_epoch()
                self.epoch = self.feed.epoch
                continue
            ctx = StepContext(self.step + 1, self.epoch, "train", self.metrics, micro_batches, plan)
            self.guard.watch(ctx.step, self.feed.advance(len(micro_batches)))
            num_samples = (plan and plan.num_samples) or self.global_batch_size
            self.meter.step(num_samples, self.feed.longest_wait)
            self.metrics.begin_step()
            with self.guard.recorded_errors(self.feed, self.meter):
                mark = self.meter.mark
                mark("train_pre_step")
                self.train_pre_step(ctx)
                mark("forward")
                forward = partial(self._forward_step, ctx)
                ctx.numbers = self.model_engine.train_batch(
                    ctx.micro_batches, forward, ctx.plan, mark
                )
            ctx.is_dummy = False
            self.step = ctx.step
            mark("train_post_step")
            self.train_post_step(ctx)
            self._after_step(ctx, ctx.numbers)

    def after_train(self) -> None:
        self._read_status()
        self.meter.end(self.step)
        # Left over only if the end was not foreseen, with a loader of unknown length. A checkpoint of this step would
        # not have it, and is written again.
        if any(self.world.any(not self.metrics.empty)):
            self._log_interval()
            self.saved_at = -1
        if self.config.eval.steps and self.evaluated_at != self.step:
            self._evaluate_and_track()
            self.saved_at = -1
        self._save_and_wait()
        self.logger.info("finished at step %d; everything is in %s", self.step, self.run.dir)
        self.guard.report_end(self.step)

    @property
    def parallel(self) -> Parallel:
        """The layout of the model that is trained, for logs."""
        return self.config.parallel

    @property
    def done(self) -> bool:
        train = self.config.train
        by_steps = train.max_steps is not None and self.step >= train.max_steps
        by_epochs = train.epochs is not None and self.epoch >= train.epochs
        patience = self.config.checkpoint.patience
        by_patience = patience is not None and self.evals_since_best >= patience
        return self._stopped or by_steps or by_epochs or by_patience

    def load_best(self) -> None:
        """Load the best checkpoint, after the last step, for an export: `weights_step` is its step."""
        best = self.best["step"] if self.best else self.step
        folder = self.run.checkpoints / "best"
        is_there = best != self.step and checkpoint_step(folder.resolve()) == best
        if not self.world.broadcast(is_there):
            return
        self.weights_step = best
        self.model_engine.restore(folder.resolve())
        self.logger.info(
            "the model is that of the best checkpoint, step %d, not of the last step %d",
            best,
            self.step,
        )

    def save(self) -> None:
        """Write a checkpoint of this step in the background, unless it exists already."""
        if self.saved_at != self.step:
            self._read_status()
            self.meter.keep_slowest()
            self.saved_at = self.step
            self._save_due = False
            meta = {"epoch": self.epoch, "best": self.best}
            self.checkpoints.save(self.step, collect_state(self), meta)
        if self.best and self.best["step"] == self.step:
            self.checkpoints.mark_best(self.step)

    def _save_and_wait(self) -> None:
        """Save and wait; a write that failed is tried once more, and then is an error."""
        for _ in range(2):
            self.save()
            self.checkpoints.wait()
            if not self.world.any(self.checkpoints.failed)[0]:
                return self.checkpoints.finish()
            self.saved_at = -1
        raise UserError(
            f"the state at step {self.step} could not be saved in {self.run.checkpoints}: the log says why. "
            "Older checkpoints are complete; resume=auto continues from the newest."
        )

    # ---- One step -------------------------------------------------------------------------------------------------

    def _forward_step(self, ctx: StepContext, micro_batch: Any) -> tuple[Tensor, Tensor | float]:
        ctx.is_dummy = self.model_engine.is_dummy
        self.meter.mark("forward")
        result = self.forward_step(ctx, micro_batch)
        self.meter.mark("backward")
        return result

    def _after_step(self, ctx: StepContext, numbers: StepNumbers) -> None:
        config = self.config
        self.meter.mark("other ranks")
        self.metrics.add("loss", numbers.loss_sum, numbers.weight)
        if self.layout.is_metrics_rank:  # the norm is the same on all ranks, and counts once
            for name, value in {"grad_norm": numbers.grad_norm, **numbers.metrics}.items():
                self.metrics.add(name, value)
        if numbers.skipped is not None:
            self.metrics.end_step(numbers.skipped)
        self.guard.take(self.model_engine.step_status(wait=False), self)
        # The one host collective of a step on a planned loader.
        interrupted, self._stopped = self.world.any(self.signals.requested is not None, ctx.stop)
        last = self.done or self.step == self.total_steps
        self.hub.progress(self.step)
        # Intervals are numbers by now, also those that were `auto`.
        if self.step == 1 or self.step % int(config.log.interval) == 0 or last:
            self.meter.mark("logging")
            self._log_interval()
        best = False
        eval_interval = config.eval.steps
        if eval_interval and (self.step % int(eval_interval) == 0 or last):
            best = self._evaluate_and_track()
        if config.checkpoint.interval and self.step % int(config.checkpoint.interval) == 0:
            self._save_due = True
        if best or self._save_due:
            with self.meter.paused("checkpoint"):
                self._read_status()
                # After a skipped step, the next one that is not skipped saves.
                if best or not self.guard.consecutive:
                    self.save()
        if interrupted and not last:
            reason = self.signals.requested or "another rank received a stop signal"
            self.logger.info("%s: saving at step %d", reason, self.step)
            self._save_and_wait()
            command = self.run.resume_command()
            raise Interrupted(f"stopped and saved at step {self.step}; continue with: {command}")

    def _read_status(self) -> None:
        """Wait for the last step, and count how it ended."""
        self.guard.take(self.model_engine.step_status(), self)

    def _log_interval(self) -> None:
        self._read_status()
        resumed = self.metrics.resumed  # then totals are of more steps than this process made
        means, totals = self.metrics.reduce()
        # The first step compiles and warms up: it predicts nothing.
        remaining = self.total_steps - self.step if self.total_steps and self.step > 1 else None
        perf = self.meter.read({} if resumed else totals, self.feed.take_waited(), remaining)
        record = {"step": self.step, "epoch": self.epoch, "split": "train", **means}
        record |= self.model_engine.learning_rates
        record |= getattr(self.feed.loader, "seen_metrics", dict)()  # of a mixture of sources
        self.hub.metrics({**record, "skipped": self.guard.total, "totals": totals, "perf": perf})

    # ---- Evaluation -----------------------------------------------------------------------------------------------

    def before_evaluate(self) -> None:
        """The model with the checkpoint's weights, ready for `evaluate` or for a workflow of your own."""
        self.model_engine = self._build_model_engine()
        self.model_engine.initialize()
        if self.checkpoint:
            shared = self.model_engine.restore(self.checkpoint).shared
            if "step" in shared:  # otherwise a model engine saved it, not a training
                self.step = shared["step"]
                self.epoch = shared["feed"]["epoch"]
                self.load_extra_state(shared["extra"])
        self._open_log()
        if not self.checkpoint:
            self.logger.warning("no checkpoint is loaded: the weights are those of prepare_model()")
        with self.eval_weights():
            pass  # without an optimizer it loads EMA weights now, or raises before any data is read

    def _evaluate(self) -> dict[str, float | None]:
        outside = rng_state()  # an evaluation leaves no trace in the training
        micro_batches = self._eval_batches()
        ctx = StepContext(self.step, self.epoch, "eval", self._metric_store(skip_nonfinite=False))
        if self.layout.pipeline == 1:  # stages have different buffers, and no running statistics
            self.world.broadcast_from_rank0_(list(self.model.buffers()))
        with self.eval_weights(), self.model_engine.eval_mode():
            step = partial(self._eval_step, ctx)
            evaluated = sum(1 for _ in self.model_engine.infer_micro_batches(micro_batches, step))
            ctx.is_dummy = False
            self.eval_end(ctx)
            self.eval_tasks(ctx)
        set_rng_state(outside)
        if not any(self.world.any(evaluated > 0)):
            raise UserError(
                "the eval loader gave no batch; check what prepare_dataloader('eval') returns"
            )
        means, _ = ctx.metrics.reduce()
        self.hub.metrics({"step": ctx.step, "epoch": ctx.epoch, "split": "eval", **means})
        return means

    def _eval_batches(self) -> Iterable[Any]:
        """This rank's part of the first `eval.batches` micro-batches of the split, counted over all ranks."""
        if self._eval_loader is None:
            self._eval_loader = self._loader("eval")
        loader = self._eval_loader
        limit = self.config.eval.batches
        if limit is None:
            return loader
        if implements(self._eval_loader, LimitsBatches):
            self._eval_loader.limit_batches(limit)
            return loader
        of_rank = range(self.layout.data_rank, limit, self.layout.data_size)
        return islice(loader, len(of_rank))

    def _eval_step(self, ctx: StepContext, micro_batch: Any) -> None:
        self.hang.beat(ctx.step)
        ctx.is_dummy = self.model_engine.is_dummy
        self.eval_step(ctx, micro_batch)

    def _evaluate_and_track(self) -> bool:
        """Evaluate; is it the best so far?"""
        self.evaluated_at = self.step
        self.hub.progress(self.step, "evaluating")
        with self.meter.evaluating():
            means = self.evaluate()
        name = self.config.checkpoint.best_metric
        if name is None:
            return False
        if name not in means:
            raise UserError(
                f"checkpoint.best_metric={name} is not among the eval metrics: {', '.join(means)}"
            )
        value = means[name]
        sign = 1 if self.config.checkpoint.best_mode == "max" else -1
        if value is None or (self.best is not None and sign * value <= sign * self.best["value"]):
            self.evals_since_best += 1
            if self.evals_since_best == self.config.checkpoint.patience:
                best = self.best or {"value": None, "step": 0}
                self.logger.info(
                    "the training ends: %s was not better than %s, of step %d, in %d evaluations (checkpoint.patience)",
                    name,
                    number(best["value"]),
                    best["step"],
                    self.evals_since_best,
                )
            return False
        self.best = {"metric": name, "value": value, "step": self.step}
        self.evals_since_best = 0
        return True

    # ---- Set-up ---------------------------------------------------------------------------------------------------

    def _metric_store(self, skip_nonfinite: bool = True) -> MetricStore:
        return MetricStore(self.world, self.layout.is_mp_src_rank, skip_nonfinite)

    def _build_model_engine(self) -> ModelEngine:
        seed_everything(derived_seed(self.config.seed, "model"))
        self.model = self.prepare_model()
        precision = precision_on(self.device, self.config.train.precision)
        return self._engine_class(
            self.model, self.layout, Settings.from_config(self.config, precision)
        )

    def _loader(self, split: str) -> Iterable[Any]:
        seed_everything(derived_seed(self.config.seed, "data", split))
        loader = self.prepare_dataloader(split)
        if loader is None:
            raise UserError(f"prepare_dataloader({split!r}) gave None, so there is no data for it")
        return loader

    def start_data(self) -> None:
        """Open the data before the model is built: the workers of the loader load meanwhile.

        An override may only start what `open_data` waits for. The data is then opened when the model has its weights.
        """
        self.open_data()

    def open_data(self) -> None:
        """Open the training data, after which the number of steps is known."""
        self.has_data = True
        loader = self._loader("train")
        batch_sizes = self.global_batch_size, self.config.data.micro_batch_size
        accumulation = micro_batches_per_step(loader, *batch_sizes, self.layout)
        feed = Feed(loader, accumulation, self.world, self.layout)
        self.feed = self._closing.enter_context(closing(feed))
        restart_changed_data(self)
        self.total_steps = feed.planned_steps(self.config.train)
        self.config = with_intervals(self.config, self.total_steps)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer, for a model that has its weights. Its schedule needs the number of steps."""
        if not self.has_data:
            self.open_data()
        with recorded_reads(self.config.optim) as read:
            optimizer = self.prepare_optimizer(model)
        if ignored := ignored_keys(self.config.optim, read):
            keys = ", ".join(f"optim.{key}" for key in ignored)
            self.logger.warning(
                f"{keys}: set, but without effect: prepare_optimizer of {type(self).__name__} returns "
                f"{type(optimizer).__name__} and does not read this. Pass it to the optimizer, or remove it"
            )
        return optimizer

    def _open_log(self) -> None:
        config = self.config
        info = RunInfo(
            self.run,
            config.run_name,
            config.workflow,
            config.model_dump(),
            self.step,
            self.total_steps,
        )
        self.hub = self._closing.enter_context(LogHub(info, config.log.backends, self.world.rank))
        self.logger.info("%s", self.greeting)
        if self._training and self.world.is_main:
            record_config(self.run, config.to_yaml(), self.step)

    def _open_checkpoints(self) -> None:
        description = self.run.dir / "hf"
        if self.world.is_main:
            self.model_engine.describe(description)
        manager = CheckpointManager(
            self.run.checkpoints, self.config.checkpoint, self.world, description
        )
        self.checkpoints = manager
        self._closing.callback(manager.wait)
        if self.best and self.best["metric"] != self.config.checkpoint.best_metric:
            self.best = None
            self.evals_since_best = 0
        manager.mark_best(self.best["step"] if self.best else None)
