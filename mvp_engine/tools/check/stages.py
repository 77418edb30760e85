"""The stages of a check: config, data, model, a few training steps, one evaluation micro-batch.

The recipe's own engine runs in a temporary folder, so that no run, checkpoint or export is left behind, and
nothing is resumed. `record.py` keeps the facts, `show.py` prints them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from mvp_engine.config import Composed, Config
from mvp_engine.distributed import World
from mvp_engine.engine.meter import peak_memory
from mvp_engine.errors import EXIT_USER_ERROR, UserError, count
from mvp_engine.hf.model.model_parts import trained_parts
from mvp_engine.kit import MLLMData, MLLMDataKit
from mvp_engine.kit.data.cpus import available_cpus
from mvp_engine.kit.data.read.bad_rows import BadRows, TooManyBadRows
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.policy import ALGORITHMS
from mvp_engine.launch import launch, leave
from mvp_engine.log import backend_factory
from mvp_engine.log.format import number
from mvp_engine.model_engine import precision_on
from mvp_engine.model_engine.fsdp.activation_offload import host_bytes
from mvp_engine.process.pipes import ignore_broken_pipes
from mvp_engine.process.signals import StopSignals
from mvp_engine.rl.engine import RLEngine
from mvp_engine.rl.prompts import Prompt
from mvp_engine.rl.rollout import Sample
from mvp_engine.runs import Run
from mvp_engine.tools.check.checked_engine import (
    CheckedEngine,
    Recorder,
    WarningCollector,
    short_config,
    skipped_steps,
)
from mvp_engine.tools.check.model_checks import (
    check_optimizer_state,
    check_rare_media,
    report_unused_parameters,
    split_stage,
)
from mvp_engine.tools.check.record import CheckRecord, more_steps
from mvp_engine.tools.inspect import config_data_kit, inspect_kit
from mvp_engine.tools.inspect_rows import count_bad

DIVERGING = 2.0  # the last loss of the steps, relative to the first
LONG_WAIT = 0.2  # of the step time; with less, three steps say little
LONG_WAIT_SECONDS = 0.01  # steps of milliseconds always wait
FEW_STEPS = 10  # of a training on rows: that few hardly train a model
RL_ENGINE = "mvp_engine.rl.engine.RLEngine"
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


class Check:
    """One rank of a check; `run` takes the place of the config's workflow."""

    def __init__(self, record: CheckRecord) -> None:
        self.record = record
        record.begin_stage("config")

    def run(self, composed: Composed, world: World) -> int:
        record = self.record
        config = composed.config
        device = world.device
        name = composed.engine_class.__name__
        record.facts |= {"engine": name, "device": device.type, "processes": world.size}
        check_environment(config, record)
        engine = self._build_engine(composed, world)
        precision = precision_on(device, config.loop.precision)
        ranks = world.size
        if is_rl(engine):
            ranks = config.groups.actor.ranks or 1  # type: ignore[attr-defined]
        text = f"{config.project.name}: {name}, {precision} on {ranks} x {device.type}"
        if auto := engine.run.info.get("auto"):
            record["auto"] = {**auto["values"], "reason": auto["reason"]}
            text += f"; auto: {auto['reason']}"
        record.end_stage(text)
        warnings = WarningCollector(record["warnings"])
        LOGGER.addHandler(warnings)
        try:
            with engine:
                self._run_stages(engine, config)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory on {device}, which has {_gib(_total_memory(device))} GiB: "
                f"{str(error).splitlines()[0]}. Lower data.micro_batch_size (or mllm.micro_batch_tokens), set "
                "model.activation_checkpointing, or shard the model (parallel.shard): `mvp estimate CONFIG` prints "
                "what fits"
            ) from None
        except TooManyBadRows as error:
            # Without its file, which is in the temporary folder.
            raise UserError(error.summary) from None
        finally:
            LOGGER.removeHandler(warnings)
            self._report_bad_rows(engine.run.dir / "bad_rows.jsonl")
        record.printer.end(record.facts)
        return EXIT_USER_ERROR if world.broadcast(bool(record["problems"])) else 0

    def _build_engine(self, composed: Composed, world: World) -> CheckedEngine:
        config = composed.config
        folder: Path | None = None
        if world.is_main:
            folder = Run.create(self.record.folder, config.project.name, None).dir
        run = Run(world.broadcast(folder))
        bases = (CheckedEngine, composed.engine_class)
        checked: Any = type(composed.engine_class.__name__, bases, {})
        engine: CheckedEngine = checked(short_config(config), world, run, None, "a check")
        engine.signals = StopSignals()  # read but never entered: Ctrl-C ends a check at once
        return engine

    def _run_stages(self, engine: CheckedEngine, config: Config) -> None:
        record = self.record
        kit = self._data_stage(engine)
        recorder = self._model_stage(engine)
        with engine.model_engine.train_mode():
            record.begin_stage("step")
            engine.do_train()
            engine._read_status()
            check_rare_media(engine)
            self._step_stage(engine, config, recorder.records)
            if is_rl(engine):
                rollout_stage(record, engine, recorder.records)  # type: ignore[arg-type]
            elif not engine.world.broadcast(bool(record["problems"])):
                split_stage(record, engine)
            if config.loop.eval_interval or (kit is not None and _has_eval(kit)):
                record.begin_stage("evaluation")
                self._evaluation_stage(engine, config, kit)
        # In RL the models may be in other processes, and on another device than the controller.
        of_workers = engine.meter.peak_memory if is_rl(engine) else 0  # type: ignore[attr-defined]
        peak = max(engine.world.all_gather(of_workers or peak_memory(engine.device)))
        device = engine.model_engine.world.device
        record["memory"] = {
            "of": "device" if device.type == "cuda" else "process",
            "peak_gib": _gib(peak),
            "total_gib": _gib(_total_memory(device)),
            "host_gib": _gib(_host_states(engine)),
            "host_inputs_gib": _gib(_host_inputs(engine)),
        }

    # ---- Data -----------------------------------------------------------------------------------------

    def _data_stage(self, engine: CheckedEngine) -> MLLMDataKit | None:
        config = engine.config
        has_section = any(isinstance(value, MLLMData) for _, value in config)
        if not hasattr(type(engine), "data_kit") and not (has_section and config.model.path):
            return None
        record = self.record
        record.begin_stage("data")
        kit = config_data_kit(type(engine), config)
        packs = engine.global_batch_size
        self._check_split(kit, "train", "data", packs)
        if _has_eval(kit):
            self._check_split(kit, "eval", "eval_data", packs)
        plan = record["data"]["plan"]
        if plan:
            record.end_stage(f"{plan['rows']:,} rows, packs {plan['fill']:.1%} full")
        elif kit.is_stream():
            record.end_stage("streams, which have no packing plan")
        else:
            rows = sum(source["good"] for source in record["data"]["sources"])
            record.end_stage(f"{rows:,} prompts")
        return kit

    def _check_split(self, kit: MLLMDataKit, split: str, key: str, packs: int) -> None:
        record = self.record
        is_stream = kit.is_stream(split)
        row = None if split == "eval" or is_stream else _first_good(kit, split)
        found = inspect_kit(kit, split, packs, limit=1 if split == "train" else 0, row=row)
        record[key] = found
        record.save()
        record.printer.data(found)
        if not is_stream:
            bad = BadRows(kit.settings, sum(source["rows"] for source in found["sources"]))
            bad.add(kit.bad_rows(split))  # raises if there are too many
        if found["bad"]["total"]:
            record.warning(f"{split}: leaves out {count(found['bad']['total'], 'bad row')}")
        unused = found["sample"]["unused_columns"]
        if unused:
            record.warning(
                f"{split}: nothing reads {count(len(unused), 'column')}: {', '.join(unused)}"
            )
        left_out = found["sample"]["reasoning_left_out"]
        if left_out:
            record.warning(
                f"{split}: {count(left_out, 'turn')} of {count(found['sample']['rows'], 'row')} without loss, as the "
                "chat template leaves out the reasoning of earlier turns (docs/tools_and_reasoning.md)"
            )

    def _report_bad_rows(self, file: Path) -> None:
        """Rows that failed only when they were read: rows of streams, and rows with corrupt media."""
        known = list[Any]()
        for key in ("data", "eval_data"):
            if self.record[key]:
                known += self.record[key]["bad"]["rows"]
        lines = file.read_text().splitlines() if file.is_file() else []
        rows = [json.loads(line) for line in lines]
        self.record["bad_rows"] = [row for row in rows if row not in known]
        self.record.save()
        self.record.printer.bad(count_bad(self.record["bad_rows"]))

    # ---- Model, steps, evaluation ---------------------------------------------------------------------

    def _model_stage(self, engine: CheckedEngine) -> Recorder:
        record = self.record
        record.begin_stage("model")
        engine.before_train()
        # The folder of this check is gone when somebody reads the command.
        engine.guard.replay_command = "mvp replay RUN, after a training with this config"
        recorder = Recorder()
        if engine.world.is_main:
            engine.hub.backends.append(recorder)
        parts = trained_parts(engine.model, engine.model_engine.param_groups)
        record["parts"] = parts
        total = parts[-1]
        record.end_stage(f"{total['trained']:,} of {total['parameters']:,} parameters train")
        record.printer.parts(parts)
        return recorder

    def _step_stage(
        self, engine: CheckedEngine, config: Config, records: list[dict[str, Any]]
    ) -> None:
        record = self.record
        nonfinite = list[str]()
        for messages in engine.world.all_gather(engine.nonfinite_losses):
            nonfinite += messages
        record["problems"] += nonfinite or skipped_steps(engine.run.dir)
        if same_data := engine.feed.same_data:  # of a training it is a warning only
            record["warnings"][:] = [text for text in record["warnings"] if text != same_data]
            record.problem(same_data)
        if not is_rl(engine):  # its gradients are in workers
            report_unused_parameters(record, engine)
            check_optimizer_state(record, engine)
        if engine.guard.overflows == engine.step:
            record.warning(f"all {engine.step} steps overflowed in fp16: try loop.precision=bf16")
        if not engine.world.is_main:
            return
        step = self._step_facts(engine, records)
        seconds = step["seconds"]
        tokens = [one["totals"]["tokens"] for one in records if "tokens" in one["totals"]]
        total = engine.total_steps
        record["step"] = step
        record["training"] = {
            "steps": total,
            "steps_per_epoch": engine.feed.steps_per_epoch,
            "eta_s": total * seconds if total else None,
            "tokens": round(total * mean(tokens)) if total and tokens else None,
        }
        finite = [loss for loss in step["losses"] if loss is not None]
        if not is_rl(engine) and finite and finite[-1] > DIVERGING * finite[0] > 0:
            record.warning(
                f"the loss rises from {finite[0]:.4g} to {finite[-1]:.4g} in {engine.step} steps: lower optim.lr, or "
                "lengthen the warm-up"
            )
        if record["data"] and total and total < FEW_STEPS:
            record.warning(f"the training has {count(total, 'step')}: {more_steps(config)}")
        if total and total * seconds > LONG_RUN and config.checkpoint.interval is None:
            record.warning("checkpoint.interval is null: nothing is saved before the end")
        if step["data_wait"] > LONG_WAIT and step["data_wait"] * seconds > LONG_WAIT_SECONDS:
            record.warning(
                f"{step['data_wait']:.0%} of the step time is a wait for data: raise data.num_workers "
                f"(now {config.data.num_workers}; the machine has {available_cpus()} cores), or use smaller media "
                "(mllm.limits) or faster storage"
            )
        record.end_stage(
            f"{count(len(records), 'step')}: {seconds:.3g} s each", ok=not record["problems"]
        )

    def _step_facts(self, engine: CheckedEngine, records: list[dict[str, Any]]) -> dict[str, Any]:
        timed = [one["perf"] for one in records[1:] or records]
        tokens = [one["totals"]["tokens"] for one in records if "tokens" in one["totals"]]
        seconds = median(one["step_s"] for one in timed)
        data = self.record["data"]
        samples: float | None = engine.global_batch_size
        if data:
            plan = data["plan"]
            samples = round(plan["rows"] / plan["steps"], 1) if plan else None
            if is_rl(engine):
                samples = engine.global_batch_size * engine.config.rl.group  # type: ignore[attr-defined]
        return {
            "seconds": seconds,
            "first_seconds": records[0]["perf"]["step_s"],
            "tokens": round(mean(tokens)) if tokens else None,
            "samples": samples,
            "tokens_per_s": mean(tokens) / seconds if tokens else None,
            "data_wait": mean(one["data_wait"] for one in timed),
            "mfu": median(one["mfu"] for one in timed) if "mfu" in timed[0] else None,
            "losses": [one.get("loss") for one in records],
            "grad_norms": [one.get("grad_norm") for one in records],
        }

    def _evaluation_stage(
        self, engine: CheckedEngine, config: Config, kit: MLLMDataKit | None
    ) -> None:
        record = self.record
        means = engine.evaluate()
        record["evaluation"] = means
        if "loss" in means and means["loss"] is None:
            record.problem("evaluation: the loss of the first micro-batch is not finite")
        best = config.checkpoint.best_metric
        sources = kit.source_names("eval") if kit is not None and _has_eval(kit) else []
        if not config.loop.eval_interval:
            best = None  # only evaluations during training select the best checkpoint
        if best is not None and not is_known_metric(best, list(means), sources):
            known = ", ".join(means)
            record.problem(f"checkpoint.best_metric={best} is not among the eval metrics: {known}")
        record.end_stage("one micro-batch")


