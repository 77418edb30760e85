"""Decides on the device whether a step updates the weights: gradient norm, unused parameters, loss scale, spikes.

The decision is a result code. `StatusReader` copies it to the host and turns it into a StepStatus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mvp_engine.distributed import World
from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.errors import UserError
from mvp_engine.model_engine.base import StepStatus


class LossScale:
    """fp16's dynamic loss scale: halved on overflow, doubled after `interval` steps without one.

    It multiplies a *sum* of losses over hundreds to many thousands of tokens, not a mean. So it starts low, and may
    have to fall below 1.
    """

    LOWEST = 2.0**-24

    def __init__(self, device: torch.device, start: float = 2.0**6, interval: int = 2000) -> None:
        self.value = torch.tensor(start, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.interval = interval

    def update(self, overflow: Tensor) -> None:
        self.good_steps = torch.where(overflow, 0, self.good_steps + 1)
        grow = self.good_steps >= self.interval
        halved = (self.value / 2).clamp(min=self.LOWEST)
        grown = torch.where(grow, self.value * 2, self.value)
        self.value = torch.where(overflow, halved, grown)
        self.good_steps = torch.where(grow, 0, self.good_steps)

    def state(self) -> list[float]:
        return [float(self.value), int(self.good_steps)]

    def load_state(self, state: list[float]) -> None:
        self.value.fill_(state[0])
        self.good_steps.fill_(int(state[1]))


class SpikeDetector:
    """Finds loss spikes: losses more than `sigmas` standard deviations above the mean of those before.

    It keeps a moving mean and variance of the accepted losses. A spike is not added to them, but after `PATIENCE`
    spikes in a row the higher loss counts as permanent, and the statistics restart. All ranks pass the same losses,
    so they reach the same decisions without communication.
    """

    PATIENCE = 5
    WARMUP = 20  # losses that are accepted before one can be a spike
    MEMORY = 0.98  # decay of the moving mean and variance, after 1 / (1 - MEMORY) = 50 losses

    def __init__(self, sigmas: float, device: torch.device) -> None:
        self.sigmas = sigmas
        # losses accepted, spikes in a row, mean, variance
        self.state = torch.zeros(4, dtype=torch.float64, device=device)

    def is_spike(self, loss: Tensor) -> Tensor:
        """Returns whether a loss is a spike, and updates the statistics.

        A non-finite loss is no spike and does not change the statistics.
        """
        accepted, in_a_row, mean, variance = self.state.unbind()
        excess = loss - mean
        # The second term: where losses hardly vary, a change of 0.1 % is no spike.
        limit = self.sigmas * variance.sqrt() + 1e-3 * mean.abs()
        spike = loss.isfinite() & (accepted >= self.WARMUP) & (excess > limit)
        # First a plain mean, then a moving one.
        weight = (1 / (accepted + 1)).clamp(min=1 - self.MEMORY)
        new_mean = mean + weight * excess
        new_variance = (1 - weight) * (variance + weight * excess**2)
        zero = torch.zeros_like(in_a_row)
        if_accepted = torch.stack([accepted + 1, zero, new_mean, new_variance])
        if_spike = torch.stack([accepted, in_a_row + 1, mean, variance])
        restart = in_a_row + 1 >= self.PATIENCE
        if_spike = torch.where(restart, torch.zeros_like(self.state), if_spike)
        updated = torch.where(spike, if_spike, if_accepted)
        self.state = torch.where(loss.isfinite(), updated, self.state)
        return spike


class GradNorms(NamedTuple):
    """For each of some parameters, the norm of the shard of its gradient that this rank holds."""

    params: list[Tensor]
    norms: Tensor


def local_grad_norm_sq(params: list[Any], world_size: int) -> tuple[Tensor, list[GradNorms]]:
    """Returns this rank's summand of the squared norm of all gradients, in float64, and the norms that it is made of.

    `world_size`: the number of ranks that hold these parameters, as shards or as replicas. Where several ranks hold the
    same element, each adds it with a weight of one over their number. So one sum over all ranks is the squared norm,
    whatever meshes the gradients are sharded over.
    """
    groups: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # by number of shards
    for param in params:
        shards = 1
        if isinstance(param.grad, DTensor):
            sizes = zip(param.grad.placements, param.grad.device_mesh.shape, strict=True)
            shards = math.prod(size for place, size in sizes if not place.is_replicate())
        group_params, grads = groups.setdefault(shards, ([], []))
        group_params.append(param)
        grads.append(local_tensor(param.grad))
    device = params[0].device if params else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    grad_norms: list[GradNorms] = []
    for shards, (group_params, grads) in groups.items():
        # The norms are converted to float64 together: one kernel, not one for each parameter.
        norms = torch.stack(torch._foreach_norm(grads)).double()
        total += norms.square().sum() * (shards / world_size)
        grad_norms.append(GradNorms(group_params, norms))
    return total, grad_norms


def first_nonfinite_grad(model: nn.Module, norms: list[GradNorms]) -> str | None:
    """Returns the name of the first parameter for which backward computed a non-finite gradient.

    Backward runs from the last layer to the first, so this is the last one in the order of the parameters.
    """
    nonfinite: set[int] = set()
    for group in norms:
        values = group.norms.tolist()
        pairs = zip(group.params, values, strict=True)
        nonfinite |= {id(param) for param, norm in pairs if not math.isfinite(norm)}
    names = [name for name, param in model.named_parameters() if id(param) in nonfinite]
    return names[-1] if names else None


class Places(NamedTuple):
    """The position of each parameter of a pipeline stage in the list of those of all stages, which has `total`."""

    places: list[int]
    total: int


class ParameterUsage:
    """Finds the parameters that got no gradient on any rank.

    Their gradients must be None, not zeros: with zeros the optimizer would still apply weight decay. A rank that used
    all of its parameters knows the result; only other ranks copy the counts from the device.
    """

    def __init__(self, params: list[nn.Parameter], places: Places | None = None) -> None:
        """`places`: with pipeline parallel, the positions of `params` among the parameters of all stages."""
        self.params = params
        self.places = places or Places(list(range(len(params))), len(params))

    def of_rank(self, used: Set[Tensor], device: torch.device) -> Tensor:
        """Returns 1 for each parameter that this rank used and 0 for the others. The caller all-reduces them."""
        flags = [0.0] * self.places.total
        for param, place in zip(self.params, self.places.places, strict=True):
            flags[place] = float(param in used)
        return torch.tensor(flags, dtype=torch.float64).to(device, non_blocking=True)

    def drop_unused(self, used: Set[Tensor], counts: Tensor) -> None:
        """Remove the gradients of parameters that no rank used. `counts`: the sum of all ranks' flags."""
        if all(param in used for param in self.params):
            return
        ranks_using = counts.tolist()  # a host sync
        for param, place in zip(self.params, self.places.places, strict=True):
            if ranks_using[place] == 0:
                param.grad = None

    def check_ranks_agree(
        self, used: Set[Tensor], model: nn.Module, world: World, ranks: range
    ) -> None:
        """Raise on all `ranks` if only some of them used a parameter: FSDP2 before torch 2.13 cannot reduce that."""
        names = [name for name, param in model.named_parameters() if param in used]
        by_rank = world.all_gather(names)[ranks.start : ranks.stop]
        if differing := set().union(*by_rank) - set.intersection(*map(set, by_rank)):
            raise UserError(
                f"{min(differing)} was used on some of the {world.size} ranks only, which FSDP2 of torch "
                f"{torch.__version__} cannot reduce: install torch 2.13, or set parallel.shard=1"
            )


