"""A checkpoint is one file a rank; any layout reads any other's, whole or not at all, and only its own part."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from mvp_engine.checkpoint import format as storage
from mvp_engine.checkpoint import state
from mvp_engine.checkpoint.safetensors_io import SafetensorsReader
from mvp_engine.distributed import World
from mvp_engine.distributed.dtensor import local_shards
from mvp_engine.errors import UserError

FUSED = _StridedShard(0, split_factor=2)


def write(folder: Path, **tensors: Tensor) -> storage.Reader:
    storage.write(folder, storage.cut(tensors), None)
    return storage.Reader(folder)


def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    tensors = {str(kind): torch.arange(6).view(2, 3).to(kind) for kind in kinds}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "turned": torch.arange(6.0).view(2, 3).T}
    tensors |= {"a@0": torch.ones(1), "a": torch.zeros(2)}  # names may look like our own keys
    reader = write(tmp_path, **tensors)
    assert reader.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (reader.entries[name].shape, reader.entries[name].dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(reader.read(name), tensor)
        other = torch.ones_like(tensor)
        reader.fill({name: other})
        assert torch.equal(other, tensor)


def test_box_takes_only_what_overlaps(tmp_path: Path, monkeypatch) -> None:
    whole = torch.arange(48.0).view(8, 6)
    parts = [storage.Piece("x", whole.shape, (r, c), whole[r : r + 2, c : c + 3]) for r in (0, 2, 4, 6) for c in (0, 3)]
    storage.write(tmp_path, parts, None)
    reader = storage.Reader(tmp_path)
    touched: list[Any] = []
    read = SafetensorsReader.read

    def watched(self: SafetensorsReader, path: Path, key: str, box: tuple[slice, ...]) -> Tensor:
        part = read(self, path, key, box)
        touched.append((key, tuple(part.shape)))
        return part

    monkeypatch.setattr(SafetensorsReader, "read", watched)
    assert torch.equal(reader.read("x", (3, 1), (2, 2)), whole[3:5, 1:3])
    assert touched == [("x@2,0", (1, 2)), ("x@4,0", (1, 2))]
    assert torch.equal(reader.read("x", (1, 0), (7, 6)), whole[1:])
    assert torch.equal(reader.read("x"), whole)
    with pytest.raises(IndexError, match=r"no \(2, 2\) at \(7, 0\) in \(8, 6\)"):
        reader.read("x", (7, 0), (2, 2))


def test_fill_converts_and_refuses_other_shapes(tmp_path: Path) -> None:
    reader = write(tmp_path, x=torch.tensor([1.0, 2.5]))
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    reader.fill({"x": half})
    assert half.tolist() == [1.0, 2.5]
    with pytest.raises(UserError, match=r"x is \(2,\) there and \(3,\) here"):
        reader.fill({"x": torch.zeros(3)})


def test_others_may_read_the_files(tmp_path: Path) -> None:
    write(tmp_path / "sub", x=torch.ones(1))
    (tmp_path / "ordinary").touch()
    assert (tmp_path / "sub" / "rank_00000.safetensors").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def spread(folder: Path, ranks: int = 3) -> list[Path]:
    """A checkpoint of three ranks, by hand: x in three pieces, y whole and twice."""
    x, y = torch.arange(6.0), torch.ones(2)
    for rank in range(ranks):
        about = {"x": {"name": "x", "dtype": "torch.float32", "shape": [6], "offset": [2 * rank]}}
        about |= {"y": {"name": "y", "dtype": "torch.float32", "shape": [2], "offset": [0]}} if rank else {}
        data = {"x": x[2 * rank : 2 * rank + 2], "y": y}
        said = {"ranks": str(ranks), "pieces": json.dumps(about)}
        save_file({key: data[key] for key in about}, folder / f"rank_{rank:05d}.safetensors", said)
    return sorted(folder.iterdir())


def test_pieces_that_two_ranks_wrote_count_once(tmp_path: Path) -> None:
    spread(tmp_path)
    reader = storage.Reader(tmp_path)
    assert [len(reader.entries[name].pieces) for name in "xy"] == [3, 1]
    assert reader.read("x").tolist() == [0, 1, 2, 3, 4, 5]
    assert reader.read("y").tolist() == [1, 1]


@pytest.mark.parametrize("damage", ["gone", "cut", "empty", "overwritten", "foreign"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_damaged_file_is_named(tmp_path: Path, damage: str, rank: int) -> None:
    file = spread(tmp_path)[rank]
    data = file.read_bytes()
    file.unlink()
    if damage == "foreign":
        save_file({"x": torch.ones(6)}, file)
    elif damage != "gone":
        file.write_bytes({"cut": data[:-1], "empty": b"", "overwritten": b"\0" * len(data)}[damage])
    with pytest.raises(UserError, match=f"{file} cannot be read .*Resume from an older one"):
        storage.Reader(tmp_path)


def test_tensor_with_a_part_missing_is_named(tmp_path: Path) -> None:
    parts = [storage.Piece("x", torch.Size([4, 2]), (row, 0), torch.ones(1, 2)) for row in (0, 1, 3)]
    storage.write(tmp_path, parts, None)
    with pytest.raises(UserError, match="has only parts of x"):
        storage.Reader(tmp_path)


LAYOUTS = ["plain", "sharded", "both", "fused", "columns"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.tied = nn.Linear(6, 8), nn.Linear(8, 7, bias=False), nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.tied.weight = self.a.weight


def build(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with tied weights, with some that the ranks cannot divide, and an optimizer that has made a step."""
    torch.manual_seed(seed)
    model = Model()
    if layout == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    elif layout != "plain":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        inner = {"both": Shard(0), "fused": FUSED, "columns": Shard(1)}[layout]
        for owner, placement in ((model.a, inner), (model.b, Shard(0))):
            owner.weight = nn.Parameter(distribute_tensor(owner.weight.detach(), mesh["tensor"], [placement]))
        model.a.bias = nn.Parameter(distribute_tensor(model.a.bias.detach(), mesh["tensor"], [Replicate()]))
        model.tied.weight = model.a.weight
        fully_shard(model, mesh=mesh["shard"])  # the norm is then on this mesh only, so twice in the job
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, foreach=False)
    for index, param in enumerate(model.parameters()):
        param.grad = param.detach() * (index + 1)
    optimizer.step()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return state.tensors_of(model)[0] | {
        f"optim.{name}.{key}": value
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }


