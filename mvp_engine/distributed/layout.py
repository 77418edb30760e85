"""How the ranks of a job share one model: which hold copies, which hold shards, which share the tokens of a batch.

Dimensions by name, outermost first: `replicate` (copies), `shard` (FSDP2), `sequence` (Ulysses; such ranks hold shards
of their own too). A layout is a value that is handed around; two of them can live in one process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mvp_engine.config.schema import Parallel
from mvp_engine.distributed.world import World
from mvp_engine.errors import UserError


@dataclass(frozen=True)
class Layout:
    world: World
    replicate: int = 1
    shard: int = 1
    sequence: int = 1
    shard_mesh: DeviceMesh | None = None  # (replicate, shard * sequence), or the second alone; None: nothing is sharded
    sequence_group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, world: World, config: Parallel) -> Layout:
        """The layout that the config asks for on these ranks, or an explanation."""
        others = config.shard * config.sequence
        replicate = world.size // others if config.replicate == -1 else config.replicate
        if replicate * others != world.size or replicate < 1:
            asked = f"replicate={config.replicate}, shard={config.shard}, sequence={config.sequence}"
            raise UserError(
                f"parallel: {asked} do not multiply to the {world.size} process(es) that were started. "
                f"Start {abs(config.replicate) * others} (torchrun --nproc_per_node), or change them; "
                "parallel.replicate=-1 takes what the others leave."
            )
        if world.size == 1:
            return cls(world)
        device = world.device.type
        mesh = group = None
        if others > 1:
            shape = (replicate, others) if replicate > 1 else (others,)
            mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        if config.sequence > 1:
            pairs = init_device_mesh(device, (world.size // config.sequence, config.sequence))
            group = pairs.get_group(1)
        return cls(world, replicate, config.shard, config.sequence, mesh, group)

    @property
    def data_size(self) -> int:
        """How many ranks, or groups of ranks, train on different data."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        return self.world.rank // self.sequence

    @property
    def sequence_rank(self) -> int:
        return self.world.rank % self.sequence