def check_environment(config: Config, record: CheckRecord) -> None:
    """Note what a training would only find out later, or only on another machine."""
    root = Path(config.project.dir).expanduser().absolute()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(existing, os.W_OK) or not existing.is_dir():
        record.problem(f"project.dir={root}: {existing} cannot be written to")
    run_id = config.project.run_id
    if run_id and config.resume is None and (root / run_id / "run.json").is_file():
        record.problem(f"run folder {root / run_id} exists: choose another project.run_id")
    for entry in config.log.backends:
        try:
            backend_factory(entry, config.engine)
        except UserError as error:
            record.problem(str(error))
    if config.resume is not None:
        record.warning(f"resume={config.resume} is ignored: a check starts at step 0")


def is_known_metric(name: str, metrics: list[str], sources: list[str]) -> bool:
    """Whether the evaluation computes `name`; one micro-batch may have no row of the source in its name."""
    if name in metrics:
        return True
    for metric in metrics:
        for source in sources:
            if metric.endswith(f"_{source}"):
                prefix = metric.removesuffix(source)
                if name in [prefix + other for other in sources]:
                    return True
    return False


def is_rl(engine: CheckedEngine) -> bool:
    """Whether the engine is the controller of an RL training; without importing what only these need."""
    return any(f"{base.__module__}.{base.__name__}" == RL_ENGINE for base in type(engine).__mro__)


