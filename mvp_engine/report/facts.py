"""RunFacts: what a run folder says about a training, for the report page and the summary at its end."""

from __future__ import annotations

import json
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mvp_engine import plugins
from mvp_engine.log.format import duration, is_learning_rate, is_share, number, rate
from mvp_engine.runs import REASON, SLOW_STEPS, Run

Record = dict[str, Any]
Rows = list[list[str]]  # of a table, the first with the column names; empty: no table
LEFT_OUT = ("bad_rows.jsonl", "overlong_rows.jsonl")  # lists of rows, with source and reason
OUTLIER = 2.0  # times the usual seconds of such a step, above which a step is slow,
LEAST_LOST = 0.05  # if it took so many seconds more: steps of milliseconds vary
SLOW_STEPS_SHOWN = 5  # on the terminal
# The phases of a step that are not called by the name of their hook.
PHASES = {"data": "the wait for data", "other ranks": "the wait for other ranks"}
# Phases that a profile of the step does not repeat.
NOT_REPEATED = ("evaluation", "checkpoint")
SEEN = ("rows", "tokens", "epochs")  # of a source, that were trained on
NO_METRICS = {"step", "epoch", "split", "perf", "totals", "skipped"}


@dataclass(frozen=True)
class RunFacts:
    run: Run

    @cached_property
    def info(self) -> dict[str, Any]:
        return self.run.info if (self.run.dir / "run.json").is_file() else {}

    @cached_property
    def setup(self) -> dict[str, Any]:
        """What the last launch noted; empty for a run of an older version."""
        return dict(self.info.get("setup", {}))

    @cached_property
    def training(self) -> dict[str, Any]:
        return training_facts(self.run)

    @property
    def headline(self) -> str:
        """The metric that says how the training went."""
        return str(self.training.get("headline", "loss"))

    @cached_property
    def records(self) -> list[Record]:
        return list(self.run.records())

    def last(self, split: str) -> Record:
        return next((record for record in reversed(self.records) if record["split"] == split), {})

    @property
    def step(self) -> int:
        return max((record["step"] for record in self.records), default=0)

    @property
    def seconds(self) -> float:
        """Time of all training steps, over resumes; without evaluations and checkpoints."""
        total = 0.0
        before = 0
        for record in self.records:
            if record["split"] == "train":
                total += (record["step"] - before) * record.get("perf", {}).get("step_s", 0.0)
                before = record["step"]
        return total

    @property
    def best(self) -> dict[str, Any] | None:
        """The evaluation of the best checkpoint; without one, that with the lowest loss."""
        meta = self.run.checkpoints / "best" / "meta.json"
        if meta.is_file():
            return dict(json.loads(meta.read_text())["best"])
        evals = [r for r in self.records if r["split"] == "eval" and r.get("loss") is not None]
        lowest = min(evals, key=lambda record: record["loss"], default=None)
        return lowest and {"metric": "loss", "value": lowest["loss"], "step": lowest["step"]}

    @cached_property
    def left_out(self) -> Counter[tuple[str, str]]:
        """Rows that were not trained on, by source and reason."""
        records = [record for name in LEFT_OUT for record in self._lines(name)]
        return Counter((record["source"], record["reason"]) for record in records)

    @cached_property
    def slowest(self) -> list[Record]:
        """The slowest steps, slowest first."""
        return self._lines(SLOW_STEPS)

    @property
    def slow_steps(self) -> list[Record]:
        """Those of them that took far longer than usual."""
        return [record for record in self.slowest if _is_slow(record)]

    def _lines(self, name: str) -> list[Record]:
        file = self.run.dir / name
        return list(map(json.loads, file.read_text().splitlines())) if file.is_file() else []

    @property
    def sources(self) -> list[str]:
        return _sources({name: None for record in self.records for name in record})

    def speed(self) -> dict[str, str]:
        """Throughput and its reasons: medians over the log, without the first step, which compiles and warms up."""
        train = [record for record in self.records if record["split"] == "train"]
        values: dict[str, list[float]] = {}
        for record in [record for record in train if record["step"] > 1] or train:
            for name, value in {**record.get("perf", {}), "fill": record.get("fill")}.items():
                if value is not None:
                    values.setdefault(name, []).append(value)
        median = {name: statistics.median(series) for name, series in values.items()}
        shown = {}
        for name, value in median.items():
            if name.endswith("_per_s") and name != "flops_per_s":
                shown[f"{name.removesuffix('_per_s')}/s"] = rate(value)
        names = {"mfu": "MFU", "fill": "fill of packs", "data_wait": "wait for data"}
        shown |= {name: percent(median[key]) for key, name in names.items() if key in median}
        if "step_s" in median:
            shown["seconds per step"] = number(median["step_s"])
        if "memory_gib" in values:
            shown["peak memory"] = f"{max(values['memory_gib']):.2f} GiB"
        return shown

    def metrics(self, split: str) -> Record:
        return {k: v for k, v in self.last(split).items() if k not in NO_METRICS}

    # ---- Tables -----------------------------------------------------------------------------------------

    def source_rows(self) -> Rows:
        """Losses and shares of each source, and what was trained on; empty for a run with a single one."""
        train, held_out = self.last("train"), self.last("eval")
        kinds: dict[str, None] = {}
        for source in self.sources:
            names = [name for name in held_out if is_share(name) and name.endswith(f"_{source}")]
            kinds |= dict.fromkeys(name.removesuffix(f"_{source}") for name in names)
        rows = []
        for source in self.sources:
            losses = [number(record.get(f"loss_{source}")) for record in (train, held_out)]
            shares = [percent(held_out.get(f"{kind}_{source}")) for kind in kinds]
            seen = self.info.get("seen", {}).get(source)
            trained = [f"{seen[key]:,}" for key in SEEN] if seen else ["-"] * len(SEEN)
            rows.append([source, *losses, *shares, *trained])
        return _table(["source", "train loss", "eval loss", *kinds, *SEEN], rows)

    def task_rows(self) -> Rows:
        """Scores of the tasks of evaluation harnesses, at the newest step that has some."""
        files = {
            int(file.stem.removeprefix("step_")): file
            for file in (self.run.dir / "tasks").glob("step_*.json")
        }
        step = max(files, default=0)
        rows = []
        for name, one in (json.loads(files[step].read_text()) if files else {}).items():
            facts = [str(one[key]) for key in ("examples", "fewshot")]
            rows.append([name, number(one["value"]), number(one["stderr"]), *facts, str(step)])
        return _table(["task", "score", "standard error", "examples", "shots", "step"], rows)

    def left_out_rows(self) -> Rows:
        rows = [[source, reason, f"{n:,}"] for (source, reason), n in self.left_out.most_common()]
        return _table(["source", "reason", "rows"], rows)

    def slow_step_rows(self) -> Rows:
        """Slow steps, the phase that took most more than usual, and how to find its line."""
        rows = []
        for record in self.slow_steps:
            seconds = [number(record["seconds"]), number(record["usual_seconds"])]
            rows.append([str(record["step"]), str(record["rank"]), *seconds, slow_phases(record)])
        return _table(["step", "rank", "seconds", "usually", "of which"], rows)

    def slow_step_lines(self) -> list[tuple[str, str]]:
        """The slowest of them for the terminal: the first line with a name, columns of equal width."""
        lines: list[tuple[str, str]] = []
        for *figures, phase in self.slow_step_rows()[: 1 + SLOW_STEPS_SHOWN]:
            cells = "".join(f"{text:<9}" for text in figures)
            lines.append(("" if lines else "slow steps", f"{cells}{phase}"))
        return lines

    def part_rows(self) -> Rows:
        """What trains: parts of the model with their parameters and learning rates."""
        rows = []
        for part in self.setup.get("parts", []):
            rates = ", ".join(f"{value:g}" for value in part["rates"])
            rates = rates if part["trained"] else "frozen"
            if part["adapters"]:
                rates += f", LoRA on {part['adapters']} layers"
            share = percent(part["trained"] / max(1, part["parameters"]))
            figures = [f"{part['parameters']:,}", f"{part['trained']:,}", share]
            rows.append([part["part"], *figures, rates])
        return _table(["part", "parameters", "trained", "", "learning rate"], rows)

    def machine_rows(self) -> Rows:
        """Device, time, throughput and versions, as pairs."""
        setup = self.setup
        pairs: dict[str, str] = {}
        if setup:
            pairs["device"] = f"{setup['ranks']} x {setup['device']}, {setup['precision']}"
            if "layout" in setup:
                pairs["layout"] = setup["layout"]
            pairs["global batch"] = setup["global_batch"]
        pairs |= {"time of the training steps": duration(self.seconds), **self.speed()}
        if versions := setup.get("versions"):
            pairs["versions"] = ", ".join(f"{name} {text}" for name, text in versions.items())
        if self.info.get("git"):
            pairs["git commit"] = self.info["git"][:12]
        return [["", ""], *map(list, pairs.items())]

    # ---- Defaults of the page -----------------------------------------------------------------------------

    def figures(self) -> dict[str, str]:
        """Metrics of the last evaluation, or of the last step without one, as text."""
        record = self.metrics("eval") or self.metrics("train")
        shown = metric_texts({k: v for k, v in record.items() if not is_of_task(k)})
        if parts := self.setup.get("parts"):
            shown["trained parameters"] = f"{parts[-1]['trained']:,}"
        return shown

    def panels(self) -> dict[str, dict[str, str]]:
        """Metrics to plot, by title and label: loss, losses by source, shares, other metrics of evaluations."""
        return metric_panels({name: None for r in self.records for name in r}, self.last("eval"))

    def next_steps(self) -> dict[str, str]:
        """Commands that make sense now, by what they do."""
        run = self.run
        config = run.config
        folder = shlex.quote(str(run.dir))
        has_checkpoint = bool(run.checkpoint_list())
        steps = {}
        repeated = [r["step"] for r in self.slow_steps if r["phase"] not in NOT_REPEATED]
        if repeated:
            steps["Find the slow line"] = f"mvp profile {folder} --step {repeated[0]}"
        if (run.dir / "processor").is_dir():
            exports = sorted(run.dir.glob("hf_step_*"), key=lambda path: path.stat().st_mtime)
            if writes_text(run):
                steps["Chat with it"] = f"mvp chat {folder}"
            elif exports:
                export = shlex.quote(str(exports[-1]))
                more = self.training.get("next_steps", {})
                steps |= {what: text.format(export=export) for what, text in more.items()}
            if not exports and has_checkpoint:
                steps["Export it"] = run.resume_command("workflow=export")
            steps["Upload it"] = f"mvp export {folder} --push YOUR_NAME/{run.info['name']}"
        train = config.get("train", {})
        key = "max_steps" if train.get("max_steps") else "epochs"
        if has_checkpoint and train.get(key):
            longer = f"train.{key}={2 * train[key]}"
            patience = config.get("checkpoint", {}).get("patience")
            if patience and self.step < (self.setup.get("total_steps") or 0):
                longer = f"checkpoint.patience={2 * patience}"
            steps["Train longer"] = run.resume_command(longer)
        steps["Compare runs"] = f"mvp runs --dir {shlex.quote(str(run.dir.parent))}"
        return steps


