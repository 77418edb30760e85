"""Layout: how the ranks of a job share one model: data parallel, FSDP, Ulysses and tensor parallel dimensions.

Dimensions, outermost first: `replicate` (data parallel), `shard` (FSDP2), `ulysses` (sequence parallel; these ranks
also hold FSDP shards), `tensor` (tensor parallel). A layout is a value, not global state: two of them can live in one
process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mvp_engine.config.schema import Parallel
from mvp_engine.distributed.world import World
from mvp_engine.errors import UserError


@dataclass(frozen=True)
class Layout:
    world: World
    replicate: int = 1
    shard: int = 1
    ulysses: int = 1
    tensor: int = 1
    shard_mesh: DeviceMesh | None = (
        None  # (replicate, shard * ulysses), or the second alone; None: nothing is sharded
    )
    tensor_mesh: DeviceMesh | None = None
    ulysses_group: dist.ProcessGroup | None = None
    data_group: dist.ProcessGroup | None = None  # one rank of each model-parallel group

    def __post_init__(self) -> None:
        if (product := self.data_size * self.model_parallel_size) != self.world.size:
            raise UserError(
                f"a layout of {product} rank(s) for {self.world.size} process(es): use Layout.of(...)"
            )

    @classmethod
    def of(cls, world: World, config: Parallel) -> Layout:
        """The layout of a config on these ranks; raises a UserError if the sizes do not fit."""
        others = config.shard * config.ulysses * config.tensor
        replicate = world.size // others if config.replicate == -1 else config.replicate
        if replicate * others != world.size or replicate < 1:
            sizes_text = ", ".join(
                f"{name}={getattr(config, name)}"
                for name in ("replicate", "shard", "ulysses", "tensor")
            )
            raise UserError(
                f"parallel: {sizes_text} do not multiply to the {world.size} process(es) that were started. "
                f"Start {abs(config.replicate) * others} (torchrun --nproc_per_node), or change them; "
                "parallel.replicate=-1 takes what the others leave."
            )
        if world.size == 1:
            return cls(world)
        model_parallel_size = config.ulysses * config.tensor
        shard_mesh = tensor_mesh = ulysses_group = None
        if others > 1:
            # FSDP2 wants its mesh and the tensor-parallel one to be parts of the same whole.
            shape = (replicate, config.shard * config.ulysses, config.tensor)
            mesh = world.new_mesh(shape, ("replicate", "shard", "tensor"))
            shard_mesh = mesh["replicate", "shard"] if replicate > 1 else mesh["shard"]
            tensor_mesh = mesh["tensor"] if config.tensor > 1 else None
        if config.ulysses > 1:
            cube = world.new_mesh(
                (world.size // model_parallel_size, config.ulysses, config.tensor)
            )
            ulysses_group = cube.get_group(1)
        data_group = world.new_mesh(
            (world.size // model_parallel_size, model_parallel_size)
        ).get_group(0)
        sizes = (replicate, config.shard, config.ulysses, config.tensor)
        return cls(world, *sizes, shard_mesh, tensor_mesh, ulysses_group, data_group)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same data, and so compute the same losses."""
        return self.ulysses * self.tensor

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
        """The seed of dropout: tensor-parallel ranks hold the same activations, so they drop the same ones."""
        return self.world.rank // self.tensor
