"""What AdamW and Muon have in common when they update a parameter with plain tensor operations.

On a GPU the engine decides about a step by scalars on the device, so that the host need not wait for them: gradients
are divided by `grad_scale`, and a step with `found_inf` leaves weights, states and step counts as they were.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.kit.optim.chunks import Chunk


@dataclass(frozen=True)
class DeviceFlags:
    """The engine's decision about one step."""

    grad_scale: Tensor | None
    found_inf: Tensor | None

    @property
    def skip(self) -> Tensor | None:
        """Whether to skip the step, as a bool on the device; None if that cannot happen."""
        if self.found_inf is None:
            return None
        return self.found_inf > 0


def advance_step_(step: Tensor, skip: Tensor | None) -> None:
    """Count a step unless it is skipped."""
    step.add_(1 if skip is None else (~skip).float())


def advance_steps_(steps: list[Tensor], found_inf: Tensor) -> None:
    """Count a step of all parameters unless it is skipped, without a host sync."""
    # Without `alpha` torch takes the tensor for a number, which it reads from the device.
    torch._foreach_add_(steps, (found_inf <= 0).float(), alpha=1.0)


def gradient_chunk(param: Tensor, chunk: Chunk, grad_scale: Tensor | None) -> Tensor:
    """A chunk of a parameter's gradient in float32, unscaled."""
    assert param.grad is not None
    grad = local_tensor(param.grad)[chunk.index].float()
    return grad if grad_scale is None else grad / grad_scale


def apply_update_(weight: Tensor, update: Tensor, decay: float, skip: Tensor | None) -> None:
    """weight * (1 - decay) - update, in place."""
    if skip is None:
        weight.mul_(1 - decay).sub_(update)
        return
    updated = weight * (1 - decay) - update
    weight.copy_(torch.where(skip, weight, updated))
