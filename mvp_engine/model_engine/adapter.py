"""ModelAdapter: what a backend calls on a model beyond `nn.Module`.

This class serves plain modules. A model that needs more (a Hugging Face model: its folder, its exports, checks of its
batches) has a method `engine_adapter()` that returns an object with the same methods (`hf/model/adapter.py`). So
backends never test for the class of a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mvp_engine.config.schema import Experts
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.context import SequenceGroups
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.distributed.pipeline import StageLink
from mvp_engine.errors import UserError
from mvp_engine.hf.experts.expert_balance import ExpertBalance
from mvp_engine.hf.lora.quantize import quantize_layers


class ModelAdapter:
    """Backends call the methods in this order: parallelize, weights, preflight, training, checkpoints, export."""

    compiles_by_default = False  # does model.compile=auto compile the blocks on a GPU?
    extra_forwards: tuple[str, ...] = ()  # methods besides `forward` that FSDP has to hook
    expert_balance: ExpertBalance | None = None

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.name = type(model).__name__
        self._frozen = FrozenWeights(model)

    def before_parallelize(self, dtype: torch.dtype) -> None:
        """Prepare for a computation in `dtype`."""

    def set_export_dtype(self, dtype: torch.dtype) -> None:
        """Note the dtype of the weights that the model was given with."""

    def quantize(self, setting: Mapping[Any, str], dtype: torch.dtype) -> None:
        """Quantize frozen weights of parts (`model.quantize`)."""
        quantize_layers(self.model, setting, dtype)

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> None:
        raise self._needs_packed_model()

    def apply_expert_parallel(self, mesh: DeviceMesh) -> list[nn.Module]:
        """Share the experts over a mesh (expert, tensor); returns the modules that hold them."""
        raise self._needs_packed_model()

    def balance_experts(self, settings: Experts, device: torch.device) -> None:
        """Set `expert_balance`."""
        raise UserError(
            f"experts.balance and experts.z are for Hugging Face models; {self.name} is none"
        )

    def enable_sequence_parallel(self, groups: SequenceGroups, tensor: int) -> None:
        raise self._needs_packed_model()

    def cut_stage(self, link: StageLink, skeleton: nn.Module | None) -> None:
        """Keep what this rank's pipeline stage holds. `skeleton`: the whole model on the meta device."""
        raise UserError(
            f"parallel.pipeline > 1 needs a Hugging Face language model (model.type=language_model); {self.name} is "
            "none. Set parallel.shard"
        )

    def send_stage_outputs(self) -> None:
        """Send what a forward of this stage computes to the next one; after FSDP."""

    @property
    def stage_link(self) -> StageLink | None:
        """The connections to other pipeline stages."""
        return None

    def elsewhere(self) -> Set[str]:
        """The tensors that other pipeline stages hold, by name."""
        return frozenset()

    def stage_copies(self) -> Set[str]:
        """Parameters of the first pipeline stage, of which this stage holds copies: tied embeddings."""
        return frozenset()

    def tied_to_other_stage(self) -> list[nn.Parameter]:
        """Parameters that both the first and the last pipeline stage hold, and this one."""
        return []

    def replace_layers(self, layout: Layout, settings: Any) -> None:
        """Give layers another forward; their parameters are cut by matrices already, and not yet sharded."""

    def load_weights(self, skeleton: nn.Module) -> set[str]:
        """Load pretrained weights into the model; returns the names of the tensors that have their values now."""
        return set()

    def preflight(self, layout: Layout, exact: bool) -> None:
        """Refuse a model that would train on wrong numbers."""

    def preflight_gradients(self, layout: Layout) -> None:
        """The same for gradients, before the first training step."""

    def preflight_media(self, engine: Any, batches: Any) -> None:
        """The same for the first rows of each kind of media; ranks that run the model together have the same."""

    def check_batch(self, micro_batch: Any) -> None:
        """Refuse a batch, on the host, that the model would misread."""

    def has_lora(self) -> bool:
        return getattr(self.model, "lora", None) is not None

    def external_tensors(self) -> set[str]:
        """Frozen parameters that checkpoints may leave out, because the model is built with their values."""
        return self._frozen.names()

    def external_checksums(self, names: Set[str]) -> dict[str, int]:
        """What a checkpoint without these parameters says of them; all ranks call it."""
        return self._frozen.checksums(names)

    def left_out(self, checkpoint: Path, checksums: dict[str, int] | None) -> set[str]:
        """The names of the tensors that a checkpoint lacks, after a check that the model has their values.

        `checksums` are those of the checkpoint; None: it is complete.
        """
        return self._frozen.check(checkpoint, checksums or {})

    def describe(self, folder: Path, engine_class: type, trainable_only: bool) -> None:
        """Write what `mvp merge` needs to know of the model into a checkpoint."""

    def export(self, folder: Path, dtype: torch.dtype | None, world: World) -> None:
        raise self._no_folder()

    def named_full_tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        raise self._no_folder()

    def _needs_packed_model(self) -> UserError:
        return UserError(
            "parallel.context, parallel.ulysses, parallel.tensor and parallel.expert > 1 need a packed model; "
            f"{self.name} is none"
        )

    def _no_folder(self) -> UserError:
        return UserError(f"{self.name} is no Hugging Face model, so it has no such folder or names")


def adapter_of(model: Any) -> ModelAdapter:
    has_own = hasattr(model, "engine_adapter")
    adapter: ModelAdapter = model.engine_adapter() if has_own else ModelAdapter(model)
    return adapter


# FrozenWeights: parameters of a plain module that checkpoints leave out, known by their checksums.
#
# The module is built with their values again, so a checkpoint only has to make sure that they are the same. Packed
# Hugging Face models have a fingerprint of their folder instead (`model_info`).


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
