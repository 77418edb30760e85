"""ModelAdapter: what a backend calls on a model beyond `nn.Module`; `PlainAdapter` serves plain modules.

A model that needs more (a Hugging Face model: its folder, its exports, checks of its batches) has a method
`engine_adapter()` that returns an object with these methods. Backends then never test for the class of a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError


class ModelAdapter(Protocol):
    """Calls come in the order of this list: parallelize, weights, preflight, training, checkpoints."""

    compiles_by_default: bool  # does model.compile=auto compile its blocks on a GPU?
    extra_forwards: tuple[
        str, ...
    ]  # methods besides `forward` that run parameters; FSDP hooks them too

    def before_parallelize(self, dtype: torch.dtype) -> None:
        """Prepare for a computation in `dtype`."""

    def set_export_dtype(self, dtype: torch.dtype) -> None:
        """Note the dtype of the weights that the model was given with."""

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> None: ...

    def enable_sequence_parallel(self, group: dist.ProcessGroup, tensor: int) -> None: ...

    def load_weights(self, skeleton: nn.Module) -> set[str]:
        """Load pretrained weights into the model; returns the names of the tensors that have their values now."""

    def preflight(self, layout: Layout, exact: bool) -> None:
        """Refuse a model that would train on wrong numbers."""

    def preflight_gradients(self, layout: Layout) -> None: ...

    def check_batch(self, micro_batch: Any) -> None:
        """Refuse a batch, on the host, that the model would misread."""

    def external_tensors(self) -> set[str]:
        """Tensors that checkpoints leave out, because they are read from the model's folder again."""

    def check_external(self, checkpoint: Path) -> None:
        """Is that folder the one that the checkpoint was trained on?"""

    def describe(self, folder: Path, engine_class: type) -> None:
        """Write what `mvp merge` needs to know of the model, next to a checkpoint."""

    def export(self, folder: Path, dtype: torch.dtype | None, world: World) -> None: ...

    def named_full_tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]: ...


class PlainAdapter:
    """The adapter of a module that is only a module."""

    compiles_by_default = False
    extra_forwards: tuple[str, ...] = ()

    def __init__(self, model: nn.Module) -> None:
        self.name = type(model).__name__

    def before_parallelize(self, dtype: torch.dtype) -> None:
        pass

    def set_export_dtype(self, dtype: torch.dtype) -> None:
        pass

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> None:
        raise self._needs_packed_model()

    def enable_sequence_parallel(self, group: dist.ProcessGroup, tensor: int) -> None:
        raise self._needs_packed_model()

    def _needs_packed_model(self) -> UserError:
        return UserError(
            f"parallel.ulysses > 1 and parallel.tensor > 1 need a packed model; {self.name} is none"
        )

    def load_weights(self, skeleton: nn.Module) -> set[str]:
        return set()

    def preflight(self, layout: Layout, exact: bool) -> None:
        pass

    def preflight_gradients(self, layout: Layout) -> None:
        pass

    def check_batch(self, micro_batch: Any) -> None:
        pass

    def external_tensors(self) -> set[str]:
        return set()

    def check_external(self, checkpoint: Path) -> None:
        pass

    def describe(self, folder: Path, engine_class: type) -> None:
        pass

    def export(self, folder: Path, dtype: torch.dtype | None, world: World) -> None:
        raise self._no_folder()

    def named_full_tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        raise self._no_folder()

    def _no_folder(self) -> UserError:
        return UserError(f"{self.name} is no Hugging Face model, so it has no such folder or names")


def adapter_of(model: Any) -> ModelAdapter:
    if hasattr(model, "engine_adapter"):
        adapter: ModelAdapter = model.engine_adapter()
        return adapter
    return PlainAdapter(model)
