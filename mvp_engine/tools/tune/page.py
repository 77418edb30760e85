"""What `mvp tune` prints: a table of its trials, and the lines of the config that was fastest."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from mvp_engine.config.places import override_key
from mvp_engine.errors import count


def page(found: dict[str, Any], minutes: float) -> str:
    """The table, and the lines for the config, of a report of trials."""
    lines = [
        f"{found['config']} on {found['ranks']} x {found['device']}, "
        f"{found['global_batch_tokens']:,} tokens per step",
        "",
        *_table(found["trials"], found["best"]),
        "",
    ]
    if found["time_is_over"]:
        tried = count(len(found["trials"]), "trial")
        lines += [f"The time was over after {tried}: --minutes {3 * minutes:g} tries more.", ""]
    if not found["values"]:
        return "\n".join(lines)
    given = [word for word in found["overrides"] if override_key(word) not in found["values"]]
    words = shlex.join([found["config"], *given, *words_of(found["values"])])
    nproc = f" --nproc {found['nproc']}" if found["nproc"] > 1 else ""
    lines += [
        _verdict(found),
        "",
        yaml.safe_dump(_tree(found["values"]), sort_keys=False),
        f"or: mvp train {words}{nproc}",
    ]
    return "\n".join(lines)


def _table(trials: list[dict[str, Any]], best: int | None) -> list[str]:
    width = max(len(trial["setup"]) for trial in trials)
    top = max(trial["tokens_per_s"] or 0.0 for trial in trials)
    lines = [f"{'setup':<{width}}  tokens/s  of best  peak GiB"]
    for i, trial in enumerate(trials):
        result = trial["problem"]
        if result is None:
            speed = trial["tokens_per_s"]
            result = f"{speed:8,.0f}  {speed / top:7.1%}  {trial['peak_gib']:8.1f}"
        if i == 0:
            result += "  the config as it is"
        if i == best:
            result += "  best"
        lines.append(f"{trial['setup']:<{width}}  {result}")
    return lines


def _verdict(found: dict[str, Any]) -> str:
    if len(found["trials"]) == 1 and not found["time_is_over"]:
        return "Nothing else can be tried: one pack is the whole step, and a row may need all of it. As it is:"
    if found["speedup"] is None:
        return "The config as it is ran out of memory. The fastest that fits:"
    if found["best"] > 0:
        return f"{found['speedup']:.2f} times the throughput of the config as it is:"
    if found["auto"]:
        return "The config as it is was fastest. The numbers that auto stands for on this machine:"
    return "The config as it is was fastest:"


def words_of(values: dict[str, Any]) -> list[str]:
    """Values as overrides of the command line."""
    words = []
    for key, value in values.items():
        text = "null" if value is None else str(value)
        if isinstance(value, dict):
            inner = ",".join(f"{part}:{one}" for part, one in value.items())
            text = f"{{{inner}}}"
        words.append(f"{key}={text}")
    return words


def _tree(values: dict[str, Any]) -> dict[str, Any]:
    """Values as nested sections."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        tree.setdefault(section, {})[name] = value
    return tree
