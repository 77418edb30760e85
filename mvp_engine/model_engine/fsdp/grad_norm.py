"""The arithmetic of a step that knows nothing of the model: loss scale, global norm, verdict, moving batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BAD_LOSS, NO_WEIGHT, BAD_GRADIENT, SPIKE = 1, 2, 4, 8


class LossScale:
    """fp16's loss scale, kept on the device: halved on overflow, doubled after `interval` good steps.

    It multiplies a *sum* over hundreds to many thousands of tokens, so it starts low and may have to go below 1.
    """

    LOWEST = 2.0**-24

    def __init__(self, device: torch.device, start: float = 2.0**6, interval: int = 2000) -> None:
        self.value = torch.tensor(start, device=device)
        self.good = torch.zeros((), dtype=torch.int64, device=device)
        self.interval = interval

    def update(self, bad: Tensor) -> None:
        self.good = torch.where(bad, 0, self.good + 1)
        grow = self.good >= self.interval
        self.value = torch.where(
            bad,
            (self.value / 2).clamp(min=self.LOWEST),
            torch.where(grow, self.value * 2, self.value),
        )
        self.good = torch.where(grow, 0, self.good)


class SpikeDetector:
    """Is a loss far above those before it? Kept on the device, from numbers that are the same on all ranks.

    It knows a moving mean and deviation of the losses that were taken. A spike is not taken into them; but after
    `PATIENCE` in a row the loss is where it is now, and they begin anew.
    """

    PATIENCE, WARMUP, MEMORY = 5, 20, 0.98

    def __init__(self, sigmas: float, device: torch.device) -> None:
        self.sigmas = sigmas
        self.state = torch.zeros(
            4, dtype=torch.float64, device=device
        )  # losses taken, spikes in a row, mean, variance

    def judge(self, loss: Tensor) -> Tensor:
        """Is it one? What is not finite is left to others, and changes nothing here."""
        taken, row, mean, variance = self.state
        above = loss - mean
        spike = (
            loss.isfinite()
            & (taken >= self.WARMUP)
            & (above > self.sigmas * variance.sqrt() + 1e-3 * mean.abs())
        )
        lost = row + 1 >= self.PATIENCE
        weight = (1 / (taken + 1)).clamp(min=1 - self.MEMORY)  # a plain mean at first
        after = torch.stack(
            [
                taken + 1,
                torch.zeros_like(row),
                mean + weight * above,
                (1 - weight) * (variance + weight * above**2),
            ]
        )
        ignored = torch.where(
            lost, torch.zeros_like(self.state), torch.stack([taken, row + 1, mean, variance])
        )
        self.state = torch.where(loss.isfinite(), torch.where(spike, ignored, after), self.state)
        return spike


Norms = list[
    tuple[list[Tensor], Tensor]
]  # parameters, and the norms of this rank's parts of their gradients


def local_grad_norm_sq(params: list[Any], ranks: int) -> tuple[Tensor, Norms]:
    """What this rank adds to the squared norm of all gradients, in float64, whatever meshes they are sharded over.

    An element that several ranks hold is added by each of them, as so much smaller a part. So the sum over all ranks,
    in one collective, is the whole.
    """
    groups: dict[
        int, tuple[list[Tensor], list[Tensor]]
    ] = {}  # by the number of shards that a gradient is in
    for param in params:
        shards, local = 1, (grad := param.grad)
        if isinstance(grad, DTensor):
            sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
            shards, local = (
                math.prod(size for placement, size in sizes if not placement.is_replicate()),
                grad.to_local(),
            )
        members, grads = groups.setdefault(shards, ([], []))
        members.append(param)
        grads.append(local)
    total = torch.zeros((), dtype=torch.float64, device=params[0].device if params else None)
    every: Norms = []
    for shards, (members, grads) in groups.items():
        norms = torch.stack(
            torch._foreach_norm(grads)
        ).double()  # converted together: one kernel, not hundreds
        total += norms.square().sum() * (shards / ranks)
        every.append((members, norms))
    return total, every


def whose(model: nn.Module, norms: Norms) -> str:
    """Whose gradient is not finite: of several the last, which backward, that begins with the last, came upon first."""
    bad = {
        id(p)
        for params, some in norms
        for p, norm in zip(params, some.tolist(), strict=True)
        if not math.isfinite(norm)
    }
    names = [name for name, param in model.named_parameters() if id(param) in bad]
    return f", that of {names[-1]}" if names else ""


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors, and anything else with a `to`, inside dicts, lists and tuples; the rest stays as it is."""
    if hasattr(value, "to"):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value


def checked(given: Any) -> tuple[Tensor, Tensor | float]:
    if not (isinstance(given, tuple) and len(given) == 2):
        raise TypeError(f"forward_step must return (loss_sum, weight), not {type(given).__name__}")
    loss_sum, weight = given
    if not isinstance(loss_sum, Tensor) or loss_sum.ndim != 0 or not loss_sum.requires_grad:
        raise TypeError(
            "forward_step must return the loss as a summed scalar tensor that carries a gradient"
        )
    return loss_sum, weight


def reason_of(code: int, scale: float | None) -> tuple[str | None, bool]:
    if code == 0:
        return None, False
    if code & NO_WEIGHT:
        return "the batch has weight 0 (nothing to train on)", False
    if code & BAD_LOSS:
        return "the loss is not finite", False
    if code & BAD_GRADIENT and scale is not None and scale > LossScale.LOWEST:
        return f"fp16 gradients overflowed at loss scale {scale:g}", True
    return (
        "a gradient is not finite"
        if code & BAD_GRADIENT
        else "the loss is far above those before it",
        False,
    )
