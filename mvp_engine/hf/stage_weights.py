"""The weights of a whole model, on every rank of its layout, whichever pipeline stage holds them: for exports."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.hf.packed_model import PackedModel


class _Facts(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    stage: int  # the first one that holds it


class WholeWeights:
    """The state dict of a model over its stages. All ranks create it and fetch the same tensors in the same order."""

    def __init__(self, model: PackedModel) -> None:
        # The parameters themselves, whose data may be offloaded and loaded back in between.
        self._own = model.state_dict(keep_vars=True)
        self._link = None if model.stage is None else model.stage.link
        self._facts: dict[str, _Facts] = {}
        for stage, of_stage in enumerate(self._of_stages()):
            for name, (shape, dtype) in of_stage.items():
                self._facts.setdefault(name, _Facts(shape, dtype, stage))

    def _of_stages(self) -> list[Any]:
        own = {name: (value.shape, value.dtype) for name, value in self._own.items()}
        return [own] if self._link is None else self._link.all_gather(own)

    def like(self, name: str) -> Tensor:
        """A tensor on the meta device."""
        shape, dtype, _ = self._facts[name]
        return torch.empty(shape, dtype=dtype, device="meta")

    def fetch(self, name: str) -> Tensor:
        """The full tensor; a collective."""
        if self._link is None:
            return full_tensor(self._own[name].detach())
        shape, dtype, stage = self._facts[name]
        if stage == self._link.stage:
            full = full_tensor(self._own[name].detach()).contiguous()
        else:
            full = torch.empty(shape, dtype=dtype, device=self._link.device)
        return self._link.from_stage_(full, stage)
