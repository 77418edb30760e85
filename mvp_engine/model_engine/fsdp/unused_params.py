"""Parameters that got no gradient: the ranks count together who used which, in the all-reduce of a step's numbers."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor, nn

from mvp_engine.errors import UserError


class ParameterUsage:
    """Which parameters got a gradient on any rank.

    A parameter that no rank used must have no gradient: weight decay would change it by its zeros. Ranks that used a
    parameter know that it is used, so only ranks that did not have to read the counts from the device.
    """

    def __init__(
        self, model: nn.Module, params: list[nn.Parameter], ranks_may_differ: bool
    ) -> None:
        self.names = {id(param): name for name, param in model.named_parameters()}
        self.params = params
        self.ranks_may_differ = ranks_may_differ  # False: the backend cannot reduce such gradients

    def of_rank(self, used: Set[Tensor], device: torch.device) -> Tensor:
        """1 for each parameter that this rank used, 0 for the others; to be all-reduced."""
        flags = [float(param in used) for param in self.params]
        return torch.tensor(flags, dtype=torch.float64).to(device, non_blocking=True)

    def drop_unused(self, used: Set[Tensor], counts: Tensor) -> None:
        """Remove the gradients of parameters that no rank used. `counts`: the sum of all ranks' flags."""
        unused = [index for index, param in enumerate(self.params) if param not in used]
        if not unused:
            return
        ranks = counts[torch.tensor(unused, device=counts.device)].tolist()  # a host sync
        for index, count in zip(unused, ranks, strict=True):
            param = self.params[index]
            if count == 0:
                param.grad = None
            elif not self.ranks_may_differ:  # FSDP2 usually fails on the other ranks before
                raise UserError(
                    f"{self.names[id(param)]} was used on {count:.0f} rank(s) and not on this one, which FSDP2 of "
                    f"torch {torch.__version__} cannot reduce: install torch 2.13, or set parallel.shard=1"
                )
