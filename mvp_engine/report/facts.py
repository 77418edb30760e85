"""RunFacts: what a run folder says about a training, for the report page and the summary at its end."""

from __future__ import annotations

import json
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from mvp_engine import plugins
from mvp_engine.log.format import duration, is_learning_rate, is_share, number, rate
from mvp_engine.runs import REASON, SLOW_STEPS, Run

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast
Record = dict[str, Any]
Rows = list[list[str]]  # of a table, the first with the column names
LEFT_OUT = ("bad_rows.jsonl", "overlong_rows.jsonl")  # lists of rows, with source and reason
OUTLIER = 2.0  # times the usual seconds of such a step, above which a step is slow,
LEAST_LOST = 0.05  # if it took so many seconds more: steps of milliseconds vary
SLOW_STEPS_SHOWN = 5  # on the terminal
# The phases of a step that are not called by the name of their hook.
PHASES = {"data": "the wait for data", "other ranks": "the wait for other ranks"}
_NO_METRICS = {"step", "epoch", "split", "perf", "totals", "skipped"}


@dataclass(frozen=True)
class RunFacts:
    run: Run

    @cached_property
    def info(self) -> dict[str, Any]:
        file = self.run.dir / "run.json"
        return json.loads(file.read_text()) if file.is_file() else {}

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
        found = [record for record in self.records if record["split"] == "eval"]
        found = [record for record in found if record.get("loss") is not None]
        if not found:
            return None
        lowest = min(found, key=lambda record: record["loss"])
        return {"metric": "loss", "value": lowest["loss"], "step": lowest["step"]}

    @cached_property
    def left_out(self) -> Counter[tuple[str, str]]:
        """Rows that were not trained on, by source and reason."""
        counts: Counter[tuple[str, str]] = Counter()
        for name in LEFT_OUT:
            file = self.run.dir / name
            for line in file.read_text().splitlines() if file.is_file() else []:
                record = json.loads(line)
                counts[record["source"], record["reason"]] += 1
        return counts

    @cached_property
    def slowest(self) -> list[Record]:
        """The slowest steps, slowest first."""
        file = self.run.dir / SLOW_STEPS
        return (
            [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        )

    @property
    def slow_steps(self) -> list[Record]:
        """Those of them that took far longer than usual."""
        return [one for one in self.slowest if _is_slow(one["seconds"], one["usual_seconds"])]

    @property
    def sources(self) -> list[str]:
        names = {name: None for record in self.records for name in record}
        return [name.removeprefix("loss_") for name in names if name.startswith("loss_")]

    def speed(self) -> dict[str, str]:
        """Throughput and its reasons: medians over the log, without the first step, which compiles and warms up."""
        train = [record for record in self.records if record["split"] == "train"]
        steady = [record for record in train if record["step"] > 1] or train
        values: dict[str, list[float]] = {}
        for record in steady:
            figures = {**record.get("perf", {}), "fill": record.get("fill")}
            for name, value in figures.items():
                if value is not None:
                    values.setdefault(name, []).append(value)
        median = {name: statistics.median(found) for name, found in values.items()}
        shown = {}
        for name, value in median.items():
            if name.endswith("_per_s") and name != "flops_per_s":
                shown[f"{name.removesuffix('_per_s')}/s"] = rate(value)
        for name, key in (
            ("MFU", "mfu"),
            ("fill of packs", "fill"),
            ("wait for data", "data_wait"),
        ):
            if key in median:
                shown[name] = percent(median[key])
        if "step_s" in median:
            shown["seconds per step"] = number(median["step_s"])
        if "memory_gib" in values:
            shown["peak memory"] = f"{max(values['memory_gib']):.2f} GiB"
        return shown

    # ---- Tables -----------------------------------------------------------------------------------------

    def source_rows(self) -> Rows:
        """Losses and shares of each source; empty for a run with a single one."""
        train, held_out = self.last("train"), self.last("eval")
        kinds: dict[str, None] = {}
        for source in self.sources:
            for name in held_out:
                if is_share(name) and name.endswith(f"_{source}"):
                    kinds[name.removesuffix(f"_{source}")] = None
        rows = []
        for source in self.sources:
            row = [
                source,
                number(train.get(f"loss_{source}")),
                number(held_out.get(f"loss_{source}")),
            ]
            rows.append([*row, *(percent(held_out.get(f"{kind}_{source}")) for kind in kinds)])
        return [["source", "train loss", "eval loss", *kinds], *rows] if rows else []

    def left_out_rows(self) -> Rows:
        rows = [[source, reason, f"{n:,}"] for (source, reason), n in self.left_out.most_common()]
        return [["source", "reason", "rows"], *rows] if rows else []

    def slow_step_rows(self) -> Rows:
        """Slow steps, the phase that took most more than usual, and how to find its line."""
        rows = []
        for one in self.slow_steps:
            seconds = [number(one["seconds"]), number(one["usual_seconds"])]
            rows.append([str(one["step"]), str(one["rank"]), *seconds, slow_phases(one)])
        return [["step", "rank", "seconds", "usually", "of which"], *rows] if rows else []

    def slow_step_lines(self) -> list[tuple[str, str]]:
        """The slowest of them for the terminal: the first line with a name, columns of equal width."""
        lines: list[tuple[str, str]] = []
        for row in self.slow_step_rows()[: 1 + SLOW_STEPS_SHOWN]:
            *figures, what = row
            cells = "".join(f"{text:<9}" for text in figures)
            lines.append(("" if lines else "slow steps", f"{cells}{what}"))
        return lines

    def part_rows(self) -> Rows:
        """What trains: parts of the model with their parameters and learning rates."""
        rows = []
        for part in self.setup.get("parts", []):
            share = part["trained"] / max(1, part["parameters"])
            rates = ", ".join(f"{value:g}" for value in part["rates"])
            rates = rates if part["trained"] else "frozen"
            if part["adapters"]:
                rates += f", LoRA on {part['adapters']} layers"
            figures = [f"{part['parameters']:,}", f"{part['trained']:,}", percent(share)]
            rows.append([part["part"], *figures, rates])
        return [["part", "parameters", "trained", "", "learning rate"], *rows] if rows else []

    def machine_rows(self) -> Rows:
        """Device, time, throughput and versions, as pairs."""
        setup = self.setup
        rows = [["", ""]]
        if setup:
            rows.append(["device", f"{setup['ranks']} x {setup['device']}, {setup['precision']}"])
            if "layout" in setup:
                rows.append(["layout", setup["layout"]])
            rows.append(["global batch", setup["global_batch"]])
        rows.append(["time of the training steps", duration(self.seconds)])
        rows += [[name, text] for name, text in self.speed().items()]
        versions = setup.get("versions", {})
        if versions:
            rows.append(
                ["versions", ", ".join(f"{name} {text}" for name, text in versions.items())]
            )
        if self.info.get("git"):
            rows.append(["git commit", self.info["git"][:12]])
        return rows

    # ---- Defaults of the page -----------------------------------------------------------------------------

    def figures(self) -> dict[str, str]:
        """Metrics of the last evaluation, or of the last step without one, as text."""
        record = self.last("eval") or self.last("train")
        shown = metric_texts({k: v for k, v in record.items() if k not in _NO_METRICS})
        parts = self.setup.get("parts")
        if parts:
            shown["trained parameters"] = f"{parts[-1]['trained']:,}"
        return shown

    def panels(self) -> dict[str, dict[str, str]]:
        """Metrics to plot, by title and label: loss, losses by source, shares, other metrics of evaluations."""
        panels = {"loss": {"eval": "loss"}}
        if self.sources:
            panels["loss by source"] = {source: f"loss_{source}" for source in self.sources}
        shares: dict[str, str] = {}
        for name in self.last("eval"):
            is_known = name in _NO_METRICS or name.startswith("loss") or is_learning_rate(name)
            if is_share(name):
                shares[name] = name
            elif not is_known:
                panels[name] = {"eval": name}
        if shares:
            panels["held-out rows"] = shares
        return panels

    def next_steps(self) -> dict[str, str]:
        """Commands that make sense now, by what they do."""
        folder = shlex.quote(str(self.run.dir))
        config_file = self.run.dir / "config.yaml"
        config = yaml.load(config_file.read_text(), LOADER) if config_file.is_file() else {}
        steps = {}
        # A profile repeats the step without its evaluation and checkpoint.
        repeated = [
            one for one in self.slow_steps if one["phase"] not in ("evaluation", "checkpoint")
        ]
        if repeated:
            steps["Find the slow line"] = f"mvp profile {folder} --step {repeated[0]['step']}"
        if (self.run.dir / "processor").is_dir():
            exports = sorted(self.run.dir.glob("hf_step_*"), key=lambda path: path.stat().st_mtime)
            if writes_text(self.run):
                steps["Chat with it"] = f"mvp chat {folder}"
            elif exports:
                export = shlex.quote(str(exports[-1]))
                more = self.training.get("next_steps", {})
                steps |= {what: text.format(export=export) for what, text in more.items()}
            if not exports and self.run.checkpoint_list():
                steps["Export it"] = self.run.resume_command("workflow=export")
            steps["Upload it"] = f"mvp push {folder} YOUR_NAME/{self.run.info['name']}"
        loop = config.get("loop", {})
        key = "total_steps" if loop.get("total_steps") else "epochs"
        if self.run.checkpoint_list() and loop.get(key):
            longer = f"loop.{key}={2 * loop[key]}"
            patience = config.get("checkpoint", {}).get("patience")
            if patience and self.step < (self.setup.get("total_steps") or 0):
                longer = f"checkpoint.patience={2 * patience}"
            steps["Train longer"] = self.run.resume_command(longer)
        steps["Compare runs"] = f"mvp runs list --dir {shlex.quote(str(self.run.dir.parent))}"
        return steps


def training_facts(run: Run) -> dict[str, Any]:
    """What the run's engine says of its kind of training (`EngineHooks.describe_training`)."""
    return dict(run.info.get("setup", {}).get("training", {}))


def writes_text(run: Run) -> bool:
    """Whether the run's model writes text, so that one can chat with it."""
    file = run.dir / "config.yaml"
    config = yaml.safe_load(file.read_text()) if file.is_file() else {}
    described = run.dir / "hf" / "config.json"
    if (
        described.is_file()
        and json.loads(described.read_text()).get("model_type") in plugins.without_text()
    ):
        return False
    return config.get("model", {}).get("type") not in ("action_model", "value_model")


def _is_slow(seconds: float, usual: float) -> bool:
    return seconds > OUTLIER * usual and seconds > usual + LEAST_LOST


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


def metric_texts(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """Metrics as text: the loss first, shares in percent."""
    shown = {}
    for name, value in sorted(metrics.items(), key=lambda item: item[0] != "loss"):
        shown[name] = percent(value) if is_share(name) else number(value)
    return shown


def config_text(run: Run) -> str:
    file: Path = run.dir / "config.yaml"
    return file.read_text() if file.is_file() else ""
