"""An exponential moving average (EMA) of the weights, whatever the optimizer.

An optimizer may keep it itself, as one more state of each parameter, and then has a context `averaged()`: that of the
optimizer kit does. For any other optimizer the model engine keeps it. Both are saved under the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mvp_engine.checkpoint.format import Reader
from mvp_engine.checkpoint.state import ema_name
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.errors import UserError

if TYPE_CHECKING:
    from mvp_engine.model_engine.base import ModelEngine


class WeightEMA:
    """The EMA of parameters, updated with each optimizer step that is not skipped."""

    def __init__(self, params: Iterable[Tensor], decay: float, device: torch.device) -> None:
        self.params = list(params)
        self.decay = decay
        self.averages: dict[Tensor, Tensor] = {}  # by parameter, in float32 and in its layout
        self.steps = torch.zeros((), dtype=torch.float32, device=device)  # that were not skipped
        self._is_swapped_in = False

    def before_step(self) -> None:
        """The average of a parameter starts at its value before the first step."""
        if self._is_swapped_in:
            raise RuntimeError(
                "the EMA weights are swapped in: leave averaged() before the next step"
            )
        for param in self.params:
            if param not in self.averages:
                self.averages[param] = param.detach().to(torch.float32, copy=True)

    @torch.no_grad()
    def after_step(self, found_inf: Tensor | None) -> None:
        self.steps += 1 if found_inf is None else 1 - found_inf
        for param, average in self.averages.items():
            local = local_tensor(average)
            update_ema_(local_tensor(param), local, self.steps, self.decay, found_inf)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model has the EMA weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        swap_ema_(self.averages)
        self._is_swapped_in = not self._is_swapped_in


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
def swap_ema_(averages: Mapping[Tensor, Tensor]) -> None:
    """Swap the values of each parameter and its EMA, in place."""
    for param, average in averages.items():
        weight = local_tensor(param)
        ema = local_tensor(average)
        previous = weight.clone()
        weight.copy_(ema)
        ema.copy_(previous)


def eval_weights(
    model_engine: ModelEngine, decay: float | None, checkpoint: Path | None
) -> AbstractContextManager[None]:
    """A context in which the model has the weights to evaluate and to export: with a `decay`, the EMA weights.

    In training they are swapped in for the context. A model engine without an optimizer loads them from the checkpoint
    at the first call, and keeps them.
    """
    if decay is None:
        return nullcontext()
    if hasattr(model_engine, "optimizer"):
        return model_engine.averaged()
    if not model_engine.has_ema_weights and checkpoint is not None:
        _load_ema_weights(model_engine, checkpoint)
        model_engine.has_ema_weights = True
    return nullcontext()


def _load_ema_weights(model_engine: ModelEngine, checkpoint: Path) -> None:
    with raise_on_all_ranks(model_engine.world.host_group):
        reader = Reader(checkpoint)
        averages: dict[str, Tensor] = {}
        for name, param in model_engine.model.named_parameters():
            if ema_name(name) in reader.entries:  # frozen parameters have none
                averages[ema_name(name)] = param.detach()
        if not averages:
            raise UserError(
                f"checkpoint {checkpoint} has no EMA weights: it was trained without optim.ema"
            )
        reader.fill(averages)
