"""StatusReader: reads the result code of a step from the device and turns it into a StepStatus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mvp_engine.model_engine.base import StepStatus
from mvp_engine.model_engine.fsdp.loss_scale import LossScale

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
