"""A simple model of the network: how long a collective takes, and how much of that a step waits for.

A group inside a node talks over NVLink. A group of several nodes with g ranks on each uses the network cards of those g
GPUs together, at most at NVLink's speed. Ring algorithms move (n - 1) / n of the tensor through every rank, an
all-reduce twice. Every call costs a latency per doubling of the group. `EFFICIENCY` is the part of a link's speed that
large NCCL calls reach.

FSDP and DDP overlap their collectives with compute: a step waits for what is longer than its compute. It waits for all
others (tensor, sequence, expert and pipeline parallel) completely.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from mvp_engine.tools.plan.record import Collective

EFFICIENCY = 0.8
NODE_LATENCY = 5e-6  # seconds per doubling of a group inside a node
NETWORK_LATENCY = 15e-6  # of a group over several nodes
# GB/s in each direction between the GPUs of a node, by a pattern in the GPU's name: NVLink, else PCIe.
NVLINK = {
    r"G?B[23]00": 900.0,
    r"[AH]800": 200.0,
    r"H[12]00|H20": 450.0,
    r"A100": 300.0,
    r"MI3": 448.0,
}
PCIE = 25.0
NETWORK = 50.0  # GB/s of the network card of each GPU: 400 Gb/s


@dataclass(frozen=True)
class Network:
    gpus_per_node: int = 8
    nvlink: float = 450.0  # GB/s per GPU and direction, inside a node
    network: float = NETWORK  # GB/s per GPU and direction, between nodes

    @classmethod
    def of(cls, gpu: str, gpus_per_node: int = 8, network: float | None = None) -> Network:
        found = [speed for pattern, speed in NVLINK.items() if re.search(pattern, gpu, re.I)]
        nvlink = found[0] if found else PCIE
        return cls(gpus_per_node, nvlink, NETWORK if network is None else network)

    def seconds(self, call: Collective) -> float:
        """The time of one collective by itself."""
        size = len(call.ranks)
        nodes = Counter(rank // self.gpus_per_node for rank in call.ranks)
        is_near = len(nodes) == 1
        if call.kind in ("send", "receive"):
            return self._latency(2, is_near) + call.bytes / self._rate(self._speed(is_near, 1))
        if size == 1:
            return 0.0
        per_node = min(nodes.values())
        latency = self._latency(size, is_near)
        if call.kind == "all-to-all":
            far = call.bytes * (size - per_node) / size
            near = call.bytes * (per_node - 1) / size
            return latency + max(far / self._rate(self.network), near / self._rate(self.nvlink))
        moved = call.total_bytes * (size - 1) / size
        moved *= 2 if call.kind == "all-reduce" else 1
        return latency + moved / self._rate(self._speed(is_near, per_node))

    def _speed(self, is_near: bool, per_node: int) -> float:
        return self.nvlink if is_near else min(self.nvlink, per_node * self.network)

    def _rate(self, gigabytes: float) -> float:
        return EFFICIENCY * gigabytes * 1e9

    def _latency(self, size: int, is_near: bool) -> float:
        return math.log2(size) * (NODE_LATENCY if is_near else NETWORK_LATENCY)

    def communication(self, calls: Counter[Collective], compute_s: float) -> dict[str, float]:
        """Seconds of a rank's collectives in one step of `compute_s`: in total, and those that the step waits for."""
        overlapped = 0.0
        blocking = 0.0
        for call, number in calls.items():
            if call.overlaps:
                overlapped += number * self.seconds(call)
            else:
                blocking += number * self.seconds(call)
        return {
            "total_s": overlapped + blocking,
            "blocking_s": blocking,
            "exposed_s": blocking + max(0.0, overlapped - compute_s),
        }
