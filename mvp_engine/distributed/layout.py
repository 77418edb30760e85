"""Layout: how the ranks of a job share one model: data, FSDP, context, Ulysses and tensor parallel dimensions.

Dimensions, outermost first: `replicate` (data parallel on replicas), `shard` (data parallel with FSDP2 shards),
`context` and `ulysses` (sequence parallel; these ranks also hold FSDP shards), `tensor` (tensor parallel). `expert` is
a second view of the ranks of `shard`, `context` and `ulysses`, for experts only: groups of so many neighbours share the
experts among them, and FSDP shards each expert over the groups. A layout is a value, not global state: two of them can
live in one process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mvp_engine.config.schema import Parallel
from mvp_engine.distributed.context import SequenceGroups
from mvp_engine.distributed.world import World
from mvp_engine.errors import UserError, count


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
    # (expert, tensor): the ranks that share experts, and each of them by the tensor-parallel plan
    expert_mesh: DeviceMesh | None = None
    expert_shard_mesh: DeviceMesh | None = None  # FSDP's or HSDP's mesh of experts
    context: int = 1
    sequence_groups: SequenceGroups | None = None  # of the ranks that share the tokens of a batch

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
        replicate = world.size // shards if config.replicate == -1 else config.replicate
        if replicate * shards != world.size or replicate < 1:
            sizes_text = ", ".join(
                f"parallel.{name}={getattr(config, name)}"
                for name in ("replicate", "shard", "context", "ulysses", "tensor")
            )
            raise UserError(
                f"{sizes_text} do not multiply to the {count(world.size, 'process')} of this job: use "
                f"--nproc {abs(config.replicate) * shards}, or change them. parallel.replicate=-1 takes what the "
                "others leave."
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
        shard_mesh = tensor_mesh = sequence_groups = None
        if shards > 1:
            # FSDP2 requires its mesh and the tensor-parallel one to be submeshes of one root mesh.
            shape = (replicate, config.shard * sequence_size, config.tensor)
            mesh = world.new_mesh(shape, ("replicate", "shard", "tensor"))
            shard_mesh = mesh["replicate", "shard"] if replicate > 1 else mesh["shard"]
            tensor_mesh = mesh["tensor"] if config.tensor > 1 else None
        if sequence_size > 1:
            sequence_groups = _sequence_groups(world, data_size, config)
        expert_mesh = expert_shard_mesh = None
        if config.expert > 1:
            of_experts = (config.shard * sequence_size // config.expert, config.expert)
            names = ("replicate", "expert_shard", "expert", "tensor")
            mesh = world.new_mesh((replicate, *of_experts, config.tensor), names)
            expert_mesh = mesh["expert", "tensor"]
            expert_shard_mesh = mesh[names[:2]] if replicate > 1 else mesh["expert_shard"]
        data_group = world.new_mesh((data_size, world.size // data_size)).get_group(0)
        sizes = (replicate, config.shard, config.ulysses, config.tensor)
        return cls(
            world,
            *sizes,
            shard_mesh,
            tensor_mesh,
            data_group,
            config.expert,
            expert_mesh,
            expert_shard_mesh,
            context=config.context,
            sequence_groups=sequence_groups,
        )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same samples, and so report the same losses."""
        return self.sequence_size * self.tensor

    @property
    def sequence_size(self) -> int:
        """Ranks that share the tokens of a batch."""
        return self.context * self.ulysses

    @property
    def data_size(self) -> int:
        """Data-parallel size: ranks, or groups of ranks, that train on different data."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        return self.world.rank // self.model_parallel_size

    @property
    def is_mp_src_rank(self) -> bool:
        """Among the ranks with the same data: is this the one that reports outputs and metrics?"""
        return self.world.rank % self.model_parallel_size == 0

    @property
    def dropout_rank(self) -> int:
        """Added to the seed of dropout. Tensor-parallel ranks share the residual stream and its dropout mask."""
        return self.world.rank // self.tensor


def _sequence_groups(world: World, data_size: int, config: Parallel) -> SequenceGroups:
    # In the root mesh these dimensions are a part of "shard".
    sequence_size = config.context * config.ulysses
    all_ranks = world.new_mesh((data_size, sequence_size, config.tensor)).get_group(1)
    if config.context == 1:
        return SequenceGroups(all_ranks, ulysses=all_ranks)
    if config.ulysses == 1:
        return SequenceGroups(all_ranks, context=all_ranks)
    mesh = world.new_mesh((data_size, config.context, config.ulysses, config.tensor))
    return SequenceGroups(all_ranks, ulysses=mesh.get_group(2), context=mesh.get_group(1))
