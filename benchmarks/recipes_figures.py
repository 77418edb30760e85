"""What `recipes.py` reads from the log of a training, and its tables."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.watch import Watched

FULL_SPEED = 1.1  # times the steady step
RATES = ("step_s", "tokens_per_s", "mfu")  # kept of each interval, to compare the same steps of two runs
TARGETS = {"text_0.6b": 0.45, "text_1.7b": 0.55, "lora_8b": 0.5, "vlm_2b": 0.5, "experts_a3b": 0.42, "long_128k": 0.5}
TARGETS |= {"text_1.7b_fp8": 0.66, "vlm_2b_fp8": 0.6}


def figures(seen: Watched) -> dict[str, Any]:
    """Of a log: times from the command, and the throughput of the second half."""
    train = [(when, record) for when, record in seen.records if record.get("split") == "train"]
    if not train:
        ending = f"ended with {seen.code}" if seen.code is not None else f"no step after {seen.seconds:.0f} s"
        return {"why": ending, "output": seen.output}
    found: dict[str, Any] = {"first_step_s": train[0][0], "seconds": seen.seconds}
    intervals = [(when, record) for when, record in train if record["step"] > 1]
    rates = [{"step": one["step"], **{key: one["perf"].get(key) for key in RATES}} for _, one in intervals]
    if len(intervals) < 2 or seen.code not in (0, None):
        ending = f"ended with {seen.code}" if seen.code else f"{len(intervals)} intervals within the limit"
        why = f"{ending}, after step {train[-1][1]['step']}"
        return {**found, "why": why, "intervals": rates, "output": seen.output}
    counted = [record for _, record in intervals[len(intervals) // 2 :]]
    steady = statistics.median(record["perf"]["step_s"] for record in counted)
    begins = [train[0][0], *(when for when, _ in intervals)]
    fast = [
        begin
        for begin, (_, one) in zip(begins, intervals, strict=False)
        if one["perf"]["step_s"] <= FULL_SPEED * steady
    ]
    seconds = [record["perf"]["step_s"] for record in counted]

    def mean(name: str) -> float | None:
        values = [record["perf"].get(name) for record in counted]
        if None in values:
            return None
        return sum(value * weight for value, weight in zip(values, seconds, strict=True)) / sum(seconds)

    rate = mean("tokens_per_s")
    return {
        **found,
        "full_speed_s": fast[0] if fast else None,
        "counted_s": [begins[len(intervals) // 2], begins[-1]],
        "intervals": rates,
        "steps": train[-1][1]["step"],
        "step_s": steady,
        "tokens_per_s": rate,
        "tokens_per_step": rate and rate * statistics.mean(seconds),
        "mfu": mean("mfu"),
        "data_wait": mean("data_wait"),
        "memory_gib": counted[-1]["perf"]["memory_gib"],
        "losses": [record["loss"] for _, record in train],
    }


def table(result: dict[str, Any]) -> str:
    head = ["work", "side", "tokens/s", "MFU", "target", "step", "data wait", "idle", "memory", "first step"]
    head += ["full speed", "2nd start", "last loss"]
    lines = [f"| {' | '.join(head)} |", "| --- | --- |" + " ---: |" * (len(head) - 2)]
    for row in result["rows"]:
        if "why" in row:
            lines.append(f"| {row['work']} | {row['side']} | {row['why']} |" + " |" * (len(head) - 3))
            continue
        target = TARGETS.get(row["work"]) if row["side"] == "ours" and row.get("mfu") else None
        cells = [_number(row["tokens_per_s"], "{:,.0f}"), _percent(row.get("mfu")), _percent(target)]
        cells += [_number(row["step_s"], "{:.3f} s"), _percent(row.get("data_wait")), _percent(row.get("idle"))]
        cells += [_number(row.get("memory_gib"), "{:.0f} GiB")]
        cells += [_number(row.get(key), "{:.0f} s") for key in ("first_step_s", "full_speed_s", "second_start_s")]
        cells.append(_number(row["losses"][-1] if row["losses"] else None, "{:.3f}"))
        lines.append(f"| {row['work']} | {row['side']} | {' | '.join(cells)} |")
    lines += [f"\n{row['work']}: auto: {row['auto']}" for row in result["rows"] if row.get("auto")]
    return "\n".join(lines)


def starts_table(result: dict[str, Any]) -> str:
    lines = ["| work | caches | first step | full speed |", "| --- | --- | ---: | ---: |"]
    for name, found in result.get("starts", {}).items():
        if "why" in found:
            lines.append(f"| {name} | {found['why']} | | |")
        for which, times in found.items() if "why" not in found else []:
            cells = []
            for key in ("first_step_s", "full_speed_s"):
                cells.append(", ".join(_number(one.get(key), "{:.1f}") for one in times) + " s")
            lines.append(f"| {name} | {which} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _number(value: float | None, text: str) -> str:
    return "-" if value is None else text.format(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
