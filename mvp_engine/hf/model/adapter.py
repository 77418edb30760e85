"""ModelAdapter: what a backend calls on a model beyond `nn.Module`, so that it never tests for the class of a model.

The base class serves plain modules. A model that needs more has a method `engine_adapter()` that returns an adapter of
its own, such as `HFAdapter` of a packed Hugging Face model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mvp_engine.config.schema import Experts
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.distributed.pipeline import StageLink
from mvp_engine.distributed.sequence_parallel import SequenceGroups
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import UserError
from mvp_engine.hf.experts.expert_balance import ExpertBalance
from mvp_engine.hf.experts.moe_layers import apply_expert_parallel
from mvp_engine.hf.lora.lora_layers import merge_adapters, shard_adapters
from mvp_engine.hf.lora.quantize import dequantized, quantize_layers, unquantized_shape
from mvp_engine.hf.model import input_hooks, pipeline
from mvp_engine.hf.model.model_parts import parts_of
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.hf.model.pipeline import WholeWeights
from mvp_engine.hf.model.preflight import MediaPreflight, check_gradients, check_packing
from mvp_engine.hf.model.tp_plan import apply_tensor_parallel
from mvp_engine.hf.weights import export as hf_export
from mvp_engine.hf.weights.export import ExportPlan
from mvp_engine.hf.weights.merge import check_base, check_new_tokens, write_model_info
from mvp_engine.hf.weights.pretrained import first_names, load_pretrained


class ModelAdapter:
    """Backends call the methods in this order: parallelize, weights, preflight, training, checkpoints, export."""

    compiles_by_default = False  # does model.compile=auto compile the blocks on a GPU?
    extra_forwards: tuple[str, ...] = ()  # methods besides `forward` that FSDP has to hook

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.name = type(model).__name__
        self._frozen = FrozenWeights(model)

    @property
    def expert_balance(self) -> ExpertBalance | None:
        """None: no experts, or none that are balanced."""
        return None

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
        raise UserError(f"the keys of experts are for Hugging Face models; {self.name} is none")

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

    def take_new(self) -> str:
        """A message, once: which weights the folder lacks, so that they have values from the seed."""
        return ""

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
        """Write what `mvp export` needs to know of the model into a checkpoint."""

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


class FrozenWeights:
    """Parameters of a plain module that checkpoints leave out, known by their checksums.

    The module is built with their values again, so a checkpoint only has to make sure that they are the same. Packed
    Hugging Face models have a fingerprint of their folder instead (`model_info`).
    """

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


LOGGER = logging.getLogger("mvp_engine")


class HFAdapter(ModelAdapter):
    """A packed Hugging Face model: its folder, its exports, checks of its batches."""

    compiles_by_default = True
    extra_forwards: tuple[str, ...] = ("reference_log_probs", "reference_hidden")
    model: PackedModel

    def __init__(self, model: PackedModel) -> None:
        super().__init__(model)
        self._media = MediaPreflight(model)

    def before_parallelize(self, dtype: torch.dtype) -> None:
        config: Any = self.model.hf.config
        if getattr(config.get_text_config(), "output_router_logits", False):
            LOGGER.warning(
                "output_router_logits of the model's config asks for transformers' load-balancing loss of experts, "
                "which is not part of any output here: experts.aux_loss_coef balances them. Set it to false to confirm."
            )
        cast_frozen_base(self.model, dtype)
        parts = parts_of(self.model)
        trained = {parts[name] for name, p in self.model.named_parameters() if p.requires_grad}
        if trained and trained <= {"vision", "audio", "projector"}:
            embedding: Any = self.model.hf.get_input_embeddings()  # type: ignore[operator]
            embedding.register_forward_hook(input_hooks.keep_graph)

    def set_export_dtype(self, dtype: torch.dtype) -> None:
        self.model.export_dtype = dtype

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> None:
        plan = apply_tensor_parallel(self.model, mesh)
        if self.model.lora is not None:
            shard_adapters(self.model, mesh, plan)

    def apply_expert_parallel(self, mesh: DeviceMesh) -> list[nn.Module]:
        return apply_expert_parallel(self.model, mesh)

    @property
    def expert_balance(self) -> ExpertBalance | None:
        return self.model.expert_balance

    def balance_experts(self, settings: Experts, device: torch.device) -> None:
        model_type = self.model.hf.config.model_type  # type: ignore[union-attr]
        self.model.expert_balance = ExpertBalance(self.model, str(model_type), settings, device)

    def enable_sequence_parallel(self, groups: SequenceGroups, tensor: int) -> None:
        self.model.enable_sequence_parallel(groups, tensor)

    def cut_stage(self, link: StageLink, skeleton: nn.Module | None) -> None:
        if self.model.new_rows is not None and self.model.lora is not None:
            raise UserError(
                "data.new_tokens: with LoRA their rows in embedding and head train as one, and parallel.pipeline > 1 "
                "has the two on different ranks. Set parallel.shard instead"
            )
        pipeline.cut_model(self.model, link, skeleton)

    def send_stage_outputs(self) -> None:
        pipeline.send_outputs(self.model)

    @property
    def stage_link(self) -> StageLink | None:
        return None if self.model.stage is None else self.model.stage.link

    def elsewhere(self) -> Set[str]:
        return frozenset() if self.model.stage is None else self.model.stage.elsewhere.keys()

    def stage_copies(self) -> Set[str]:
        return frozenset() if self.model.stage is None else self.model.stage.copies

    def tied_to_other_stage(self) -> list[nn.Parameter]:
        names = () if self.model.stage is None else self.model.stage.tied
        params = dict(self.model.named_parameters())
        return [params[name] for name in names if name in params]

    def replace_layers(self, layout: Layout, settings: Any) -> None:
        """The layers keep their forwards."""

    def load_weights(self, skeleton: nn.Module) -> set[str]:
        if self.model.source is None:
            return set()
        return load_pretrained(self.model, skeleton)

    def take_new(self) -> str:
        new = self.model.not_in_folder
        self.model.not_in_folder = []
        return (
            f"not in {self.model.source}, initialized from the seed: {first_names(new)}"
            if new
            else ""
        )

    def preflight(self, layout: Layout, exact: bool) -> None:
        group = layout.world.host_group
        if layout.world.rank == 0:
            self.model.mixers.log_kernels(layout.world.device)
        with raise_on_all_ranks(group):
            # transformers' own forward knows neither tensor-parallel parameters nor pipeline stages.
            reference = layout.tensor_mesh is None and layout.pipeline == 1
            try:
                check_packing(self.model, exact=exact, reference=reference, group=group)
            except UserError as error:
                if layout.tensor_mesh is None:
                    raise
                size = layout.tensor_mesh.size()
                message = f"parallel.tensor={size}, by transformers' tensor-parallel plan: {error}"
                raise UserError(f"{message} Set parallel.tensor=1, or another model") from error

    def preflight_gradients(self, layout: Layout) -> None:
        if layout.tensor_mesh is not None:
            check_gradients(self.model, layout.tensor_mesh, layout.world.host_group)

    def preflight_media(self, engine: Any, batches: Iterable[Any]) -> None:
        if rows := self._media.unchecked(batches):
            with engine.eval_mode(), engine.autocast():
                exact = engine.dtype == torch.float32
                layout = engine.layout
                reference = layout.tensor_mesh is None and layout.pipeline == 1
                self._media.check(rows, exact=exact, reference=reference)

    @property
    def _whole(self) -> PackedModel:
        """The model with the blocks of all pipeline stages; without stages, the model itself."""
        return self.model if self.model.stage is None else self.model.stage.whole

    def check_batch(self, micro_batch: Any) -> None:
        if isinstance(micro_batch, PackedBatch) and micro_batch.labels.is_cpu:
            self.model.check(micro_batch)

    def external_tensors(self) -> set[str]:
        params = self.model.named_parameters()
        return {name for name, param in params if not param.requires_grad} & self.model.from_folder

    def external_checksums(self, names: Set[str]) -> dict[str, int]:
        return {}  # `mvp.json` has a fingerprint of the folder

    def left_out(self, checkpoint: Path, checksums: dict[str, int] | None) -> set[str]:
        check_new_tokens(checkpoint, self.model)
        if checksums is None and self.model.lora is None:
            return set()
        check_base(checkpoint, self.model)
        return self.external_tensors()

    def describe(self, folder: Path, engine_class: type, trainable_only: bool) -> None:
        if self.model.model_type:
            write_model_info(self.model, folder, engine_class, trainable_only)

    def export(self, folder: Path, dtype: torch.dtype | None, world: World) -> None:
        target = self.model.export_target(dtype)
        weights = WholeWeights(self.model)
        fetch = dequantized(self.model, weights.fetch)
        like = unquantized_shape(self.model, weights.like)
        hf_export.export(target, folder, merge_adapters(self._whole, fetch), like, world)

    def named_full_tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        weights = WholeWeights(self.model)
        target = self.model.export_target(dtype)
        plan = ExportPlan(target, unquantized_shape(self.model, weights.like))
        fetch = dequantized(self.model, weights.fetch)
        fetch = merge_adapters(self._whole, fetch)
        for group in plan.groups:
            if not group.carried:  # the receiver has them: they never change
                yield from plan.entries(group, fetch)


def cast_frozen_base(model: PackedModel, dtype: torch.dtype) -> None:
    """Keep frozen weights in the half precision that both their folder and the computation have.

    Under LoRA, and in models of which most is frozen (`casts_frozen`); others keep float32, as a later stage may train
    what this one freezes.
    """
    is_half = model.export_dtype == dtype and dtype != torch.float32
    if is_half and (model.lora is not None or model.casts_frozen):
        cast_frozen_weights(model, dtype)


def cast_frozen_weights(model: PackedModel, dtype: torch.dtype) -> None:
    """Cast the weights that do not train, except those that transformers keeps in float32."""
    hf: Any = model.hf
    in_fp32 = {*(hf._keep_in_fp32_modules or ()), *(hf._keep_in_fp32_modules_strict or ())}
    for name, param in model.named_parameters():
        if not param.requires_grad and not in_fp32 & {*name.split(".")}:
            param.data = param.data.to(dtype)
