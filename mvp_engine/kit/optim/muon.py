"""Muon: updates that are the momentum of a matrix with all singular values brought near 1.

The full matrix is needed (`orthogonalize.py`); everything else here works on this rank's shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.kit.optim.chunks import chunks
from mvp_engine.kit.optim.orthogonalize import orthogonalize_all
from mvp_engine.kit.optim.state_tensor import StateTensor
from mvp_engine.kit.optim.update import (
    DeviceFlags,
    advance_step_,
    apply_update_,
    gradient_chunk,
)


@dataclass(frozen=True)
class MuonParam:
    """A matrix, or a stack of matrices, with its step count and its state."""

    param: Tensor
    step: Tensor
    momentum: StateTensor


def muon_(params: list[MuonParam], group: dict[str, Any], flags: DeviceFlags) -> None:
    """Update the parameters of a group in place; a collective of the ranks that shard them."""
    lr = group["lr"]
    skip = flags.skip
    momenta: list[Tensor] = []
    for item in params:
        advance_step_(item.step, skip)
        momenta.append(_nesterov_momentum(item, group["momentum"], flags))
    for i, direction in orthogonalize_all(momenta):
        param = params[i].param
        update = direction.float() * (lr * update_scale(param.shape))
        apply_update_(local_tensor(param), update, lr * group["weight_decay"], skip)


def _nesterov_momentum(item: MuonParam, mu: float, flags: DeviceFlags) -> Tensor:
    """Update the momentum; returns what it will be after one more step with this gradient (Nesterov)."""
    key = item.momentum.rounding_key(item.step)
    lookahead = torch.empty_like(item.param, dtype=torch.float32)
    for chunk in chunks(item.param):
        grad = gradient_chunk(item.param, chunk, flags.grad_scale)
        momentum = item.momentum.read(chunk).mul_(mu).add_(grad)
        local_tensor(lookahead)[chunk.index] = grad + mu * momentum
        item.momentum.write(chunk, momentum, key, flags.skip)
    return lookahead


def update_scale(shape: torch.Size) -> float:
    """Brings the update to the size of AdamW's (RMS 0.2), so that its learning rate and weight decay fit."""
    return 0.2 * max(shape[-2:]) ** 0.5
