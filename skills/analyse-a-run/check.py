"""Check a diagnosis of a run: its problems are those that the records show, its evidence is in them, its fix acts.

check.py RUN ANSWER.json        # see SKILL.md
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.runs import Run, flat_keys
from mvp_engine.tools.skill_check import run_check

LEFT_OUT = ("bad_rows.jsonl", "overlong_rows.jsonl")
# The metrics that show a problem, and the config keys (or sections) that act on it.
EVIDENCE = {
    "flat_loss": {"loss"},
    "spikes": {"grad_norm", "skipped", "loss"},
    "overfit": {"loss"},
    "data_wait": {"perf.data_wait"},
    "bad_packing": {"fill"},
    "low_mfu": {"perf.mfu"},
    "rows_left_out": set[str](),
}
KEYS = {
    "flat_loss": "optim.lr optim.lr_by_part optim.warmup optim.schedule model.freeze lora data.sources",
    "spikes": "optim.lr optim.warmup optim.max_grad_norm optim.betas guard.spike_sigmas data.sources",
    "overfit": "train.epochs train.max_steps checkpoint.patience lora optim.weight_decay optim.lr data.sources",
    "data_wait": "data.num_workers data.limits",
    "bad_packing": "data.pack_tokens data.max_length data.global_batch_tokens data.global_batch_size",
    "low_mfu": "model.compile train.precision model.activation_checkpointing model.fp8 data.pack_tokens parallel",
    "rows_left_out": "data.max_length data.overlong data.sources data.limits data.template",
}
# Which way a number has to change.
HIGHER = {("flat_loss", "optim.lr"), ("data_wait", "data.num_workers"), ("low_mfu", "data.pack_tokens")}
LOWER = {("spikes", "optim.lr"), ("overfit", "train.epochs"), ("overfit", "train.max_steps")}


def shown(run: Run) -> set[str]:
    """The problems that the records of a run show, by the rules of SKILL.md."""
    train = [flat_keys(record) for record in run.records("train")][1:]
    if len(train) < 8:
        raise UserError(f"{run.dir} has {len(train) + 1} training records: too few for a diagnosis")
    found = set()
    losses = [record["loss"] for record in train if record.get("loss") is not None]
    quarter = len(losses) // 4
    if statistics.mean(losses[-quarter:]) > 0.97 * statistics.mean(losses[:quarter]):
        found.add("flat_loss")
    norms = [record["grad_norm"] for record in train if record.get("grad_norm") is not None]
    if train[-1].get("skipped") or max(norms) > 10 * statistics.median(norms):
        found.add("spikes")
    held_out = [record["loss"] for record in run.records("eval") if record.get("loss") is not None]
    if held_out and held_out[-1] > 1.05 * min(held_out) and losses[-1] < losses[0]:
        found.add("overfit")
    if median(train, "perf.data_wait", 0.0) > 0.1:
        found.add("data_wait")
    if median(train, "fill", 1.0) < 0.7:
        found.add("bad_packing")
    if median(train, "perf.mfu", 1.0) < 0.25 and not found & {"data_wait", "bad_packing"}:
        found.add("low_mfu")
    if sum(left_out(run).values()) > 0.05 * num_rows(run):
        found.add("rows_left_out")
    return found


def median(records: list[dict[str, Any]], name: str, default: float) -> float:
    values = [record[name] for record in records if record.get(name) is not None]
    return statistics.median(values) if values else default


def left_out(run: Run) -> Counter[tuple[str, str]]:
    """The rows that were left out, by file and reason."""
    rows: Counter[tuple[str, str]] = Counter()
    for name in LEFT_OUT:
        file = run.dir / name
        for line in file.read_text().splitlines() if file.is_file() else []:
            rows[name, json.loads(line)["reason"]] += 1
    return rows


def num_rows(run: Run) -> int:
    """The rows of an epoch, from the log; they include those that are left out."""
    log = run.dir / "log.txt"
    found = re.search(r"train: ([\d,]+) rows? an epoch", log.read_text() if log.is_file() else "")
    return int(found[1].replace(",", "")) if found else 0


def problems(folder: str | Path, answer: Any) -> list[str]:
    """The problems of an answer, one sentence each."""
    run = Run(Path(folder))
    entries = answer.get("problems") if isinstance(answer, dict) else None
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        return ['the answer is not {"problems": [{"problem": ..., "fix": ...}, ...]}']
    expected = shown(run)
    named = {str(one.get("problem")) for one in entries}
    found = [f"{name}: the records show it, and the answer lacks it" for name in sorted(expected - named)]
    for one in entries:
        name = str(one.get("problem"))
        if name not in EVIDENCE:
            found.append(f"{name} is none of {', '.join(EVIDENCE)}")
        elif name not in expected:
            found.append(f"{name}: the records do not show it")
        else:
            found += [f"{name}: {text}" for text in (*_evidence(run, name, one), *_fix(run, name, one))]
    return found


def _evidence(run: Run, name: str, entry: dict[str, Any]) -> list[str]:
    if name == "rows_left_out":
        key = entry.get("file"), entry.get("reason")
        rows = left_out(run).get(key, 0)  # type: ignore[arg-type]
        same = rows > 0 and rows == entry.get("rows")
        return [] if same else [f"{key[0]} lists {rows} rows with reason {key[1]}, not {entry.get('rows')}"]
    metric, split, step = entry.get("metric"), entry.get("split", "train"), entry.get("step")
    expected_split = "eval" if name == "overfit" else "train"
    if metric not in EVIDENCE[name] or split != expected_split:
        metrics = ", ".join(sorted(EVIDENCE[name]))
        return [f"{metric} of {split} does not show it: give {metrics} of {expected_split}"]
    values = [flat_keys(record).get(metric) for record in run.records(split) if record["step"] == step]
    value = entry.get("value")
    if not values or values[-1] is None or not isinstance(value, int | float):
        return [f"there is no {metric} of {split} at step {step}"]
    if abs(values[-1] - value) > 0.01 * abs(values[-1]):
        return [f"{metric} of {split} at step {step} is {values[-1]:g}, not {value:g}"]
    return []


def _fix(run: Run, name: str, entry: dict[str, Any]) -> list[str]:
    key, _, text = str(entry.get("fix", "")).partition("=")
    config = flat_keys(run.config)
    sections = {known.rpartition(".")[0] for known in config}
    if not text or not (key in config or key.split(".")[0] in ("lora",) or key.rpartition(".")[0] in sections):
        return [f"the fix {entry.get('fix')!r} is no key=value of the config"]
    if not any(key == one or key.startswith(f"{one}.") for one in KEYS[name].split()):
        return [f"{key} does not act on it; keys that do: {', '.join(KEYS[name].split())}"]
    before = config.get(key)
    if str(before) == text:
        return [f"{key} is {text} already"]
    try:
        change = float(text) - float(before)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []
    wrong = change <= 0 if (name, key) in HIGHER else change >= 0 if (name, key) in LOWER else change == 0
    return [f"{key}={text} goes the wrong way from {before}"] if wrong else []


def _of_command_line() -> list[str]:
    if len(sys.argv) != 3:
        raise UserError("give the folder of a run and the file of an answer: check.py RUN ANSWER.json")
    try:
        answer = json.loads(Path(sys.argv[2]).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{sys.argv[2]} cannot be read as JSON: {error}") from None
    return problems(sys.argv[1], answer)


if __name__ == "__main__":
    run_check(_of_command_line)