def _sources(names: Iterable[str]) -> list[str]:
    return [name.removeprefix("loss_") for name in names if name.startswith("loss_")]


def metric_panels(names: Iterable[str], held_out: Iterable[str]) -> dict[str, dict[str, str]]:
    """The panels of a training whose records have these metrics, and those of its evaluations `held_out`."""
    panels = {"loss": {"eval": "loss"}}
    if sources := _sources(names):
        panels["loss by source"] = {source: f"loss_{source}" for source in sources}
    shares = {name: name for name in held_out if is_share(name)}
    for name in held_out:
        if is_of_task(name):
            task, _, metric = name.partition("/")
            panels.setdefault(task, {})[metric] = name
            continue
        is_known = name in NO_METRICS or name.startswith("loss") or is_learning_rate(name)
        if not is_known and name not in shares:
            panels[name] = {"eval": name}
    return {**panels, "held-out rows": shares} if shares else panels


def training_facts(run: Run) -> dict[str, Any]:
    """What the run's engine says of its kind of training (`EngineHooks.describe_training`)."""
    return dict(run.info.get("setup", {}).get("training", {}))


def writes_text(run: Run) -> bool:
    """Whether the run's model writes text, so that one can chat with it."""
    described = run.dir / "hf" / "config.json"
    types = {run.config.get("model", {}).get("type")}
    if described.is_file():
        types.add(json.loads(described.read_text()).get("model_type"))
    return types.isdisjoint({"value_model", *plugins.without_text()})


