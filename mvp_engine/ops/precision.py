"""The dtype that autocast is set to, and tensors that kernels in half precision take."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None


def is_half_on_gpu(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of matmuls under autocast on the device of `x`; None where autocast is off."""
    device = x.device.type
    if device == "meta":  # autocast does not know it
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