def _has_eval(kit: MLLMDataKit) -> bool:
    return kit.has_split("eval")


def _first_good(kit: MLLMDataKit, split: str) -> str | None:
    """The index of the first row that can be trained on."""
    index = 0
    for cost in kit.measured(split)[1]:
        for tokens in cost.tokens.tolist():
            if tokens > 0:
                return str(index)
            index += 1
    return None


def _host_states(engine: CheckedEngine) -> int:
    """Bytes of optimizer states on the host (optim.offload), of the rank that has most."""
    optimizer = getattr(getattr(engine, "model_engine", None), "optimizer", None)
    return max(engine.world.all_gather(int(getattr(optimizer, "host_bytes", 0))))


def _host_inputs(engine: CheckedEngine) -> int:
    """Bytes of inputs of blocks on the host (model.activation_checkpointing=offload), of the rank that has most."""
    model = getattr(getattr(engine, "model_engine", None), "model", None)
    return max(engine.world.all_gather(0 if model is None else host_bytes(model)))


def _total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gib(size: int) -> float:
    return round(size / 2**30, 3)


# What a check finds out about an RL config: rewards that cannot teach anything, completions that are cut.

ANSWER_COLUMNS = ("answer", "solution", "completion", "response", "output")
OWN_ANSWERS = 16  # rows whose own answers are scored
FEW_FINISHED = 0.5  # of the completions that end by themselves
LONG_REWARDS = 0.5  # of the step time
LONG_REWARD_SECONDS = 1.0
METRICS = ("reward", "length", "finished", "with_signal", "gap", "reward_errors")


