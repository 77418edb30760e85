"""The stages of a check: config, data, model, a few training steps, one evaluation micro-batch.

The recipe's own engine runs in a temporary folder, so that no run, checkpoint or export is left behind, and
nothing is resumed. `record.py` keeps the facts and prints them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from mvp_engine.config import Composed, Config
from mvp_engine.distributed import World
from mvp_engine.errors import EXIT_USER_ERROR, UserError, count
from mvp_engine.hf.model.model_parts import trained_parts
from mvp_engine.kit import EvalGeneration, MLLMData, MLLMDataKit
from mvp_engine.kit.data.cpus import available_cpus
from mvp_engine.kit.data.read.bad_rows import BadRows, TooManyBadRows
from mvp_engine.kit.settings import EvalHarness
from mvp_engine.launch import launch, leave
from mvp_engine.log import backend_factory
from mvp_engine.log.format import rate
from mvp_engine.model_engine import precision_on
from mvp_engine.model_engine.fsdp.parallelize import host_bytes
from mvp_engine.process.signals import StopSignals
from mvp_engine.process.watchdog import ignore_broken_pipes
from mvp_engine.runs import Run
from mvp_engine.tools.check.engine import (
    STEPS,
    CheckedEngine,
    check_optimizer_state,
    check_rare_media,
    report_unused_parameters,
    skipped_steps,
    split_stage,
)
from mvp_engine.tools.check.record import CheckRecord, MemoryFacts, StepFacts, TrainingFacts
from mvp_engine.tools.inspect import config_data_kit, inspect_kit
from mvp_engine.tools.inspect_page import show, show_bad
from mvp_engine.tools.inspect_rows import count_bad
from mvp_engine.tools.store_speed import feeding, source_urls

MAX_NEW_TOKENS = 4  # per generated completion: enough to see that generation works
DIVERGING = 2.0  # the last loss of the steps, relative to the first
LONG_WAIT = 0.2  # of the step time; with less, three steps say little
LONG_WAIT_SECONDS = 0.01  # steps of milliseconds always wait
FEW_STEPS = 10  # of a training on rows: that few hardly train a model
LONG_RUN = 3600.0  # seconds; a longer training should save checkpoints
LOGGER = logging.getLogger("mvp_engine")


def main(argv: list[str] | None = None) -> int:
    """Run one rank of a check. The caller of the ranks removes `--folder`, and may read the facts from it."""
    ignore_broken_pipes()
    parser = argparse.ArgumentParser(prog="mvp_engine.tools.check", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(argv)
    # A recipe may print; stdout is reserved for the JSON of the caller.
    with contextlib.redirect_stdout(sys.stderr) if args.quiet else contextlib.nullcontext():
        check = Check(CheckRecord(args.config, args.folder, args.quiet))
        return leave(launch(args.config, args.overrides, check.run, check.record.fail))


class WarningCollector(logging.Handler):
    """A logging handler that appends warnings to a list."""

    def __init__(self, warnings: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.warnings = warnings

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


class Check:
    """One rank of a check; `run` takes the place of the config's workflow."""

    config: Config  # as the user wrote it: the engine's own is shortened
    engine: CheckedEngine
    kit: MLLMDataKit | None = None

    def __init__(self, record: CheckRecord) -> None:
        self.record = record
        self.facts = record.facts
        record.begin_stage("config")

    def run(self, composed: Composed, world: World) -> int:
        record = self.record
        self.config = composed.config
        device = world.device
        name = composed.engine_class.__name__
        self.facts.engine = name
        self.facts.device = device.type
        self.facts.processes = world.size
        check_environment(self.config, record)
        self.engine = self._build_engine(composed, world)
        precision = precision_on(device, self.config.train.precision)
        layout = self.engine.describe_layout()
        text = f"{self.config.run_name}: {name}, {precision} on {layout}"
        if auto := self.engine.run.info.get("auto"):
            self.facts.auto = {**auto["values"], "reason": auto["reason"]}
            text += f"; auto: {auto['reason']}"
        record.end_stage(text)
        warnings = WarningCollector(self.facts.warnings)
        LOGGER.addHandler(warnings)
        try:
            with self.engine:
                self._run_stages()
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory on {device}, which has {_gib(_total_memory(device))} GiB: "
                f"{str(error).splitlines()[0]}. Lower data.micro_batch_size (or data.pack_tokens), set "
                "model.activation_checkpointing, or shard the model (parallel.shard): `mvp plan CONFIG` prints "
                "what fits"
            ) from None
        except TooManyBadRows as error:
            # Without its file, which is in the temporary folder.
            raise UserError(error.summary) from None
        finally:
            LOGGER.removeHandler(warnings)
            self._report_bad_rows(self.engine.run.dir / "bad_rows.jsonl")
        record.print_end()
        return EXIT_USER_ERROR if world.broadcast(bool(self.facts.problems)) else 0

    def _build_engine(self, composed: Composed, world: World) -> CheckedEngine:
        folder: Path | None = None
        if world.is_main:
            folder = Run.create(self.record.folder, self.config.run_name, None).dir
        run = Run(world.broadcast(folder))
        bases = (CheckedEngine, composed.engine_class)
        checked: Any = type(composed.engine_class.__name__, bases, {})
        engine: CheckedEngine = checked(short_config(self.config), world, run, None, "a check")
        engine.signals = StopSignals()  # read but never entered: Ctrl-C ends a check at once
        return engine

    def _run_stages(self) -> None:
        record = self.record
        engine = self.engine
        self._data_stage()
        self._model_stage()
        with engine.model_engine.train_mode():
            record.begin_stage("step")
            engine.do_train()
            engine._read_status()
            check_rare_media(engine)
            records = list(engine.run.records("train"))
            self._step_stage(records)
            self._store_stage()
            if engine.trains_in_process and not engine.world.broadcast(bool(self.facts.problems)):
                split_stage(record, engine)
            for name, stage in engine.check_stages().items():
                record.begin_stage(name)
                result = stage(records)
                setattr(self.facts, name, result.facts)
                self.facts.warnings += result.warnings
                record.figures += result.figures
                record.end_stage(result.says)
            if self.config.eval.steps or self._has_eval():
                record.begin_stage("evaluation")
                self._evaluation_stage()
        self.facts.memory = _memory(engine)

    # ---- Data -----------------------------------------------------------------------------------------

    def _has_eval(self) -> bool:
        return self.kit is not None and self.kit.has_split("eval")

    def _data_stage(self) -> None:
        config = self.engine.config
        has_section = any(isinstance(value, MLLMData) for _, value in config)
        if not hasattr(type(self.engine), "data_kit") and not (has_section and config.model.path):
            return
        self.record.begin_stage("data")
        self.kit = kit = config_data_kit(type(self.engine), config)
        data = self.facts.data = self._check_split(kit, "train")
        if self._has_eval():
            self.facts.eval_data = self._check_split(kit, "eval")
        if plan := data["plan"]:
            self.record.end_stage(f"{plan['rows']:,} rows, packs {plan['fill']:.1%} full")
        elif kit.is_stream():
            self.record.end_stage("streams, which have no packing plan")
        else:
            rows = sum(source["good"] for source in data["sources"])
            self.record.end_stage(f"{rows:,} prompts")

    def _check_split(self, kit: MLLMDataKit, split: str) -> dict[str, Any]:
        record = self.record
        is_stream = kit.is_stream(split)
        row = None if split == "eval" or is_stream else _first_good(kit, split)
        limit = 1 if split == "train" else 0
        facts = inspect_kit(kit, split, self.engine.global_batch_size, limit=limit, row=row)
        record.save()
        record.console.print(f"\n[bold]{split} data[/]")
        show(facts, record.console)
        record.console.print()
        if not is_stream:
            bad = BadRows(kit.settings, sum(source["rows"] for source in facts["sources"]))
            bad.add(kit.bad_rows(split))  # raises if there are too many
        if facts["bad"]["total"]:
            record.warning(f"{split}: leaves out {count(facts['bad']['total'], 'bad row')}")
        sample = facts["sample"]
        if unused := sample["unused_columns"]:
            columns = f"{count(len(unused), 'column')}: {', '.join(unused)}"
            record.warning(f"{split}: nothing reads {columns}")
        if left_out := sample["reasoning_left_out"]:
            record.warning(
                f"{split}: {count(left_out, 'turn')} of {count(sample['rows'], 'row')} without loss, as the chat "
                "template leaves out the reasoning of earlier turns (docs/tools_and_reasoning.md)"
            )
        return facts

    def _report_bad_rows(self, file: Path) -> None:
        """Rows that failed only when they were read: rows of streams, and rows with corrupt media."""
        known = list[Any]()
        for data in (self.facts.data, self.facts.eval_data):
            known += data["bad"]["rows"] if data else []
        lines = file.read_text().splitlines() if file.is_file() else []
        rows = [json.loads(line) for line in lines]
        self.facts.bad_rows = [row for row in rows if row not in known]
        self.record.save()
        show_bad(count_bad(self.facts.bad_rows), self.record.console)

    # ---- Model, steps, evaluation ---------------------------------------------------------------------

    def _model_stage(self) -> None:
        engine = self.engine
        self.record.begin_stage("model")
        engine.before_train()
        # The folder of this check is gone when somebody reads the command.
        engine.guard.replay_command = "mvp check RUN, after a training with this config"
        parts = trained_parts(engine.model, engine.model_engine.param_groups)
        self.facts.parts = parts
        total = parts[-1]
        self.record.end_stage(f"{total['trained']:,} of {total['parameters']:,} parameters train")
        self.record.print_parts()

    def _step_stage(self, records: list[dict[str, Any]]) -> None:
        record = self.record
        engine = self.engine
        nonfinite = list[str]()
        for messages in engine.world.all_gather(engine.nonfinite_losses):
            nonfinite += messages
        self.facts.problems += nonfinite or skipped_steps(engine.run.dir)
        if same_data := engine.feed.same_data:  # of a training it is a warning only
            warnings = self.facts.warnings
            warnings[:] = [text for text in warnings if text != same_data]
            record.problem(same_data)
        if engine.trains_in_process:
            report_unused_parameters(record, engine)
            check_optimizer_state(record, engine)
        if engine.guard.overflows == engine.step:
            record.warning(f"all {engine.step} steps overflowed in fp16: try train.precision=bf16")
        if not engine.world.is_main:
            return
        self.facts.step = step = self._step_facts(records)
        seconds = step.seconds
        total = engine.total_steps
        eta = total * seconds if total else None
        tokens = round(total * mean(_tokens(records))) if total and _tokens(records) else None
        self.facts.training = TrainingFacts(total, engine.feed.steps_per_epoch, eta, tokens)
        self._warn(step)
        text = f"{count(len(records), 'step')}: {seconds:.3g} s each"
        record.end_stage(text, ok=not self.facts.problems)

    def _warn(self, step: StepFacts) -> None:
        warn = self.record.warning
        config = self.config
        engine = self.engine
        total = engine.total_steps
        seconds = step.seconds
        is_loss = "headline" not in engine.describe_training()
        finite = [loss for loss in step.losses if loss is not None]
        if is_loss and finite and finite[-1] > DIVERGING * finite[0] > 0:
            warn(
                f"the loss rises from {finite[0]:.4g} to {finite[-1]:.4g} in {engine.step} steps: lower optim.lr, or "
                "lengthen the warm-up"
            )
        if self.facts.data and total and total < FEW_STEPS:
            warn(f"the training has {count(total, 'step')}: {_more_steps(engine)}")
        if total and total * seconds > LONG_RUN and config.checkpoint.interval is None:
            warn("checkpoint.interval is null: nothing is saved before the end")
        if step.data_wait > LONG_WAIT and step.data_wait * seconds > LONG_WAIT_SECONDS:
            warn(
                f"{step.data_wait:.0%} of the step time is a wait for data: raise data.num_workers "
                f"(now {config.data.num_workers}; the machine has {available_cpus()} cores), or use smaller media "
                "(data.limits) or faster storage"
            )

    def _step_facts(self, records: list[dict[str, Any]]) -> StepFacts:
        timed = [record["perf"] for record in records[1:] or records]
        tokens = _tokens(records)
        seconds = median(perf["step_s"] for perf in timed)
        samples = self.engine.samples_per_step
        if self.facts.data and (plan := self.facts.data["plan"]):
            samples = round(plan["rows"] / plan["steps"], 1)
        elif self.kit is not None and self.kit.is_stream():
            samples = None
        return StepFacts(
            seconds=seconds,
            first_seconds=records[0]["perf"]["step_s"],
            tokens=round(mean(tokens)) if tokens else None,
            samples=samples,
            tokens_per_s=mean(tokens) / seconds if tokens else None,
            data_wait=mean(perf["data_wait"] for perf in timed),
            mfu=median(perf["mfu"] for perf in timed) if "mfu" in timed[0] else None,
            losses=[record.get("loss") for record in records],
            grad_norms=[record.get("grad_norm") for record in records],
        )

    def _store_stage(self) -> None:
        """Whether the stores of the sources give what the steps need."""
        step = self.facts.step
        if self.kit is None or step is None or not source_urls(self.config):
            return
        self.record.begin_stage("stores")
        self.facts.stores, warnings = feeding(
            self.config, self.kit, (step.samples or 0.0) / step.seconds
        )
        self.facts.warnings += warnings
        texts = [
            f"{one['source']} gives {rate(one['bytes_per_s'])}B/s and the steps need "
            f"{rate(one['needed_bytes_per_s'])}B/s"
            for one in self.facts.stores
        ]
        self.record.end_stage("; ".join(texts))

    def _evaluation_stage(self) -> None:
        config = self.config
        means = self.engine.evaluate()
        self.facts.evaluation = means
        if "loss" in means and means["loss"] is None:
            self.record.problem("evaluation: the loss of the first micro-batch is not finite")
        best = config.checkpoint.best_metric
        sources = self.kit.source_names("eval") if self.kit and self._has_eval() else []
        # Only evaluations during training select the best checkpoint.
        is_used = best is not None and config.eval.steps
        if best and is_used and not is_known_metric(best, list(means), sources):
            self.record.problem(
                f"checkpoint.best_metric={best} is not among the eval metrics: {', '.join(means)}"
            )
        self.record.end_stage("one micro-batch")