# Bits of the result code: why the update was skipped. 0: the weights were updated.
NONFINITE_LOSS = 1
ZERO_WEIGHT = 2
NONFINITE_GRAD = 4
LOSS_SPIKE = 8
NONFINITE_WEIGHT = 16
REASONS = {  # ordered by cause: `decode_status` reports the first reason that applies
    NONFINITE_WEIGHT: "the loss weight is not finite",
    ZERO_WEIGHT: "the batch has weight 0 (nothing to train on)",
    NONFINITE_LOSS: "the loss is not finite",
    NONFINITE_GRAD: "a gradient is not finite",
    LOSS_SPIKE: "the loss is far above those before it",
}


class _PendingCode(NamedTuple):
    # [code, loss scale, loss, is micro-batch 0 finite, ...] on the host. One tensor, so that one copy is enough.
    values: Tensor
    copy_done: torch.cuda.Event | None  # recorded after the copy; None if it was synchronous


@dataclass(eq=False)
class StatusReader:
    """Copies the result code of a step to the host asynchronously. The caller reads it just before the next update.

    By then the forward and backward of the next step are queued, so the GPU stays busy while the host waits.
    """

    has_loss_scale: bool
    on_update: Callable[[], None]  # advances the learning-rate schedule
    # Returns the name of a parameter with a non-finite gradient in the step whose code is read.
    find_bad_grad: Callable[[], str | None]
    _pending: _PendingCode | None = None
    _statuses: list[StepStatus] = field(default_factory=list)

    def put(self, values: Tensor, non_blocking: bool) -> None:
        """Start copying [code, loss scale, loss, ...] of the step that just ended to the host."""
        assert self._pending is None, "read() comes first"
        if not non_blocking:
            self._pending = _PendingCode(values.cpu(), None)
            self.read()
            return
        host = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
        host.copy_(values, non_blocking=True)
        self._pending = _PendingCode(host, torch.cuda.current_stream().record_event())

    def read(self) -> None:
        """Wait for the code of the last step, unless it was read already, and keep its status for `take`."""
        if self._pending is None:
            return
        pending = self._pending
        self._pending = None
        if pending.copy_done is not None:
            pending.copy_done.synchronize()
        values = pending.values.tolist()
        code = int(values[0])
        status = decode_status(code, values[1] if self.has_loss_scale else None)
        if status.reason is None:
            self.on_update()
        elif code == NONFINITE_GRAD and not status.overflow:  # no other bit: the loss was finite
            name = self.find_bad_grad()
            if name is not None:
                status = StepStatus(f"{status.reason}, that of {name}")
        # With a weight of zero there is no mean loss.
        loss = None if code & ZERO_WEIGHT else values[2]
        nonfinite = tuple(i for i, is_finite in enumerate(values[3:]) if not is_finite)
        self._statuses.append(replace(status, loss=loss, micro_batches=nonfinite))

    def take(self) -> list[StepStatus]:
        """Returns the statuses read since the last call."""
        statuses = self._statuses
        self._statuses = []
        return statuses


def decode_status(code: int, loss_scale: float | None) -> StepStatus:
    """Returns the status for a code, with the reason that caused the others.

    For example, a weight of zero makes the loss NaN, which makes the gradients NaN. `loss_scale` is the fp16 loss
    scale of the step, or None.
    """
    cause = next((bit for bit in REASONS if code & bit), None)
    if cause is None:
        return StepStatus(None)
    # At the lowest loss scale a smaller one cannot help, so that is reported as a non-finite gradient.
    if cause == NONFINITE_GRAD and loss_scale is not None and loss_scale > LossScale.LOWEST:
        reason = f"fp16 gradients overflowed at loss scale {loss_scale:g}"
        return StepStatus(reason, overflow=True)
    return StepStatus(REASONS[cause])