def test_any_layout_reads_any_other(ranks4, tmp_path: Path) -> None:
    model, optimizer = build("plain", 1)
    expected = everything(model, optimizer)
    for answer in ranks4.run(over_layouts, str(tmp_path)):
        assert answer == []
    for layout in LAYOUTS:
        keys = list(
            chain.from_iterable(safe_open(file, "pt").keys() for file in (tmp_path / layout).glob("*.safetensors"))
        )
        assert len(keys) == len(set(keys))  # nothing is written twice
        reader = storage.Reader(tmp_path / layout)
        assert reader.entries.keys() == {*expected, "shared", *(f"rank.{n:05d}" for n in range(4))}
        for name, value in expected.items():
            assert torch.equal(reader.read(name), value), (layout, name)
        other, other_optimizer = build("plain", 2)
        saved = state.restore(tmp_path / layout, other, other_optimizer, None)
        assert saved.ranks == [{"rank": n} for n in range(4)]
        for name, value in everything(other, other_optimizer).items():
            assert torch.equal(value, expected[name]), (layout, name)


def over_layouts(folder: str) -> list[str]:
    world = World.join("cpu")
    for layout in LAYOUTS:
        model, optimizer = build(layout, 1)
        tensors = state.collect(model, optimizer, {}, {"rank": world.rank}, world.rank)
        state.save(Path(folder) / layout, tensors, world)
    wrong = []
    for source in LAYOUTS:
        for layout in LAYOUTS:
            right, other = (build(layout, seed) for seed in (1, 2))
            state.restore(Path(folder) / source, *other, world.host_group)
            found = everything(*other)
            for name, expected in everything(*right).items():
                here, there = ([part for _, part in local_shards(tensor)] for tensor in (found[name], expected))
                if len(here) != len(there) or not all(map(torch.equal, here, there)):
                    wrong.append(f"{source} to {layout}: {name}")
    world.close()
    return wrong


def test_writing_is_shared_but_buffers_are_rank_0s(ranks2, tmp_path: Path) -> None:
    ranks2.run(save_replicated, str(tmp_path / "x"))
    files = [safe_open(file, "pt") for file in sorted((tmp_path / "x").glob("*.safetensors"))]
    keys = [set(file.keys()) for file in files]
    assert all(any(".weight" in key for key in part) for part in keys)
    reader = storage.Reader(tmp_path / "x")
    assert reader.read("model.norm.running_mean").tolist() == [0.0] * 5  # which differs: rank 0's
    assert "model.norm.running_mean@0" in keys[0]


def save_replicated(folder: str) -> None:
    world = World.join("cpu")
    model = Model()
    model.norm.running_mean += world.rank
    tensors = state.collect(model, torch.optim.SGD(model.parameters(), 0.1), {}, {}, world.rank)
    state.save(Path(folder), tensors, world)
    world.close()


@pytest.mark.parametrize("where", ["on the disk", "on one rank"])
def test_all_ranks_say_which_file_is_damaged(ranks2, tmp_path: Path, where: str) -> None:
    ranks2.run(save_replicated, str(tmp_path / "x"))
    hidden = where == "on one rank"
    file = tmp_path / "x" / f"rank_0000{2 if hidden else 1}.safetensors"
    if not hidden:
        file.write_bytes(file.read_bytes()[:-9])
    for answer in ranks2.run(read_damaged, str(tmp_path / "x"), hidden):
        assert f"checkpoint file {file} cannot be read" in answer


def read_damaged(folder: str, hidden: bool) -> str:
    world = World.join("cpu")
    real = storage.file_of
    if hidden and world.rank == 1:  # as on a machine whose disk lacks the file
        storage.file_of = lambda folder, rank: real(folder, 2 * rank)
    with pytest.raises(UserError) as caught:
        state.restore(Path(folder), Model(), None, world.host_group)
    storage.file_of = real
    world.close()
    return str(caught.value)


def test_failure_of_one_rank_is_raised_on_all(ranks2, tmp_path: Path) -> None:
    assert ranks2.run(one_fails, str(tmp_path)) == ["rank 1: OSError: [Errno 28] No space left on device"] * 2


def one_fails(folder: str) -> str:
    world = World.join("cpu")

    def parts() -> Any:
        if world.rank == 1:
            raise OSError(28, "No space left on device")
        yield from storage.cut({"x": torch.ones(1)})

    with pytest.raises(RuntimeError) as caught:
        storage.write(Path(folder), parts(), world.host_group)
    world.close()
    return str(caught.value)
