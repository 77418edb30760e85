"""Metrics of an interval: added up where the values are, read and reduced over ranks once, at the end of it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mvp_engine.distributed import World

RESERVED = {"step", "epoch", "split", "lr", "skipped", "totals", "perf"}

Sums = dict[str, list[float]]  # "mean/<name>" or "total/<name>" -> [sum, weight]


class MetricStore:
    """Weighted means and totals. Adding a tensor never waits for the device."""

    def __init__(self, world: World, counts: bool = True, forgiving: bool = True) -> None:
        self.world = world
        self.counts = counts  # False on a rank whose data another rank has too
        self.forgiving = (
            forgiving  # leave out what is not finite; an evaluation does not, its mean is then None
        )
        self._host: Sums = {}
        self._device: dict[str, Tensor] = {}
        self.resumed = False  # holds a part that an earlier process added

    @property
    def empty(self) -> bool:
        return not self._host and not self._device

    def add(self, name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """`value` is a sum over `weight` items; the mean of everything added is logged."""
        if name in RESERVED:
            raise ValueError(
                f"a metric cannot be called {name!r}; records use that name themselves"
            )
        self._add(f"mean/{name}", value, weight)

    def count(self, name: str, amount: Tensor | float) -> None:
        self._add(f"total/{name}", amount, 0.0)

    def _add(self, key: str, value: Tensor | float, weight: Tensor | float) -> None:
        if isinstance(value, Tensor) or isinstance(weight, Tensor):
            pair = torch.stack([self._scalar(value), self._scalar(weight)])
            if self.forgiving:
                pair = torch.where(pair.isfinite().all(), pair, 0.0)
            self._device[key] = self._device[key] + pair if key in self._device else pair
        elif not self.forgiving or (math.isfinite(value) and math.isfinite(weight)):
            total = self._host.setdefault(key, [0.0, 0.0])
            total[0] += value
            total[1] += weight

    def reduce(self) -> tuple[dict[str, float | None], dict[str, float]]:
        """Means and totals over all ranks, the same on each; then the store is empty.

        One exchange, whichever names a rank has. A mean over nothing is None.
        """
        together: Sums = {}
        for sums in self.world.all_gather(self._read()):
            for key, (value, weight) in sums.items():
                total = together.setdefault(key, [0.0, 0.0])
                total[0] += value
                total[1] += weight
        self._host, self._device, self.resumed = {}, {}, False
        means, totals = {}, {}
        for key, (value, weight) in together.items():
            kind, name = key.split("/", 1)
            if kind == "mean":
                means[name] = value / weight if weight and math.isfinite(value / weight) else None
            else:
                totals[name] = value
        return means, totals

    def state_dict(self) -> dict[str, Any]:
        """Nothing on a rank that does not count: on another layout the sums of all ranks are added up."""
        if not self.counts:
            return {"host": {}, "names": [], "device": torch.zeros(0, 2)}
        device = (
            torch.stack(list(self._device.values())).cpu() if self._device else torch.zeros(0, 2)
        )
        return {
            "host": {k: list(v) for k, v in self._host.items()},
            "names": list(self._device),
            "device": device,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._host = {k: list(v) for k, v in state["host"].items()}
        rows = state["device"].to(self.world.device)
        self._device = {name: rows[i] for i, name in enumerate(state["names"])}
        self.resumed = not self.empty

    def merge(self, state: dict[str, Any]) -> None:
        """Add what another rank had, where a run goes on with fewer ranks."""
        for key, (value, weight) in state["host"].items():
            self._add(key, value, weight)
        for key, pair in zip(state["names"], state["device"], strict=True):
            self._add(key, pair[0], pair[1])
        self.resumed = not self.empty

    def _read(self) -> Sums:
        if not self.counts:
            return {}
        sums = {name: list(pair) for name, pair in self._host.items()}
        if self._device:
            rows = torch.stack(list(self._device.values())).tolist()  # the one wait for the device
            for key, (value, weight) in zip(self._device, rows, strict=True):
                host = sums.setdefault(key, [0.0, 0.0])
                host[0] += value
                host[1] += weight
        return sums

    def _scalar(self, value: Tensor | float) -> Tensor:
        return device_scalar(value, self.world.device)


def device_scalar(value: Tensor | float, device: torch.device) -> Tensor:
    """A number as a float64 scalar on the device, without waiting for the device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)
