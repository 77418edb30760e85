"""Offloading weights and optimizer states to pinned host memory. The parameters stay the same objects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mvp_engine.model_engine.ema import WeightEMA

Part = Literal["model", "optimizer"]


class Offloader:
    """Keeps track of what is on the host. `move(part, to_host)` does the moving."""

    def __init__(self, setting: str, move: Callable[[Part, bool], None]) -> None:
        self.setting = setting  # none, optimizer, all
        self.on_host: set[Part] = set()
        self._move = move

    @contextlib.contextmanager
    def loaded(self, optimizer: bool) -> Iterator[None]:
        """A context in which the model is on the device, and the optimizer too if it is needed.

        Contexts may be nested: during an evaluation inside of a training the optimizer is on the host.
        """
        before = set(self.on_host)
        offload_optimizer = self.setting != "none" or "optimizer" in before
        idle: set[Part] = {"optimizer"} if offload_optimizer and not optimizer else set()
        self._keep_on_host(idle)
        try:
            yield
        finally:
            self._keep_on_host(before)

    def _keep_on_host(self, parts: set[Part]) -> None:
        for part in parts ^ self.on_host:
            self.move(part, to_host=part in parts)

    def move(self, part: Part, to_host: bool) -> None:
        if (part in self.on_host) != to_host:
            self._move(part, to_host)
            self.on_host ^= {part}


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, so that the copy back is asynchronous."""
    copy = tensor.detach().cpu()
    if isinstance(copy, DTensor):
        copy._local_tensor = copy._local_tensor.pin_memory()
        return copy
    return copy.pin_memory()


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return to_host(tensor) if device.type == "cpu" else tensor.to(device, non_blocking=True)


def move_model(model: nn.Module, device: torch.device) -> None:
    model._apply(partial(_moved, device=device))  # what `model.to` calls; FSDP2 supports it


def move_averages(ema: WeightEMA | None, device: torch.device) -> None:
    for param, average in ema.averages.items() if ema else ():
        ema.averages[param] = _moved(average, device)  # type: ignore[union-attr]


def move_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Move all optimizer states, except those that live on the host anyway: step counts, or what the optimizer says."""
    groups = optimizer.param_groups
    host_steps = not any(group.get("fused") or group.get("capturable") for group in groups)
    is_offloaded = getattr(optimizer, "is_offloaded", lambda param: False)
    for param, state in optimizer.state.items():
        for name, value in state.items():
            stays = host_steps if name == "step" else is_offloaded(param)
            if isinstance(value, Tensor) and not stays:
                state[name] = _moved(value, device)