def short_config(config: Config) -> Config:
    """The config without anything that takes long, writes files, or reports to a tracker."""
    evaluation: dict[str, Any] = {"steps": None, "batches": 1}
    generation = getattr(config.eval, "generation", None)
    if isinstance(generation, EvalGeneration):
        tokens = min(MAX_NEW_TOKENS, generation.max_new_tokens)
        evaluation["generation"] = generation.model_copy(update={"max_new_tokens": tokens})
    sections: dict[str, dict[str, Any]] = {
        "eval": evaluation,
        "guard": {"max_skips": STEPS + 1},
        "log": {"interval": 1, "backends": ["jsonl"]},
        "checkpoint": {"interval": None, "patience": None},
    }
    changes: dict[str, Any] = {"workflow": "train", "resume": None}
    for name, values in sections.items():
        changes[name] = getattr(config, name).model_copy(update=values)
    if isinstance(harness := getattr(config, "eval_harness", None), EvalHarness):
        tasks: list[Any] = list(harness.tasks)
        tasks = [task.model_copy(update={"limit": 2}) for task in tasks]
        changes["eval_harness"] = harness.model_copy(update={"tasks": tasks})
    return config.model_copy(update=changes)


def check_environment(config: Config, record: CheckRecord) -> None:
    """Note what a training would only find out later, or only on another machine."""
    root = Path(config.output_dir).expanduser().absolute()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(existing, os.W_OK) or not existing.is_dir():
        record.problem(f"output_dir={root}: {existing} cannot be written to")
    run_id = config.run_id
    if run_id and config.resume is None and (root / run_id / "run.json").is_file():
        record.problem(f"run folder {root / run_id} exists: choose another run_id")
    for entry in config.log.backends:
        try:
            backend_factory(entry, config.engine)
        except UserError as error:
            record.problem(str(error))
    if config.resume is not None:
        record.warning(f"resume={config.resume} is ignored: a check starts at step 0")


