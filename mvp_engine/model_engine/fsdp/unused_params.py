"""Parameters that got no gradient: the ranks count together who used which, in the all-reduce of a step's numbers."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mvp_engine.distributed import World
from mvp_engine.errors import UserError


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
