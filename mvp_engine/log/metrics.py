"""Metrics of a log interval: accumulated on the device, read and reduced over ranks once, at its end.

The MFU among them divides by the peak FLOP/s of a GPU, which is looked up here too.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from typing import Any

import torch
from torch import Tensor

from mvp_engine.distributed import World

# Keys of a record that are no metrics.
RESERVED = {"step", "epoch", "split", "lr", "skipped", "totals", "perf"}

Sums = dict[str, list[float]]  # "mean/<name>" or "total/<name>" -> [sum, weight]


class MetricStore:
    """Weighted means and totals. Adding a tensor causes no host sync."""

    def __init__(self, world: World, contributes: bool = True, skip_nonfinite: bool = True) -> None:
        """`contributes` is False on a rank that holds the same data as another one (model parallel).

        With `skip_nonfinite`, non-finite values are left out; an evaluation keeps them, and its mean is None then.
        """
        self.world = world
        self.contributes = contributes
        self.skip_nonfinite = skip_nonfinite
        self.resumed = False  # contains sums that an earlier process added
        self._host: Sums = {}
        self._device: dict[str, Tensor] = {}

    @property
    def empty(self) -> bool:
        return not self._host and not self._device

    def add(self, name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add `value`, a sum over `weight` items; the mean over everything added is logged."""
        if name in RESERVED:
            raise ValueError(f"a metric cannot be called {name!r}: log records reserve that key")
        value = device_scalar(value, self.world.device)  # for `end_step`
        self._add(f"mean/{name}", value, weight)

    def begin_step(self) -> None:
        """Remember the sums before a step, in case it is skipped."""
        self._before_step = dict(self._device)

    def end_step(self, skipped: Tensor) -> None:
        """Take the means of a skipped step out again, without a host sync. Totals stay: its tokens were computed."""
        for key, pair in self._device.items():
            if key.startswith("mean/"):
                before = self._before_step.get(key)
                if before is None:
                    before = torch.zeros_like(pair)
                self._device[key] = torch.where(skipped, before, pair)

    def count(self, name: str, amount: Tensor | float) -> None:
        """Add to a total, such as the number of tokens."""
        self._add(f"total/{name}", amount, 0.0)

    def _add(self, key: str, value: Tensor | float, weight: Tensor | float) -> None:
        if isinstance(value, Tensor) or isinstance(weight, Tensor):
            device = self.world.device
            pair = torch.stack([device_scalar(value, device), device_scalar(weight, device)])
            if self.skip_nonfinite:
                pair = torch.where(pair.isfinite().all(), pair, 0.0)
            if key in self._device:
                pair = self._device[key] + pair
            self._device[key] = pair
        elif not self.skip_nonfinite or (math.isfinite(value) and math.isfinite(weight)):
            _accumulate(self._host, key, value, weight)

    def reduce(self) -> tuple[dict[str, float | None], dict[str, float]]:
        """Means and totals over all ranks, equal on each; the store is empty afterwards.

        It takes one all-gather, whichever names a rank has. A mean over weight 0 is None.
        """
        sums: Sums = {}
        for rank_sums in self.world.all_gather(self._read()):
            for key, (value, weight) in rank_sums.items():
                _accumulate(sums, key, value, weight)
        self._host = {}
        self._device = {}
        self.resumed = False
        means: dict[str, float | None] = {}
        totals: dict[str, float] = {}
        for key, (value, weight) in sums.items():
            kind, name = key.split("/", 1)
            if kind == "total":
                totals[name] = value
                continue
            mean = value / weight if weight else math.nan
            means[name] = mean if math.isfinite(mean) else None
        return means, totals

    def state_dict(self) -> dict[str, Any]:
        """Empty on a rank that does not contribute: a run on fewer ranks adds up the sums of all."""
        device = self._device if self.contributes else {}
        return {
            "host": _copy(self._host if self.contributes else {}),
            "names": list(device),
            "device": _stack(device).cpu(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = state["device"].to(self.world.device)
        self._host = _copy(state["host"])
        self._device = dict(zip(state["names"], rows, strict=True))
        self.resumed = not self.empty

    def merge(self, state: dict[str, Any]) -> None:
        """Add the sums of another rank, where a run resumes on fewer ranks."""
        for key, (value, weight) in state["host"].items():
            self._add(key, value, weight)
        for key, pair in zip(state["names"], state["device"], strict=True):
            self._add(key, pair[0], pair[1])
        self.resumed = not self.empty

    def _read(self) -> Sums:
        """The sums of this rank on the host: the interval's one host sync."""
        if not self.contributes:
            return {}
        sums = _copy(self._host)
        rows = _stack(self._device).tolist()
        for key, (value, weight) in zip(self._device, rows, strict=True):
            _accumulate(sums, key, value, weight)
        return sums


def _copy(sums: Sums) -> Sums:
    return {key: list(pair) for key, pair in sums.items()}


def _stack(pairs: dict[str, Tensor]) -> Tensor:
    """One row (sum, weight) per key, so that a single copy to the host reads all of them."""
    return torch.stack(list(pairs.values())) if pairs else torch.zeros(0, 2)


def _accumulate(sums: Sums, key: str, value: float, weight: float) -> None:
    pair = sums.setdefault(key, [0.0, 0.0])
    pair[0] += value
    pair[1] += weight


def device_scalar(value: Tensor | float, device: torch.device) -> Tensor:
    """The value as a float64 scalar on the device, without a host sync."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)


# Dense bf16 matmuls as the vendors state them, in TFLOP/s, by the name that the driver reports: the first pattern found
# in it counts. Figures for sparse matrices are twice these and do not apply.
PEAKS = {
    r"GB300": 2500,
    r"B300": 2250,
    r"GB200": 2500,
    r"B200": 2250,
    r"B100": 1750,
    r"H200.*NVL": 835,
    r"GH200|H200|H800|H100(?!.*(PCIe|NVL))": 989,
    r"H100.*PCIe": 756,
    r"H100.*NVL": 835,
    r"H20\b": 148,
    r"A100|A800": 312,
    r"A40\b|RTX A6000": 150,
    r"A30\b": 165,
    r"A10G": 70,
    r"A10\b": 125,
    r"L40S|RTX 6000 Ada": 362,
    r"L40\b": 181,
    r"L20\b": 119,
    r"L4\b": 121,
    r"RTX PRO 6000": 504,
    r"RTX 5090": 210,
    r"RTX 4090": 165,
    r"RTX 4080": 97,
    r"RTX 3090": 71,
    r"V100": 125,
    r"T4\b": 65,
    r"MI355X": 2500,
    r"MI350X": 2300,
    r"MI325X|MI300X": 1307,
    r"MI250": 383,
}


def peak_of(name: str) -> float | None:
    """Peak FLOP/s of a GPU by its name, or None if it is unknown."""
    for pattern, teraflops in PEAKS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return teraflops * 1e12
    return None


@functools.cache
def device_peak(device: torch.device) -> float | None:
    """Peak FLOP/s of this device; None for a CPU and, with one warning, for an unknown GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = peak_of(name)
    if peak is None:
        logging.getLogger("mvp_engine").warning(
            "the peak FLOP/s of the GPU %r is unknown, so the log has no MFU: add it to mvp_engine/log/metrics.py",
            name,
        )
    return peak
