"""What decides about a step, on the device: gradient norm, unused parameters, loss scale, loss spikes.

`StatusReader` copies the result code of a step to the host and turns it into a StepStatus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mvp_engine.distributed import World
from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.errors import UserError
from mvp_engine.model_engine.base import StepStatus


class LossScale:
    """fp16's dynamic loss scale: halved on overflow, doubled after `interval` good steps.

    It multiplies a *sum* over hundreds to many thousands of tokens, so it starts low and may have to go below 1.
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
    """Finds a loss spike: a loss far above those before it. Its inputs are equal on all ranks, so its answers are.

    It keeps a moving mean and variance of the losses that were accepted. A spike is not added to them; but after
    `PATIENCE` spikes in a row the loss has moved for good, and the statistics restart.
    """

    PATIENCE = 5
    WARMUP = 20  # losses before the first verdict
    MEMORY = 0.98  # of the moving mean

    def __init__(self, sigmas: float, device: torch.device) -> None:
        self.sigmas = sigmas
        # losses accepted, spikes in a row, mean, variance
        self.state = torch.zeros(4, dtype=torch.float64, device=device)

    def is_spike(self, loss: Tensor) -> Tensor:
        """Judge a loss and update the statistics. A non-finite loss is no spike and changes nothing."""
        accepted, in_a_row, mean, variance = self.state.unbind()
        above = loss - mean
        limit = self.sigmas * variance.sqrt() + 1e-3 * mean.abs()
        spike = loss.isfinite() & (accepted >= self.WARMUP) & (above > limit)
        weight = (1 / (accepted + 1)).clamp(min=1 - self.MEMORY)  # a plain mean at first
        new_mean = mean + weight * above
        new_variance = (1 - weight) * (variance + weight * above**2)
        zero = torch.zeros_like(in_a_row)
        if_accepted = torch.stack([accepted + 1, zero, new_mean, new_variance])
        if_spike = torch.stack([accepted, in_a_row + 1, mean, variance])
        restart = in_a_row + 1 >= self.PATIENCE
        if_spike = torch.where(restart, torch.zeros_like(self.state), if_spike)
        updated = torch.where(spike, if_spike, if_accepted)
        self.state = torch.where(loss.isfinite(), updated, self.state)
        return spike


class GradNorms(NamedTuple):
    """Norms of this rank's shards of some gradients."""

    params: list[Tensor]
    norms: Tensor


def local_grad_norm_sq(params: list[Any], world_size: int) -> tuple[Tensor, list[GradNorms]]:
    """What this rank adds to the squared norm of all gradients, in float64.

    An element that several ranks hold is added by each of them, with a weight of one over their number. So one
    all-reduce over all ranks gives the whole, whatever meshes the gradients are sharded over.
    """
    groups: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # by number of shards
    for param in params:
        shards = 1
        if isinstance(param.grad, DTensor):
            sizes = zip(param.grad.placements, param.grad.device_mesh.shape, strict=True)
            shards = math.prod(size for place, size in sizes if not place.is_replicate())
        members, grads = groups.setdefault(shards, ([], []))
        members.append(param)
        grads.append(local_tensor(param.grad))
    device = params[0].device if params else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    every: list[GradNorms] = []
    for shards, (members, grads) in groups.items():
        # Converted together: one kernel, not hundreds.
        norms = torch.stack(torch._foreach_norm(grads)).double()
        total += norms.square().sum() * (shards / world_size)
        every.append(GradNorms(members, norms))
    return total, every


def first_nonfinite_grad(model: nn.Module, norms: list[GradNorms]) -> str | None:
    """The name of the last parameter with a non-finite gradient: backward reaches the last one first."""
    bad: set[int] = set()
    for group in norms:
        values = group.norms.tolist()
        pairs = zip(group.params, values, strict=True)
        bad |= {id(param) for param, norm in pairs if not math.isfinite(norm)}
    names = [name for name, param in model.named_parameters() if id(param) in bad]
    return names[-1] if names else None


class Places(NamedTuple):
    """Where each of some parameters is in a list of `total` ones."""

    places: list[int]
    total: int


