"""Metrics as text: one place for units, so that terminal, log file and `mvp runs` agree."""

from __future__ import annotations

import re
from typing import Any

# Keys of a record that are shown first, elsewhere, or not at all.
_NOT_IN_ORDER = {"loss", "grad_norm", "step", "epoch", "split", "perf", "totals", "lr", "fill"}

_SHARES = {
    "accuracy",
    "acc",
    "exact",
    "share",
    "fraction",
    "fill",
    "mfu",
    "wait",
    "recall",
    "f1",
    "pass",
}


def number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == 0 or 0.001 <= abs(value) < 100_000:
        return f"{value:.4g}"
    return f"{value:.2e}"


def rate(value: float) -> str:
    """A large number with three digits and a unit prefix, such as 51.2k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if not (days or hours):
        return f"{minutes}:{rest:02d}"
    prefix = f"{days}d " if days else ""
    return f"{prefix}{hours}:{minutes:02d}:{rest:02d}"


def shown(record: dict[str, Any]) -> list[tuple[str, str]]:
    """The (name, text) pairs of a record in reading order, without bookkeeping keys."""
    names = {"loss": "loss", "grad_norm": "grad"}
    pairs = [(name, number(record[key])) for key, name in names.items() if key in record]
    rates = [key for key in record if is_learning_rate(key)]
    pairs += [(key, f"{record[key]:.2e}") for key in rates]
    for key, value in record.items():
        is_hidden = key in _NOT_IN_ORDER or (key == "skipped" and not value)
        if not is_hidden and key not in rates:
            pairs.append((key, number(value)))
    return pairs + _performance({"fill": record.get("fill"), **record.get("perf", {})})


def is_share(name: str) -> bool:
    """Whether a metric is a part of a whole, such as an accuracy, by the words of its name."""
    return not _SHARES.isdisjoint(re.split(r"[_/. @]", name))


def is_learning_rate(key: str) -> bool:
    return key == "lr" or key.startswith("lr/")


def _performance(perf: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = []
    for key, value in perf.items():
        if key.endswith("_per_s"):
            pairs.append((f"{key.removesuffix('_per_s')}/s", rate(value)))
    for name, key in (("mfu", "mfu"), ("fill", "fill"), ("data", "data_wait")):
        if perf.get(key) is not None:
            pairs.append((name, f"{100 * perf[key]:.1f}%"))
    if "memory_gib" in perf:
        pairs.append(("mem", f"{perf['memory_gib']:.2f} GiB"))
    if "eta_s" in perf:
        pairs.append(("eta", duration(perf["eta_s"])))
    return pairs


def line(record: dict[str, Any], total_steps: int | None) -> str:
    """A record as one line of the log."""
    of = f"/{total_steps}" if total_steps else ""
    head = f"{record['split']:>5} step {record['step']}{of} epoch {record['epoch']}"
    return head + "  " + "  ".join(f"{name} {text}" for name, text in shown(record))
