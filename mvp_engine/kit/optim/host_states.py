"""Optimizer states in memory of the host, pinned where there is a GPU."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.errors import UserError
from mvp_engine.ops.host_memory import GIB, available_host_memory, pinned_zeros

KEY = "optim.offload"
FIX = "Free host memory, set optim.state_dtype=bfloat16 or int8, or leave optim.offload out"


def host_zeros_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros on the host with the shape and the placements of a tensor."""
    shape = local_tensor(tensor.detach()).shape
    is_pinned = torch.cuda.is_available()
    host = pinned_zeros(shape, dtype, KEY, FIX) if is_pinned else torch.zeros(shape, dtype=dtype)
    if not isinstance(tensor, DTensor):
        return host
    # Of a mesh of GPUs, with a local tensor on the host: `DTensor.from_local` would move it to the GPU.
    sharded = torch.empty_like(tensor.detach(), dtype=dtype, device="cpu")
    assert isinstance(sharded, DTensor)
    sharded._local_tensor = host
    return sharded


def host_copy(value: Tensor) -> Tensor:
    """A state on the host: itself if it is there already, in memory that `host_zeros_like` has allocated."""
    local = local_tensor(value)
    is_pinned = local.is_pinned() or not torch.cuda.is_available()
    if local.device.type == "cpu" and is_pinned:
        return value
    copy = host_zeros_like(value, value.dtype)
    local_tensor(copy).copy_(local)
    return copy


def check_host_memory(size: int) -> None:
    """Raise for states of this rank that do not fit into the memory of this machine, before its first step.

    The other ranks of the machine need about as much.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = ranks * size
    available = available_host_memory()
    if available is not None and needed > available:
        raise UserError(
            f"optim.offload keeps {needed / GIB:.1f} GiB of optimizer states in the memory of this machine, for "
            f"{ranks} of its ranks, and {available / GIB:.1f} GiB are available. Set optim.state_dtype=bfloat16 or "
            "int8, shard the model (parallel.shard), or leave optim.offload out"
        )
