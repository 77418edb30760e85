"""GPUs, hosts and networks: memory and bandwidth by the GPU's name, and how long a collective takes."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mvp_engine.errors import UserError
from mvp_engine.log.peaks import peak_of

if TYPE_CHECKING:
    from mvp_engine.kit.plan.record import Collective

GIB = 2**30
FITS = 0.95  # the fraction of the memory that a training can fill
COMMON_GPUS = ("RTX 4090", "RTX 5090", "L40S", "A100", "H100", "RTX PRO 6000", "H200", "B200")

# By a pattern in the GPU's name, of which the first counts: memory in GiB as the driver reports it, its bandwidth in
# TB/s, and GB/s in each direction between the GPUs of a node: NVLink or Infinity Fabric, else PCIe.
PCIE = 25.0
GPUS: dict[str, tuple[float, float, float]] = {
    r"G?B[23]00": (178, 7.7, 900),
    r"H200": (139.8, 4.8, 450),
    r"H20": (95, 4.0, 450),
    r"H100": (79.1, 3.35, 450),
    r"H800": (79.1, 3.35, 200),
    r"A100.*40GB": (39.4, 1.56, 300),
    r"A100": (79.1, 2.0, 300),
    r"A800": (79.1, 2.0, 200),
    r"A40|RTX A6000": (44.4, 0.7, PCIE),
    r"L40S?": (44.4, 0.86, PCIE),
    r"A30": (23.5, 0.93, PCIE),
    r"A10G?": (22, 0.6, PCIE),
    r"L4": (22, 0.3, PCIE),
    r"RTX PRO 6000": (95, 1.79, PCIE),
    r"RTX 6000 Ada": (47.5, 0.96, PCIE),
    r"RTX 5090": (31.3, 1.79, PCIE),
    r"RTX 4090": (23.5, 1.0, PCIE),
    r"RTX 4080": (15.6, 0.72, PCIE),
    r"RTX 3090": (23.5, 0.94, PCIE),
    r"T4": (14.6, 0.32, PCIE),
    r"MI3[02]": (191, 5.3, 448),
}
# A copy between host and GPU reaches 50 GB/s in each direction over PCIe 5, and 25 over PCIe 4: assumed, four fifths
# of the specification.
PCIE_5 = r"G?B[23]00|H200|H20|H100|H800|RTX PRO 6000|RTX 5090"
FP8_EXPERTS = (
    r"G?H200|H20|H100|H800|G?B200"  # with FP8 grouped GEMMs: `hf/experts/fp8_grouped_mm.py`
)


@dataclass(frozen=True)
class Gpu:
    flops_per_s: float
    memory: float  # bytes
    bytes_per_s: float
    host_bytes_per_s: float = 25e9  # between host and GPU, in each direction
    node_gb_per_s: float = PCIE  # to the other GPUs of its node, in each direction
    fp8_experts: bool = False


def gpu_by_name(name: str) -> Gpu:
    name = re.sub(r"^(?:rtx)? ?(\d{4})$", r"RTX \1", name, flags=re.IGNORECASE)  # 4090, rtx4090
    peak = peak_of(name)
    for pattern, (gib, terabytes_per_s, node) in GPUS.items():
        if peak is not None and _is(pattern, name):
            host = 50e9 if _is(PCIE_5, name) else 25e9
            fp8 = _is(FP8_EXPERTS, name)
            return Gpu(peak, gib * GIB, terabytes_per_s * 1e12, host, node, fp8)
    known = ", ".join(COMMON_GPUS)
    raise UserError(f"--gpu {name}: unknown. Known are, among others, {known}")


def _is(pattern: str, name: str) -> bool:
    """Whether a GPU's name has the pattern as a word."""
    return re.search(rf"(?<![A-Z0-9])(?:{pattern})(?![0-9])", name, re.IGNORECASE) is not None


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
