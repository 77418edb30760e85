"""The facts of a profile as one Markdown page: idle time, kinds of work, longest kernels, memory."""

from __future__ import annotations

import re
from typing import Any

LONG_WAIT = 0.1  # of a step
OFTEN = 0.5  # of the time
MAX_NAME = 90  # characters of a kernel's name
MAX_KERNELS = 20  # profile.json has more


def page(facts: dict[str, Any], title: str) -> str:
    step = facts["step_ms"]
    intro = f"{facts['steps']} steps of {step:.1f} ms, {facts['step_ms_alone']:.1f} ms without the profiler."
    lines = [
        f"# {title}",
        f"\n{intro}{_idle(facts)}{_clock(facts)}{_data_wait(facts)}{_communication(facts)}",
    ]
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
    return (
        f" The device was idle for {facts['idle']:.1%} of the time, with {facts['launches']:,.0f} kernels and copies "
        "per step."
    )


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
    if share > LONG_WAIT:
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
    lines = [f"\n| {name} | ms per step | share | calls |", "| --- | ---: | ---: | ---: |"]
    for row in rows:
        share = row["ms"] / step_ms
        lines.append(
            f"| {_short(row['name'])} | {row['ms']:.2f} | {share:.1%} | {row['calls']:.0f} |"
        )
    return lines


def _short(name: str) -> str:
    return re.sub(r"\s+", " ", name).replace("|", "/")[:MAX_NAME]
