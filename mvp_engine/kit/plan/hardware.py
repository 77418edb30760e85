"""GPUs, hosts and networks: memory and bandwidth by the GPU's name, and how long a collective takes."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mvp_engine.errors import UserError
from mvp_engine.log.metrics import peak_of

if TYPE_CHECKING:
    from mvp_engine.kit.plan.record import Collective

GIB = 2**30
FITS = 0.95  # the fraction of the memory that a training can fill
COMMON_GPUS = ("RTX 4090", "RTX 5090", "L40S", "A100", "H100", "RTX PRO 6000", "H200", "B200")

# By a pattern in the GPU's name, of which the first counts: memory in GiB as the driver reports it; its bandwidth in
# TB/s; GB/s in each direction to the other GPUs of a node (NVLink, Infinity Fabric or PCIe) and to the host; whether it
# has FP8 grouped GEMMs (`hf/experts/grouped_mm.py`). Of PCIe four fifths of the specification are assumed.
GPUS: dict[str, tuple[float, float, float, float, bool]] = {
    r"G?B200": (178, 7.7, 900, 50, True),
    r"G?B300": (178, 7.7, 900, 50, False),
    r"H200": (139.8, 4.8, 450, 50, True),
    r"H20": (95, 4.0, 450, 50, True),
    r"H100": (79.1, 3.35, 450, 50, True),
    r"H800": (79.1, 3.35, 200, 50, True),
    r"A100.*40GB": (39.4, 1.56, 300, 25, False),
    r"A100": (79.1, 2.0, 300, 25, False),
    r"A800": (79.1, 2.0, 200, 25, False),
    r"A40|RTX A6000": (44.4, 0.7, 25, 25, False),
    r"L40S?": (44.4, 0.86, 25, 25, False),
    r"A30": (23.5, 0.93, 25, 25, False),
    r"A10G?": (22, 0.6, 25, 25, False),
    r"L4": (22, 0.3, 25, 25, False),
    r"RTX PRO 6000": (95, 1.79, 25, 50, False),
    r"RTX 6000 Ada": (47.5, 0.96, 25, 25, False),
    r"RTX 5090": (31.3, 1.79, 25, 50, False),
    r"RTX 4090": (23.5, 1.0, 25, 25, False),
    r"RTX 4080": (15.6, 0.72, 25, 25, False),
    r"RTX 3090": (23.5, 0.94, 25, 25, False),
    r"T4": (14.6, 0.32, 25, 25, False),
    r"MI3[02]": (191, 5.3, 448, 25, False),
}


@dataclass(frozen=True)
class Gpu:
    flops_per_s: float
    memory: float  # bytes
    bytes_per_s: float
    node_gb_per_s: float = 25.0  # to the other GPUs of its node, in each direction
    host_bytes_per_s: float = 25e9  # between host and GPU, in each direction
    fp8_experts: bool = False


def gpu_by_name(name: str) -> Gpu:
    name = re.sub(r"^(?:rtx)? ?(\d{4})$", r"RTX \1", name, flags=re.IGNORECASE)  # 4090, rtx4090
    peak = peak_of(name)
    for pattern, (gib, terabytes_per_s, node, host, fp8) in GPUS.items():
        is_it = re.search(rf"(?<![A-Z0-9])(?:{pattern})(?![0-9])", name, re.IGNORECASE)
        if peak is not None and is_it:
            return Gpu(peak, gib * GIB, terabytes_per_s * 1e12, node, host * 1e9, fp8)
    known = ", ".join(COMMON_GPUS)
    raise UserError(f"--gpu {name}: unknown. Known are, among others, {known}")


def usable_gib(gpu: str) -> float:
    """The memory that a training can fill."""
    return FITS * gpu_by_name(gpu).memory / GIB


@dataclass(frozen=True)
class Network:
    """How long collectives take, and how much of that a step waits for.

    A group of several nodes with g ranks on each uses the network cards of those g GPUs together, at most at NVLink's
    speed. Ring algorithms move (n - 1) / n of the tensor through every rank, an all-reduce twice. Every call costs a
    latency per doubling of the group. These are specifications and round numbers, not measurements.
    """

    gpus_per_node: int = 8
    nvlink: float = 450.0  # GB/s per GPU and direction, inside a node
    network: float = 50.0  # the same between nodes
    efficiency: float = 0.8  # the fraction of a link's speed that large NCCL calls reach
    node_latency: float = 5e-6  # seconds per doubling of a group inside a node
    network_latency: float = 15e-6  # of a group over several nodes

    def seconds(self, call: Collective) -> float:
        """The time of one collective by itself."""
        size = len(call.ranks)
        nodes = Counter(rank // self.gpus_per_node for rank in call.ranks)
        is_near = len(nodes) == 1
        latency = self.node_latency if is_near else self.network_latency
        per_node = min(nodes.values())
        if call.kind in ("send", "receive"):
            size, per_node, moved = 2, 1, float(call.bytes)
        elif size == 1:
            return 0.0
        elif call.kind == "all-to-all":
            far = call.bytes * (size - per_node) / size / self.network
            near = call.bytes * (per_node - 1) / size / self.nvlink
            return latency * math.log2(size) + max(far, near) / (self.efficiency * 1e9)
        else:
            moved = call.total_bytes * (size - 1) / size * (1 + (call.kind == "all-reduce"))
        speed = self.nvlink if is_near else min(self.nvlink, per_node * self.network)
        return latency * math.log2(size) + moved / (self.efficiency * speed * 1e9)

    def communication(self, calls: Counter[Collective], compute_s: float) -> dict[str, float]:
        """Seconds of a rank's collectives in one step of `compute_s`: in total, and those that the step waits for.

        FSDP and DDP overlap theirs with compute: the step waits for what is longer. It waits for all others.
        """
        overlapped = sum(n * self.seconds(call) for call, n in calls.items() if call.overlaps)
        blocking = sum(n * self.seconds(call) for call, n in calls.items() if not call.overlaps)
        return {
            "total_s": overlapped + blocking,
            "blocking_s": blocking,
            "exposed_s": blocking + max(0.0, overlapped - compute_s),
        }