def rollout_stage(record: CheckRecord, engine: RLEngine, records: list[dict[str, Any]]) -> None:
    """Rewards and completions of the steps, and the rewards of the rows' own answers."""
    record.begin_stage("rollouts")
    facts: dict[str, Any] = {name: [one.get(name) for one in records] for name in METRICS}
    facts["gap_by_modality"] = _largest_gaps(records)
    facts["own_answers"] = _own_answer_reward(engine)
    facts["seconds"] = _seconds([one["perf"] for one in records[1:] or records])
    record["rollouts"] = facts
    _warn(record, engine, facts)
    record.end_stage(f"rewards {' '.join(number(value) for value in facts['reward'])}")


def _seconds(timed: list[dict[str, Any]]) -> dict[str, float]:
    """The means of what the steps after the first spend their time on."""
    names = ("generate", "reward", "update")
    return {name: mean(one.get(f"{name}_s", 0.0) for one in timed) for name in names}


def _largest_gaps(records: list[dict[str, Any]]) -> dict[str, float]:
    """The largest mean gap between sampler and trainer of each modality, as text or image."""
    largest: dict[str, float] = {}
    for one in records:
        for name, value in one.items():
            if name.startswith("gap/") and value is not None:
                kind = name.removeprefix("gap/")
                largest[kind] = max(value, largest.get(kind, 0.0))
    return largest


