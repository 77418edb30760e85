"""The dtype that autocast is set to."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of matmuls under autocast on the device of `x`; None where autocast is off."""
    device = x.device.type
    if device == "meta":  # autocast does not know it
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
