"""Which ranks of a layout to simulate, and the names of its process groups.

Nothing here knows a dimension of the layout by name; of pipeline stages, whose ranks hold different layers, it knows
that they are blocks of neighbouring ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError

FEW_RANKS = 4  # so many are all simulated


def chosen_ranks(layout: Layout, wanted: str | None) -> list[int]:
    """The ranks to simulate: rank 0, the last rank of each of its groups, and one rank of each pipeline stage.

    Ranks between the first and the last of a group do the same with other data. `wanted` names more ranks.
    """
    size = layout.world.size
    if wanted == "all" or size <= FEW_RANKS:
        return list(range(size))
    chosen = {0, *_listed(wanted, size)}
    chosen |= set(range(0, size, layout.stage_size))
    for ranks in sorted(_lines_through_rank0(layout.world), key=len):
        if len(chosen & set(ranks)) < 2:  # a larger group may have two of smaller ones already
            chosen.add(ranks[-1])
    return sorted(chosen)


def _listed(wanted: str | None, size: int) -> list[int]:
    if wanted is None:
        return []
    words = [word.strip() for word in wanted.split(",")]
    wrong = [word for word in words if not word.isdigit() or int(word) >= size]
    if wrong:
        raise UserError(f"--ranks {wanted}: {wrong[0]!r} is no rank below {size}; or write all")
    return [int(word) for word in words]


def _lines_through_rank0(world: World) -> Iterator[list[int]]:
    """For each dimension of the layout's meshes: rank 0 with the ranks that differ in it alone."""
    for mesh in world.meshes:
        for dim in range(mesh.ndim):
            line = mesh.mesh[tuple(slice(None) if d == dim else 0 for d in range(mesh.ndim))]
            if len(line) > 1:
                yield line.tolist()


def group_names(layout: Layout) -> dict[tuple[int, ...], str]:
    """The names of this rank's process groups, by their ranks: those of the layout's fields and mesh dimensions."""
    names = dict[tuple[int, ...], str]()
    for name, group in _groups(layout, ""):
        names.setdefault(tuple(dist.get_process_group_ranks(group)), name)
    names.setdefault(tuple(range(layout.world.size)), "all ranks")
    return names


def _groups(value: Any, name: str) -> Iterator[tuple[str, dist.ProcessGroup]]:
    if isinstance(value, World):
        return
    if isinstance(value, dist.ProcessGroup):
        yield name.removesuffix("s").removesuffix("_group"), value
    elif isinstance(value, DeviceMesh):
        for dim, dim_name in enumerate(value.mesh_dim_names or (name,) * value.ndim):
            yield dim_name, value.get_group(dim)
    elif isinstance(value, tuple):
        for one in value:
            yield from _groups(one, name)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _groups(getattr(value, field.name), field.name)