def is_known_metric(name: str, metrics: list[str], sources: list[str]) -> bool:
    """Whether the evaluation computes `name`; one micro-batch may have no row of the source in its name."""
    names = set(metrics)
    for metric in metrics:
        for source in sources:
            if metric.endswith(f"_{source}"):
                names |= {metric.removesuffix(source) + other for other in sources}
    return name in names


def _more_steps(engine: CheckedEngine) -> str:
    """How a training gets more steps."""
    if engine.config.train.max_steps is not None:
        return "raise train.max_steps"
    keys = list(engine.batch_size_keys)
    if getattr(engine.config.data, "global_batch_tokens", None):
        keys[0] = "data.global_batch_tokens"
    return f"raise train.epochs, or lower {' or '.join(keys)}"


def _tokens(records: list[dict[str, Any]]) -> list[float]:
    return [record["totals"]["tokens"] for record in records if "tokens" in record["totals"]]


def _first_good(kit: MLLMDataKit, split: str) -> str | None:
    """The index of the first row that can be trained on."""
    tokens = np.concatenate([cost.tokens for cost in kit.measured(split)[1]])
    good = np.flatnonzero(tokens > 0)
    return str(good[0]) if len(good) else None


def _memory(engine: CheckedEngine) -> MemoryFacts:
    """The peak, and what is on the host, of the rank that has most. All ranks call it."""
    device = engine.model_engine.world.device
    optimizer = getattr(engine.model_engine, "optimizer", None)
    model = getattr(engine.model_engine, "model", None)
    sizes = [engine.meter.peak(), int(getattr(optimizer, "host_bytes", 0))]
    sizes.append(0 if model is None else host_bytes(model))
    peak, states, inputs = map(max, zip(*engine.world.all_gather(sizes), strict=True))
    of = "device" if device.type == "cuda" else "process"
    return MemoryFacts(of, _gib(peak), _gib(_total_memory(device)), _gib(states), _gib(inputs))


def _total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gib(size: int) -> float:
    return round(size / 2**30, 3)


if __name__ == "__main__":
    sys.exit(main())
