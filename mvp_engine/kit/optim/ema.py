"""An exponential moving average (EMA) of the weights, kept as one more optimizer state of each parameter.

As a state it is saved, sharded and resharded like the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mvp_engine.checkpoint.state import EMA
from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.kit.optim.host_states import host_zeros_like


def create_ema(param: Tensor, state: dict[str, Any], *, on_host: bool = False) -> None:
    if not on_host:
        state[EMA] = param.detach().to(torch.float32, copy=True)
        return
    state[EMA] = host_zeros_like(param, torch.float32)
    local_tensor(state[EMA]).copy_(local_tensor(param.detach()))


def update_ema_(
    weight: Tensor, ema: Tensor, step: Tensor, decay: float, found_inf: Tensor | None
) -> None:
    """Move the EMA towards the weights of this rank, unless the step is skipped.

    The decay of the first steps is smaller, so that the initial weights leave the average: after ten steps with a
    decay of 0.999 they would still be 99 % of it; with the smaller decay they are less than 0.01 %.
    """
    early_decay = (1 + step) / (10 + step)
    share = 1 - early_decay.clamp(max=decay)
    if found_inf is not None:
        share = share * (1 - found_inf)
    difference = weight - ema
    ema.add_(difference.mul_(share))


@torch.no_grad()
def swap_ema_(states: Mapping[Tensor, dict[str, Any]]) -> None:
    """Swap the values of each parameter and its EMA, in place."""
    for param, state in states.items():
        if EMA not in state:
            continue
        weight = local_tensor(param)
        ema = local_tensor(state[EMA])
        previous = weight.clone()
        weight.copy_(ema)
        ema.copy_(previous)