def _table(names: list[str], rows: Rows) -> Rows:
    return [names, *rows] if rows else []


def _is_slow(record: Record) -> bool:
    usual = record["usual_seconds"]
    return bool(record["seconds"] > max(OUTLIER * usual, usual + LEAST_LOST))


def slow_phases(record: Record) -> str:
    """What made a step slow: the phases that took more than usual, and the row that it waited for."""
    lost = {name: took - record["usual_split"][name] for name, took in record["split"].items()}
    texts = []
    for name in sorted(lost, key=lambda name: -lost[name]):
        if lost[name] < REASON * (record["seconds"] - record["usual_seconds"]):
            continue
        text = f"{number(record['split'][name])} in {PHASES.get(name, name)}"
        if name == "data" and "row" in record:
            place = "" if record["worker"] is None else f" in worker {record['worker']}"
            text += f": row {record['row']} took {number(record['row_seconds'])} s{place}"
        texts.append(text)
    return ", ".join(texts)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def is_of_task(name: str) -> bool:
    """Whether a metric is the score of a task of an evaluation harness: TASK/METRIC."""
    return "/" in name and not is_learning_rate(name)


def metric_text(name: str, value: float | None) -> str:
    """A metric as text: shares in percent."""
    return percent(value) if is_share(name) else number(value)


def metric_texts(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """Metrics as text, the loss first."""
    ordered = sorted(metrics.items(), key=lambda item: item[0] != "loss")
    return {name: metric_text(name, value) for name, value in ordered}
