"""Moving weights and moments between the GPU and pinned host memory. The parameters stay the same objects."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, from where it comes back at full speed."""
    copy = tensor.detach().cpu()
    if isinstance(copy, DTensor):
        copy._local_tensor = copy._local_tensor.pin_memory()
        return copy
    return copy.pin_memory()


def move_model(model: nn.Module, device: torch.device) -> None:
    move: Callable[[Tensor], Tensor] = (
        to_host if device.type == "cpu" else lambda tensor: tensor.to(device, non_blocking=True)
    )
    model._apply(move)  # the way of `model.to`, which FSDP2 knows about


def move_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Everything that the optimizer keeps beside a parameter, but for step counts that live on the host anyway."""
    host_steps = not any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and not (host_steps and name == "step"):
                state[name] = (
                    to_host(value) if device.type == "cpu" else value.to(device, non_blocking=True)
                )