class ParameterUsage:
    """Which parameters got a gradient on any rank.

    A parameter that no rank used must have no gradient: weight decay would change it by its zeros. Ranks that used a
    parameter know that it is used, so only ranks that did not have to read the counts from the device.
    """

    def __init__(self, params: list[nn.Parameter], places: Places | None = None) -> None:
        """`places`: of the parameters of a pipeline stage among those of all stages."""
        self.params = params
        self.places = places or Places(list(range(len(params))), len(params))

    def of_rank(self, used: Set[Tensor], device: torch.device) -> Tensor:
        """1 for each parameter that this rank used, 0 for the others; to be all-reduced."""
        flags = [0.0] * self.places.total
        for param, place in zip(self.params, self.places.places, strict=True):
            flags[place] = float(param in used)
        return torch.tensor(flags, dtype=torch.float64).to(device, non_blocking=True)

    def drop_unused(self, used: Set[Tensor], counts: Tensor) -> None:
        """Remove the gradients of parameters that no rank used. `counts`: the sum of all ranks' flags."""
        if all(param in used for param in self.params):
            return
        of_all = counts.tolist()  # a host sync
        for param, place in zip(self.params, self.places.places, strict=True):
            if of_all[place] == 0:
                param.grad = None

    def check_ranks_agree(
        self, used: Set[Tensor], model: nn.Module, world: World, ranks: range
    ) -> None:
        """Raise on all `ranks` if some of them did not use a parameter: FSDP2 before torch 2.13 cannot reduce it."""
        names = [name for name, param in model.named_parameters() if param in used]
        by_rank = world.all_gather(names)[ranks.start : ranks.stop]
        if odd := set().union(*by_rank) - set.intersection(*map(set, by_rank)):
            raise UserError(
                f"{min(odd)} was used on some of the {world.size} ranks only, which FSDP2 of torch "
                f"{torch.__version__} cannot reduce: install torch 2.13, or set parallel.shard=1"
            )


# Bits of the result code: why the update was skipped. 0: the weights were updated.
NONFINITE_LOSS = 1
ZERO_WEIGHT = 2
NONFINITE_GRAD = 4
LOSS_SPIKE = 8
NONFINITE_WEIGHT = 16
REASONS = {  # the first cause first
    NONFINITE_WEIGHT: "the loss weight is not finite",
    ZERO_WEIGHT: "the batch has weight 0 (nothing to train on)",
    NONFINITE_LOSS: "the loss is not finite",
    NONFINITE_GRAD: "a gradient is not finite",
    LOSS_SPIKE: "the loss is far above those before it",
}


class _PendingCode(NamedTuple):
    # [code, loss scale, loss, is micro-batch 0 finite, ...] on the host: one copy brings all
    values: Tensor
    copy_done: torch.cuda.Event | None  # recorded after the copy; None if it was synchronous


class StatusReader:
    """Copies the code of a step to the host asynchronously; the caller reads it just before the next update.

    By then a whole forward and backward is queued, so the GPU stays busy while the host waits.
    """

    def __init__(
        self,
        has_loss_scale: bool,
        on_update: Callable[[], None],
        find_bad_grad: Callable[[], str | None],
    ) -> None:
        self.has_loss_scale = has_loss_scale
        self.on_update = on_update  # advances the learning-rate schedule
        # Returns the first parameter with a non-finite gradient, from norms of the step that is read.
        self.find_bad_grad = find_bad_grad
        self._pending: _PendingCode | None = None
        self._statuses: list[StepStatus] = []

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
        """Wait for the last step, if its code was not read yet, and keep its status for `take`."""
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
        elif code == NONFINITE_GRAD and not status.overflow:  # the loss was finite
            name = self.find_bad_grad()
            if name is not None:
                status = StepStatus(f"{status.reason}, that of {name}")
        loss = None if code & ZERO_WEIGHT else values[2]
        bad = tuple(i for i, is_finite in enumerate(values[3:]) if not is_finite)
        self._statuses.append(replace(status, loss=loss, micro_batches=bad))

    def take(self) -> list[StepStatus]:
        """The statuses read since the last call."""
        statuses = self._statuses
        self._statuses = []
        return statuses


def decode_status(code: int, loss_scale: float | None) -> StepStatus:
    """The status for a code, its first cause first: a zero weight makes the loss NaN, that makes gradients NaN.

    `loss_scale` is the fp16 loss scale, or None.
    """
    cause = next((bit for bit in REASONS if code & bit), None)
    if cause is None:
        return StepStatus(None)
    # At the lowest loss scale no smaller one can help: then it is an error of its own.
    if cause == NONFINITE_GRAD and loss_scale is not None and loss_scale > LossScale.LOWEST:
        reason = f"fp16 gradients overflowed at loss scale {loss_scale:g}"
        return StepStatus(reason, overflow=True)
    return StepStatus(REASONS[cause])
