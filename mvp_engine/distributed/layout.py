"""Layout: how the ranks of a job share one model: pipeline, data, FSDP, context, Ulysses, tensor parallel dimensions.

Dimensions, outermost first: `pipeline` (stages, each a contiguous block of ranks), `replicate` (data parallel on
replicas), `shard` (data parallel with FSDP2 shards), `context` and `ulysses` (sequence parallel; these ranks also hold
FSDP shards), `tensor` (tensor parallel). `expert` is a second view of the ranks of `shard`, `context` and `ulysses`,
for experts only: groups of so many neighbours share the experts among them, and FSDP shards each expert over the
groups. A layout is a value, not global state: two of them can live in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mvp_engine.config.schema import Parallel
from mvp_engine.distributed.sequence_parallel import SequenceGroups
from mvp_engine.distributed.world import World
from mvp_engine.errors import UserError, count

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    world: World
    replicate: int = 1
    shard: int = 1
    ulysses: int = 1
    tensor: int = 1
    # HSDP's mesh (replicate, shard * sequence_size), FSDP's (shard * sequence_size), or None for replicas only
    shard_mesh: DeviceMesh | None = None
    tensor_mesh: DeviceMesh | None = None
    data_group: dist.ProcessGroup | None = None  # the ranks with this model-parallel index
    expert: int = 1
    reshard: bool = True  # FSDP frees gathered parameters after each forward and backward
    # (expert, tensor): the ranks that share experts, and each of them by the tensor-parallel plan
    expert_mesh: DeviceMesh | None = None
    expert_shard_mesh: DeviceMesh | None = None  # FSDP's or HSDP's mesh of experts
    context: int = 1
    sequence_groups: SequenceGroups | None = None  # of the ranks that share the tokens of a batch
    pipeline: int = 1  # number of stages
    stage_group: dist.ProcessGroup | None = (
        None  # the ranks of this stage, if there are several stages
    )
    # The ranks at this place of each stage: one group for activations, one for their gradients
    pipeline_groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None

    def __post_init__(self) -> None:
        if (product := self.data_size * self.model_parallel_size) != self.world.size:
            raise UserError(
                f"a layout of {count(product, 'rank')} for {count(self.world.size, 'process')}: use Layout.of(...)"
            )

    @classmethod
    def of(cls, world: World, config: Parallel) -> Layout:
        """The layout of a config on these ranks; raises a UserError if the sizes do not fit."""
        sequence_size = config.context * config.ulysses
        shards = config.shard * sequence_size * config.tensor
        each = shards * config.pipeline
        replicate = world.size // each
        if replicate * each != world.size:
            names = ("shard", "pipeline", "context", "ulysses", "tensor")
            sizes_text = ", ".join(f"parallel.{name}={getattr(config, name)}" for name in names)
            raise UserError(
                f"{sizes_text} do not divide the {count(world.size, 'process')} of this job: a replica of the model "
                f"takes {each}. Use --nproc {each} or a multiple of it, or change the sizes"
            )
        if config.shard * sequence_size % config.expert:
            raise UserError(
                f"parallel.expert={config.expert} does not divide the {config.shard * sequence_size} FSDP ranks "
                f"(parallel.shard={config.shard} times parallel.context={config.context} times "
                f"parallel.ulysses={config.ulysses}), which share the experts: "
                f"set parallel.shard to a multiple of {config.expert}"
            )
        if world.size == 1:
            return cls(world)
        data_size = replicate * config.shard
        unused = 1 if config.pipeline == 1 else 0  # dimensions of meshes
        shard_mesh = tensor_mesh = sequence_groups = None
        if shards > 1:
            # FSDP2 requires its mesh and the tensor-parallel one to be submeshes of one root mesh.
            sizes = (config.pipeline, replicate, config.shard * sequence_size, config.tensor)
            dims = ("pipeline", "replicate", "shard", "tensor")
            mesh = world.new_mesh(sizes[unused:], dims[unused:])
            shard_mesh = mesh["replicate", "shard"] if replicate > 1 else mesh["shard"]
            tensor_mesh = mesh["tensor"] if config.tensor > 1 else None
        if sequence_size > 1:
            sequence_groups = _sequence_groups(world, data_size, config)
        expert_mesh = expert_shard_mesh = None
        if config.expert > 1:
            of_experts = (config.shard * sequence_size // config.expert, config.expert)
            shape = (config.pipeline, replicate, *of_experts, config.tensor)
            named = ("pipeline", "replicate", "expert_shard", "expert", "tensor")
            mesh = world.new_mesh(shape[unused:], named[unused:])
            expert_mesh = mesh["expert", "tensor"]
            expert_shard_mesh = mesh[named[1:3]] if replicate > 1 else mesh["expert_shard"]
        same_data = sequence_size * config.tensor  # ranks of a stage
        data_group = world.new_mesh((config.pipeline, data_size, same_data)).get_group(1)
        stage_group = pipeline_groups = None
        if config.pipeline > 1:
            stage_size = world.size // config.pipeline
            meshes = [world.new_mesh((config.pipeline, stage_size)) for _ in range(2)]
            pipeline_groups = (meshes[0].get_group(0), meshes[1].get_group(0))
            stage_group = meshes[0].get_group(1)
        return cls(
            world,
            replicate,
            config.shard,
            config.ulysses,
            config.tensor,
            shard_mesh,
            tensor_mesh,
            data_group,
            config.expert,
            config.reshard,
            expert_mesh,
            expert_shard_mesh,
            context=config.context,
            sequence_groups=sequence_groups,
            pipeline=config.pipeline,
            stage_group=stage_group,
            pipeline_groups=pipeline_groups,
        )

    @cached_property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same samples, and so report the same losses."""
        return self.pipeline * self.sequence_size * self.tensor

    @cached_property
    def sequence_size(self) -> int:
        """Ranks that share the tokens of a batch."""
        return self.context * self.ulysses

    @cached_property
    def data_size(self) -> int:
        """Data-parallel size: ranks, or groups of ranks, that train on different data."""
        return self.replicate * self.shard

    @cached_property
    def data_rank(self) -> int:
        return self.world.rank % self.stage_size // (self.sequence_size * self.tensor)

    @cached_property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage; without a pipeline, all ranks."""
        return self.world.size // self.pipeline

    @cached_property
    def stage(self) -> int:
        """The pipeline stage of this rank."""
        return self.world.rank // self.stage_size

    @cached_property
    def is_last_stage(self) -> bool:
        """Does this rank compute the loss?"""
        return self.stage == self.pipeline - 1

    @cached_property
    def stage_ranks(self) -> range:
        """The global ranks of this stage."""
        return range(self.stage * self.stage_size, (self.stage + 1) * self.stage_size)

    @cached_property
    def is_mp_src_rank(self) -> bool:
        """Among the ranks with the same data: is this the one that reports outputs and metrics?"""
        return self.is_last_stage and self.world.rank % (self.sequence_size * self.tensor) == 0

    @cached_property
    def is_metrics_rank(self) -> bool:
        """The one rank that reports what is equal on all ranks."""
        return self.is_mp_src_rank and self.data_rank == 0

    def of_data_ranks(self, values: list[T]) -> list[T]:
        """One value for each data-parallel rank, from values of all ranks: those of the last stage, with outputs."""
        return values[-self.stage_size :: self.sequence_size * self.tensor]

    @cached_property
    def dropout_rank(self) -> int:
        """Added to the seed of dropout. Tensor-parallel ranks share the residual stream and its dropout mask."""
        return self.world.rank // self.tensor


def _sequence_groups(world: World, data_size: int, config: Parallel) -> SequenceGroups:
    # In the root mesh these dimensions are a part of "shard".
    sequence_size = config.context * config.ulysses
    sequences = config.pipeline * data_size
    all_ranks = world.new_mesh((sequences, sequence_size, config.tensor)).get_group(1)
    if config.context == 1:
        return SequenceGroups(all_ranks, ulysses=all_ranks)
    if config.ulysses == 1:
        return SequenceGroups(all_ranks, context=all_ranks)
    mesh = world.new_mesh((sequences, config.context, config.ulysses, config.tensor))
    return SequenceGroups(all_ranks, ulysses=mesh.get_group(2), context=mesh.get_group(1))
