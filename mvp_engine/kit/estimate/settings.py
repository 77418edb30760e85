"""Inputs of an estimate: the GPU's peak FLOP/s, memory and bandwidth, and the settings that change memory or time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.log.peaks import peak_of
from mvp_engine.model_engine import Settings

GIB = 2**30

# Memory in GiB as the driver reports it, and bandwidth in TB/s, by a pattern in the GPU's name.
MEMORY = {
    r"G?B[23]00": (178, 7.7),
    r"H200": (139.8, 4.8),
    r"H20": (95, 4.0),
    r"H100|H800": (79.1, 3.35),
    r"A100.*40GB": (39.4, 1.56),
    r"A100|A800": (79.1, 2.0),
    r"A40|RTX A6000": (44.4, 0.7),
    r"L40S?": (44.4, 0.86),
    r"A30": (23.5, 0.93),
    r"A10G?": (22, 0.6),
    r"L4": (22, 0.3),
    r"RTX PRO 6000": (95, 1.79),
    r"RTX 6000 Ada": (47.5, 0.96),
    r"RTX 5090": (31.3, 1.79),
    r"RTX 4090": (23.5, 1.0),
    r"RTX 4080": (15.6, 0.72),
    r"RTX 3090": (23.5, 0.94),
    r"T4": (14.6, 0.32),
    r"MI3[02]": (191, 5.3),
}
# GPUs on PCIe 5, and what a copy between host and GPU reaches there and on PCIe 4, in bytes per second and direction:
# assumed, four fifths of the specification.
PCIE_5 = r"G?B[23]00|H200|H20|H100|H800|RTX PRO 6000|RTX 5090"
PCIE_5_BYTES = 50e9
PCIE_4_BYTES = 25e9
FP8_EXPERTS = (
    r"G?H200|H20|H100|H800|G?B200"  # GPUs with FP8 grouped GEMMs: `hf/experts/fp8_grouped_mm.py`
)
COMMON_GPUS = ("RTX 4090", "RTX 5090", "L40S", "A100", "H100", "RTX PRO 6000", "H200", "B200")
FITS = 0.95  # the fraction of the memory that a training can fill


@dataclass(frozen=True)
class Gpu:
    flops_per_s: float
    memory: float  # bytes
    bytes_per_s: float
    host_bytes_per_s: float = PCIE_4_BYTES  # between host and GPU, in each direction


def gpu_by_name(name: str) -> Gpu:
    name = re.sub(r"^(?:rtx)? ?(\d{4})$", r"RTX \1", name, flags=re.IGNORECASE)  # 4090, rtx4090
    peak = peak_of(name)
    for pattern, (gib, terabytes_per_s) in MEMORY.items():
        if peak is not None and _is(pattern, name):
            link = PCIE_5_BYTES if _is(PCIE_5, name) else PCIE_4_BYTES
            return Gpu(peak, gib * GIB, terabytes_per_s * 1e12, link)
    known = ", ".join(COMMON_GPUS)
    raise UserError(f"--gpu {name}: unknown. Known are, among others, {known}")


def _is(pattern: str, name: str) -> bool:
    """Whether a GPU's name has the pattern as a word."""
    found = re.search(rf"(?<![A-Z0-9])(?:{pattern})(?![0-9])", name, re.IGNORECASE)
    return found is not None


def runs_fp8_experts(gpu: str) -> bool:
    return _is(FP8_EXPERTS, gpu)


def usable_gib(gpu: str) -> float:
    """The memory that a training can fill."""
    return FITS * gpu_by_name(gpu).memory / GIB


@dataclass(frozen=True)
class EstimateSettings(Settings):
    """The settings of a model engine, and what else an estimate depends on apart from the model and its batches."""

    precision: str = "bf16"
    compile: Any = "auto"
    gpu: str = "H200"
    state_dtype: str = "float32"
    offload_states: bool = False  # optimizer states are on the host (optim.offload)
    reference_copy: bool = False  # a second, frozen model, as preference training has it
    teacher: str | None = None  # a frozen model of another size, as distillation has it
    text_loss: bool = True  # of an action model: whether co-training has rows of text
    shard: int = 1
    ulysses: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    reshard: bool = True

    @property
    def half_precision(self) -> bool:
        return self.precision != "fp32"

    @property
    def fsdp_ranks(self) -> int:
        """Ranks that shard parameters: FSDP also shards over the ranks of a sequence."""
        return self.shard * self.sequence_ranks

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share the tokens of a batch."""
        return self.context * self.ulysses

    @property
    def weight_ranks(self) -> int:
        """Ranks over which weights, gradients and optimizer states are distributed."""
        return self.fsdp_ranks * self.tensor

    @property
    def text_ranks(self) -> int:
        """Ranks that share the compute of the text model; tensor parallel ranks run the encoders in full."""
        return self.sequence_ranks * self.tensor

    @property
    def compute_bytes(self) -> float:
        """Bytes per element of activations and of weights in use."""
        return 2.0 if self.half_precision else 4.0