def _warn(record: CheckRecord, engine: RLEngine, facts: dict[str, Any]) -> None:
    config = engine.config
    rewards = [value for value in facts["reward"] if value is not None]
    if ALGORITHMS[config.rl.algorithm].has_groups and not any(facts["with_signal"]):
        record.warning(
            f"all completions of each prompt have the same reward in {count(len(rewards), 'step')} (mean "
            f"{number(mean(rewards) if rewards else None)}): nothing can be learnt from them. Does the reward read the "
            "right column? Is the task too hard or too easy for this policy (a short SFT first, other rows)?"
        )
    own = facts["own_answers"]
    if own is not None and rewards and own < mean(rewards):
        record.warning(
            f"the rows' own answers have the mean reward {number(own)}, less than the completions of the policy "
            f"({number(mean(rewards))}): is the sign of the reward wrong, or does it compare other text?"
        )
    seconds = facts["seconds"]
    share = seconds["reward"] / max(sum(seconds.values()), 1e-9)
    if (
        share > LONG_REWARDS
        and seconds["reward"] > LONG_REWARD_SECONDS
        and config.reward.model is None
    ):
        record.warning(
            f"{share:.0%} of the step time are rewards: raise reward.workers (now {config.reward.workers}), which may "
            "be more than the cores where a reward waits for something else"
        )
    finished = [value for value in facts["finished"] if value is not None]
    if finished and mean(finished) < FEW_FINISHED:
        record.warning(
            f"{1 - mean(finished):.0%} of the completions were cut after rollout.max_new_tokens="
            f"{config.rollout.max_new_tokens}: raise it, or train the policy to stop (SFT)"
        )


def _own_answer_reward(engine: RLEngine) -> float | None:
    """The mean reward of the answers that rows have themselves; None without any."""
    dataset: Any = engine.feed.loader.dataset  # type: ignore[attr-defined]
    prompts: list[Prompt] = []
    samples: list[Sample] = []
    for index in range(min(len(dataset), OWN_ANSWERS)):
        prompt = dataset[index]
        if not isinstance(prompt, Prompt):
            continue
        which = int(dataset.rows[index][0])
        text = _own_answer(prompt.row, dataset.formats[which])
        if text is None:
            continue
        tokens = engine.tokenizer(text, add_special_tokens=False).input_ids
        tokens += engine.data.eos_token_ids[-1:]
        samples.append(Sample(len(prompts), tokens, [0.0] * len(tokens), 0, "stop"))
        prompts.append(prompt)
    rewards = engine.rewards(prompts, samples) if prompts else []
    values = [reward.value for reward in rewards if reward.value is not None]
    return mean(values) if values else None


def _own_answer(row: dict[str, Any], format: RowFormat) -> str | None:
    """The answer that the data kit leaves out of the prompt, or a column that is probably one."""
    try:
        messages = read_row(row, replace(format, prompt_only=False)).messages
        if messages and messages[-1].role == "assistant":
            return messages[-1].text
    except BadRow:
        pass
    found = [row[name] for name in ANSWER_COLUMNS if isinstance(row.get(name), str | int)]
    return str(found[0]) if found else None
