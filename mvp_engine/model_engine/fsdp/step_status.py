"""How a step ended: the verdict that is computed on the device, and the status that the host makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mvp_engine.model_engine.base import StepStatus
from mvp_engine.model_engine.fsdp.loss_scale import LossScale

# Bits of the verdict. 0: the weights were updated.
NONFINITE_LOSS = 1
ZERO_WEIGHT = 2
NONFINITE_GRAD = 4
LOSS_SPIKE = 8


class _Pending(NamedTuple):
    verdict: Tensor  # [code, loss scale] on the host
    copied: torch.cuda.Event | None  # recorded behind the copy; None if it is done


class StatusReader:
    """Reads the verdict of a step as late as possible: on a GPU, when the next step prepares its update.

    By then a whole forward and backward is queued on the GPU, so the wait costs nothing.
    """

    def __init__(
        self, is_fp16: bool, on_update: Callable[[], None], bad_grad: Callable[[], str | None]
    ) -> None:
        self.is_fp16 = is_fp16
        self.on_update = on_update  # called when a step is known to have updated the weights
        self.bad_grad = bad_grad  # the name of the first parameter with a non-finite gradient
        self._pending: _Pending | None = None
        self._statuses: list[StepStatus] = []

    def put(self, verdict: Tensor, asynchronous: bool) -> None:
        """A step ended with this verdict, [code, loss scale]."""
        if not asynchronous:
            self._pending = _Pending(verdict.cpu(), None)
            self.read()
            return
        host = torch.empty(2, dtype=torch.float64, pin_memory=True)
        host.copy_(verdict, non_blocking=True)
        self._pending = _Pending(host, torch.cuda.current_stream().record_event())

    def read(self) -> None:
        """Wait for the last step, if its verdict was not read yet."""
        if self._pending is None:
            return
        pending = self._pending
        self._pending = None
        if pending.copied is not None:
            pending.copied.synchronize()
        code, scale = pending.verdict.tolist()
        status = status_of(int(code), scale if self.is_fp16 else None)
        if status.reason is None:
            self.on_update()
        elif code == NONFINITE_GRAD and not status.overflow:
            name = self.bad_grad()
            if name is not None:
                status = StepStatus(f"{status.reason}, that of {name}")
        self._statuses.append(status)

    def take(self) -> list[StepStatus]:
        """The statuses since the last call."""
        statuses = self._statuses
        self._statuses = []
        return statuses


def status_of(code: int, loss_scale: float | None) -> StepStatus:
    """The status for a verdict; `loss_scale` is that of fp16 training."""
    if code == 0:
        return StepStatus(None)
    if code & ZERO_WEIGHT:
        return StepStatus("the batch has weight 0 (nothing to train on)")
    if code & NONFINITE_LOSS:
        return StepStatus("the loss is not finite")
    if not code & NONFINITE_GRAD:
        return StepStatus("the loss is far above those before it")
    if loss_scale is not None and loss_scale > LossScale.LOWEST:
        return StepStatus(f"fp16 gradients overflowed at loss scale {loss_scale:g}", overflow=True)
    return StepStatus("a gradient is not finite")
