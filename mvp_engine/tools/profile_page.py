"""The facts of a profile as one Markdown page: idle time, kinds of work, longest kernels, memory."""

from __future__ import annotations

import re
from typing import Any

from mvp_engine.errors import count

LONG_WAIT = 0.1  # of a step
MUCH_IDLE = 0.3  # of the time, without an explanation
ONE_ROW = 0.5  # of the time of its micro-batch, above which a row is the reason
# Phases in which the model does not run.
BETWEEN = {
    "train_pre_step": "The hook train_pre_step",
    "train_post_step": "The hook train_post_step",
    "logging": "Logging",
    "other ranks": "Waiting for other ranks after the step",
}
OFTEN = 0.5  # of the time
MAX_NAME = 90  # characters of a kernel's name
MAX_KERNELS = 20  # profile.json has more


def page(facts: dict[str, Any], title: str) -> str:
    step = facts["step_ms"]
    intro = f"{count(facts['steps'], 'step')} of {step:.1f} ms from step {facts['first_step']} on"
    intro += (
        f", {facts['step_ms_alone']:.1f} ms without the profiler."
        if "step_ms_alone" in facts
        else "."
    )
    if record := facts["in_run"]:
        usual = 1e3 * record["usual_seconds"]
        intro += (
            f" In the run it took {1e3 * record['seconds']:.1f} ms, where {usual:.1f} are usual."
        )
    lines = [
        f"# {title}",
        f"\n{intro}{_idle(facts)}{_clock(facts)}{_hooks(facts)}{_data_wait(facts)}{_communication(facts)}",
    ]
    lines += _table("phase", facts["phases"], step)
    lines += _table("kind", facts["kinds"], step)
    lines += _table("kernel", facts["kernels"][:MAX_KERNELS], step)
    lines += _table("idle before", facts["gaps"], step)
    lines.append("\n| memory | GiB |\n| --- | ---: |")
    for kind, size in facts["memory_gib"].items():
        lines.append(f"| {kind} | {size:.2f} |")
    return "\n".join(lines) + "\n"


def _idle(facts: dict[str, Any]) -> str:
    if facts["idle"] is None:
        return (
            " The profiler recorded no kernels, so idle time is unknown: it needs CUPTI, and the right to read the "
            "GPU's performance counters."
        )
    text = (
        f" The device was idle for {facts['idle']:.1%} of the time, with {facts['launches']:,.0f} kernels and copies "
        "per step."
    )
    waits = [facts["data_wait_ms"], *(phase["ms"] for phase in _long_hooks(facts))]
    if facts["idle"] > MUCH_IDLE + sum(waits) / facts["step_ms"]:
        text += " The host launches them too slowly: larger packs (mllm.micro_batch_tokens: auto), model.compile."
    return text


def _long_hooks(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Phases between the model's work that take much of the time."""
    long = LONG_WAIT * facts["step_ms"]
    return [one for one in facts["phases"] if one["name"] in BETWEEN and one["ms"] > long]


def _hooks(facts: dict[str, Any]) -> str:
    text = ""
    for phase in _long_hooks(facts):
        share = phase["ms"] / facts["step_ms"]
        text += f" {BETWEEN[phase['name']]} takes {phase['ms']:.1f} ms ({share:.1%}) of a step{_lines(phase)}."
    return text


def _lines(phase: dict[str, Any]) -> str:
    lines = [one for one in phase["lines"] if one["ms"] > LONG_WAIT * phase["ms"]]
    return "".join(f"; {one['ms']:.1f} ms in `{one['line']}`" for one in lines)


def _clock(facts: dict[str, Any]) -> str:
    if "power_w" not in facts:  # no GPU, or no nvidia-smi
        return ""
    text = f" The GPU drew {facts['power_w']:.0f} W at {facts['sm_clock_mhz']:,.0f} MHz"
    if facts["at_power_limit"] < OFTEN:
        return f"{text}."
    return (
        f"{text}: at its power limit, where the clock falls, and with it the FLOP/s that it can reach. Only work that "
        "takes less energy, such as model.fp8, makes it faster."
    )


def _data_wait(facts: dict[str, Any]) -> str:
    wait = facts["data_wait_ms"]
    share = wait / facts["step_ms"]
    text = f" The step waited {wait:.1f} ms ({share:.1%}) for data."
    if share <= LONG_WAIT:
        return text
    row = facts["slow_row"]
    is_one_row = row is not None and row["row_seconds"] > ONE_ROW * row["batch_seconds"]
    if row is not None:
        place = "" if row["worker"] is None else f", in worker {row['worker']}"
        text += f" The slowest row, {row['row']}, took {1e3 * row['row_seconds']:.1f} of the "
        text += f"{1e3 * row['batch_seconds']:.1f} ms of its micro-batch{place}."
    for phase in facts["phases"]:
        if phase["name"] == "data" and (lines := _lines(phase)):
            text = f"{text[:-1]}{lines}."
    if not is_one_row:
        text += " More data.num_workers, smaller media or faster storage would help."
    return text


def _communication(facts: dict[str, Any]) -> str:
    total = facts["comm_ms"]
    exposed = facts["exposed_comm_ms"]
    if not total:
        return ""
    return (
        f" Communication takes {total:.1f} ms per step; {exposed:.1f} ms of it ({exposed / total:.0%}) is "
        "exposed: no kernel computes meanwhile."
    )


def _table(name: str, rows: list[dict[str, Any]], step_ms: float) -> list[str]:
    last = "most in" if name == "phase" else "calls"
    lines = [f"\n| {name} | ms per step | share | {last} |", "| --- | ---: | ---: | ---: |"]
    for row in rows:
        share = row["ms"] / step_ms
        calls = (
            _short(row["lines"][0]["line"] if row["lines"] else "")
            if "lines" in row
            else f"{row['calls']:.0f}"
        )
        lines.append(f"| {_short(row['name'])} | {row['ms']:.2f} | {share:.1%} | {calls} |")
    return lines


def _short(name: str) -> str:
    return re.sub(r"\s+", " ", name).replace("|", "/")[:MAX_NAME]
