"""Peak FLOP/s of GPUs: dense bf16 matmuls as the vendors state them, by the name that the driver reports."""

from __future__ import annotations

import functools
import logging
import re

import torch

# TFLOP/s; the first pattern found in the name counts. Figures for sparse matrices are twice these and do not apply.
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
            "the peak FLOP/s of the GPU %r is unknown, so the log has no MFU: add it to mvp_engine/log/peaks.py",
            name,
        )
    return peak
