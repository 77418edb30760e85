"""The optimizer kit on two ranks: the updates of one, checkpoints that any layout reads, averages that survive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import parallel
from test_optim import contents, net, settings
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor, local_shards, local_tensor, shard_slices
from mvp_engine.errors import UserError
from mvp_engine.kit import OptimKit
from mvp_engine.model_engine import FSDPEngine

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def engine(world: World, words: dict[str, Any]) -> FSDPEngine:
    made = FSDPEngine(net(), Layout.of(world, parallel(shard=world.size)))
    made.initialize(OptimKit(settings(**words), seed=5).build_optimizer)
    return made


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    """Updates by gradients that do not depend on the layout."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            full = torch.randn(param.shape, generator=generator)
            param.grad = torch.empty_like(param)
            for offset, part in local_shards(param.grad):
                part.copy_(full[shard_slices(offset, part)])
        optimizer.step()


def gathered(made: FSDPEngine) -> dict[str, Tensor]:
    names = {param: name for name, param in made.model.named_parameters()}
    found = {name: full_tensor(param.detach()).clone() for name, param in made.model.named_parameters()}
    for param, state in made.optimizer.state.items():
        found |= {f"{names[param]}/{key}": full_tensor(value).clone() for key, value in state.items()}
    return found


def on_two(words: dict[str, Any], folder: Path) -> tuple[dict[str, Tensor], int]:
    world = World.join("cpu")
    made = engine(world, words)
    steps(made.model, made.optimizer, 0, 3)
    made.save_checkpoint(folder)
    found = gathered(made)
    states = [value for state in made.optimizer.state.values() for value in state.values()]
    world.close()
    return found, sum(local_tensor(value).nbytes for value in states if value.ndim)


FEW = (torch.bfloat16, torch.int8)
FORMS = [{"state_dtype": "float32"}, {"state_dtype": "bfloat16"}, {"state_dtype": "int8"}, {"kind": "muon"}]
FORMS += [{"kind": "muon", "state_dtype": "int8"}]


@pytest.mark.parametrize("words", FORMS, ids=lambda words: "-".join(words.values()))
def test_two_shards_update_as_one_and_go_on_as_one(ranks2, tmp_path: Path, words: dict[str, Any]) -> None:
    """To the bit with moments in few bits; within 1e-6 by torch's fused kernel, and by Muon's matrix products."""
    words = {**words, "ema": 0.9}
    one = engine(ALONE, words)
    steps(one.model, one.optimizer, 0, 3)
    (two, here), (other, there) = ranks2.run(on_two, words, tmp_path / "saved")
    mine = gathered(one)
    assert mine.keys() == two.keys() == other.keys()
    for name, value in mine.items():
        assert torch.equal(two[name], other[name]), name
        exact = by_itself(name, mine) or "momentum" in name
        assert torch.allclose(value.float(), two[name].float(), rtol=0, atol=0 if exact else 1e-6), name
    everything = sum(value.nbytes for name, value in mine.items() if "/" in name and value.ndim)
    assert here + there == everything  # each rank has its part of all that is kept
    again = engine(ALONE, words)
    again.load_checkpoint(tmp_path / "saved")
    loaded = gathered(again)
    assert all(torch.equal(loaded[name], value) for name, value in two.items())
    steps(again.model, again.optimizer, 3, 5)
    steps(one.model, one.optimizer, 3, 5)
    for name, value in gathered(one).items():
        atol = 0 if by_itself(name, mine) else 1e-6
        assert torch.allclose(value.float(), gathered(again)[name].float(), rtol=0, atol=atol), name


def by_itself(name: str, found: dict[str, Tensor]) -> bool:
    """Is each element updated by itself? Not by Muon; and torch's kernel rounds the last elements of a tensor anew."""
    param = name.partition("/")[0]
    return any(found.get(f"{param}/exp_avg{key}", torch.empty(0)).dtype in FEW for key in ("", "_codes"))


