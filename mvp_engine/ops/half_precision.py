"""Tensors in half precision on a GPU, which flash kernels and the Triton kernels are for."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None


def is_half_on_gpu(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
