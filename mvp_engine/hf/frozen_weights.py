"""FrozenWeights: parameters of a plain module that checkpoints leave out, known by their checksums.

The module is built with their values again, so a checkpoint only has to make sure that they are the same. Packed
Hugging Face models have a fingerprint of their folder instead (`model_info`).
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from zlib import crc32

from torch import nn

from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError


class FrozenWeights:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._checksums: dict[str, int] = {}  # frozen weights do not change

    def names(self) -> set[str]:
        return {name for name, param in self.model.named_parameters() if not param.requires_grad}

    def checksums(self, names: Set[str]) -> dict[str, int]:
        """By name; all ranks call it, since the full tensors are gathered."""
        params = dict(self.model.named_parameters())
        for name in sorted(names - self._checksums.keys()):
            values = full_tensor(params[name].detach()).float().cpu().contiguous()
            self._checksums[name] = crc32(values.numpy().data)
        return {name: self._checksums[name] for name in sorted(names)}

    def check(self, checkpoint: Path, saved: dict[str, int]) -> set[str]:
        """The names that a checkpoint left out, after a check that the model has their values."""
        here = self.checksums(saved.keys() & dict(self.model.named_parameters()).keys())
        for name, checksum in saved.items():
            if here.get(name) != checksum:
                raise UserError(
                    f"checkpoint {checkpoint} leaves out the frozen {name} (checkpoint.trainable_only), which has "
                    "other values in this model: build it from the weights that the training started from"
                )
        return set(saved)