def cut_rows(folder: Path) -> tuple[list[Tensor], str]:
    """Matrices whose rows are cut, as by tensor parallel; and an 8-bit checkpoint that is read on such a layout."""
    from mvp_engine.checkpoint import state

    world = World.join("cpu")
    mesh = init_device_mesh("cpu", (2,))
    made = []
    for words in ({"state_dtype": "int8"}, {"kind": "muon"}, {"state_dtype": "bfloat16"}):
        model = rows(lambda full: distribute_tensor(full, mesh, [Shard(1)]), wide=words.get("state_dtype") == "int8")
        optimizer = OptimKit(settings(**words), seed=5).build_optimizer(model)
        steps(model, optimizer, 0, 2)
        made += [full_tensor(param.detach()) for param in model.parameters()]
    model = rows(lambda full: distribute_tensor(full, mesh, [Shard(1)]))
    try:
        OptimKit(settings(state_dtype="int8")).build_optimizer(model)
    except UserError as error:
        said = str(error)
    for dim in (0, 1):
        model = rows(lambda full, dim=dim: distribute_tensor(full, mesh, [Shard(dim)]))
        optimizer = OptimKit(settings(), seed=5).build_optimizer(model)
        state.restore(folder, model, optimizer, world.host_group)
        kept = optimizer.state[next(model.parameters())]
        made += [full_tensor(kept[key]) for key in ("exp_avg", "exp_avg_sq")]
    world.close()
    return made, said


def rows(place: Any = lambda full: full, wide: bool = False) -> nn.Module:
    torch.manual_seed(4)
    model = nn.Module()
    block = nn.ParameterDict({"weight": nn.Parameter(place(torch.randn(5, 512 if wide else 300)))})
    model.layers = nn.ModuleList([block])
    return model


def test_rows_that_are_cut_are_right_or_refused(ranks2, tmp_path: Path) -> None:
    mine = []
    for words in ({"state_dtype": "int8"}, {"kind": "muon"}, {"state_dtype": "bfloat16"}):
        model = rows(wide=words.get("state_dtype") == "int8")
        optimizer = OptimKit(settings(**words), seed=5).build_optimizer(model)
        steps(model, optimizer, 0, 2)
        mine += [param.detach() for param in model.parameters()]
    saved = FSDPEngine(rows(), Layout(ALONE))
    saved.initialize(OptimKit(settings(state_dtype="int8"), seed=5).build_optimizer)
    steps(saved.model, saved.optimizer, 0, 2)
    saved.save_checkpoint(tmp_path / "saved")
    converted = FSDPEngine(rows(), Layout(ALONE))
    converted.initialize(OptimKit(settings()).build_optimizer)
    converted.load_checkpoint(tmp_path / "saved")
    kept = contents(converted.model, converted.optimizer)
    mine += 2 * [kept["layers.0.weight/exp_avg"], kept["layers.0.weight/exp_avg_sq"]]
    for found, said in ranks2.run(cut_rows, tmp_path / "saved"):
        for a, b in zip(mine, found, strict=True):
            assert torch.allclose(a, b, atol=1e-6)
        assert "optim.state_dtype=int8: layers.0.weight is cut inside of rows" in said
        assert "Set optim.state_dtype=bfloat16" in said


def on_a_mesh_of_four(shape: tuple[int, int], placements: list[Any]) -> list[Tensor]:
    world = World.join("cpu")
    mesh = init_device_mesh("cpu", shape)
    model = many(lambda full: distribute_tensor(full, mesh, placements))
    optimizer = OptimKit(settings(kind="muon")).build_optimizer(model)
    steps(model, optimizer, 0, 2)
    found = [full_tensor(param.detach()) for param in model.parameters()]
    dist.barrier()
    world.close()
    return found


def many(place: Any = lambda full: full) -> nn.Module:
    torch.manual_seed(4)
    model = nn.Module()
    shapes = [(6, 10), (9, 4), (5, 5), (7, 12), (8, 8), (3, 6, 6)]
    blocks = [nn.ParameterDict({"weight": nn.Parameter(place(torch.randn(shape)))}) for shape in shapes]
    model.layers = nn.ModuleList(blocks)
    return model


@pytest.mark.parametrize("placements", [["copy", 0], [0, 1]], ids=["replicate-shard", "shard-tensor"])
def test_muon_on_meshes_of_two_dimensions(ranks4, placements: list[Any]) -> None:
    from torch.distributed.tensor import Replicate

    model = many()
    optimizer = OptimKit(settings(kind="muon")).build_optimizer(model)
    steps(model, optimizer, 0, 2)
    cuts = [Replicate() if dim == "copy" else Shard(dim) for dim in placements]
    for found in ranks4.run(on_a_mesh_of_four, (2, 2), cuts):
        for param, other in zip(model.parameters(), found, strict=True):
            assert torch.allclose(param.detach(), other, atol=1e-6)
