"""The checkpoint format: one file for each rank, readable on every layout, refused if it is incomplete."""

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

from mvp_engine.checkpoint import format as checkpoint_format
from mvp_engine.checkpoint import state
from mvp_engine.checkpoint.safetensors_io import SafetensorsReader
from mvp_engine.distributed import World
from mvp_engine.distributed.dtensor import local_shards
from mvp_engine.errors import UserError

FUSED = _StridedShard(0, split_factor=2)


def write(folder: Path, **tensors: Tensor) -> checkpoint_format.Reader:
    checkpoint_format.write(folder, checkpoint_format.shards_of(tensors), None)
    return checkpoint_format.Reader(folder)


def test_reader_every_dtype_and_shape_round_trips(tmp_path: Path) -> None:
    kinds = [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
    ]
    tensors = {str(kind): torch.arange(6).view(2, 3).to(kind) for kind in kinds}
    tensors |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(6.0).view(2, 3).T,
    }
    tensors |= {"a@0": torch.ones(1), "a": torch.zeros(2)}  # names may look like keys of the format
    reader = write(tmp_path, **tensors)
    assert reader.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (reader.entries[name].shape, reader.entries[name].dtype) == (
            tensor.shape,
            tensor.dtype,
        )
        assert torch.equal(reader.read(name), tensor)
        other = torch.ones_like(tensor)
        reader.fill({name: other})
        assert torch.equal(other, tensor)


def test_reader_slice_reads_only_overlapping_shards(tmp_path: Path, monkeypatch) -> None:
    full = torch.arange(48.0).view(8, 6)
    parts = [
        checkpoint_format.Shard("x", full.shape, (r, c), full[r : r + 2, c : c + 3])
        for r in (0, 2, 4, 6)
        for c in (0, 3)
    ]
    checkpoint_format.write(tmp_path, parts, None)
    reader = checkpoint_format.Reader(tmp_path)
    touched: list[Any] = []
    read = SafetensorsReader.read

    def watched(self: SafetensorsReader, path: Path, key: str, index: tuple[slice, ...]) -> Tensor:
        part = read(self, path, key, index)
        touched.append((key, tuple(part.shape)))
        return part

    monkeypatch.setattr(SafetensorsReader, "read", watched)
    assert torch.equal(reader.read("x", (3, 1), (2, 2)), full[3:5, 1:3])
    assert touched == [("x@2,0", (1, 2)), ("x@4,0", (1, 2))]
    assert torch.equal(reader.read("x", (1, 0), (7, 6)), full[1:])
    assert torch.equal(reader.read("x"), full)
    with pytest.raises(
        IndexError, match=r"a slice \(2, 2\) at \(7, 0\) exceeds the shape \(8, 6\)"
    ):
        reader.read("x", (7, 0), (2, 2))


def test_reader_fill_casts_dtypes_and_refuses_other_shapes(tmp_path: Path) -> None:
    reader = write(tmp_path, x=torch.tensor([1.0, 2.5]))
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    reader.fill({"x": half})
    assert half.tolist() == [1.0, 2.5]
    with pytest.raises(UserError, match=r"x has the shape \(2,\) there and \(3,\) in this model"):
        reader.fill({"x": torch.zeros(3)})


def test_write_files_have_the_default_permissions(tmp_path: Path) -> None:
    write(tmp_path / "sub", x=torch.ones(1))
    (tmp_path / "ordinary").touch()
    assert (tmp_path / "sub" / "rank_00000.safetensors").stat().st_mode == (
        tmp_path / "ordinary"
    ).stat().st_mode


def write_by_hand(folder: Path, ranks: int = 3) -> list[Path]:
    """A checkpoint of three ranks, written by hand: x in three shards, y complete and twice."""
    x, y = torch.arange(6.0), torch.ones(2)
    for rank in range(ranks):
        key = f"x@{2 * rank}"
        about = {key: {"name": "x", "dtype": "torch.float32", "shape": [6], "offset": [2 * rank]}}
        about |= (
            {"y@0": {"name": "y", "dtype": "torch.float32", "shape": [2], "offset": [0]}}
            if rank
            else {}
        )
        data = {key: x[2 * rank : 2 * rank + 2], "y@0": y}
        metadata = {"ranks": str(ranks), "pieces": json.dumps(about)}
        save_file(
            {key: data[key] for key in about}, folder / f"rank_{rank:05d}.safetensors", metadata
        )
    return sorted(folder.iterdir())


def test_reader_shards_that_two_ranks_wrote_count_once(tmp_path: Path) -> None:
    write_by_hand(tmp_path)
    reader = checkpoint_format.Reader(tmp_path)
    assert [len(reader.shards(name)) for name in "xy"] == [3, 1]
    assert reader.read("x").tolist() == [0, 1, 2, 3, 4, 5]
    assert reader.read("y").tolist() == [1, 1]


@pytest.mark.parametrize("damage", ["gone", "cut", "empty", "overwritten", "foreign"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_reader_damaged_file_is_named(tmp_path: Path, damage: str, rank: int) -> None:
    file = write_by_hand(tmp_path)[rank]
    data = file.read_bytes()
    file.unlink()
    if damage == "foreign":
        save_file({"x": torch.ones(6)}, file)
    elif damage != "gone":
        file.write_bytes({"cut": data[:-1], "empty": b"", "overwritten": b"\0" * len(data)}[damage])
    with pytest.raises(UserError, match=f"{file} cannot be read .*Resume from an older one"):
        checkpoint_format.Reader(tmp_path)


def test_reader_tensor_with_a_missing_shard_is_named(tmp_path: Path) -> None:
    parts = [
        checkpoint_format.Shard("x", torch.Size([4, 2]), (row, 0), torch.ones(1, 2))
        for row in (0, 1, 3)
    ]
    checkpoint_format.write(tmp_path, parts, None)
    with pytest.raises(UserError, match="has only some shards of x"):
        checkpoint_format.Reader(tmp_path)


LAYOUTS = ["plain", "sharded", "both", "fused", "columns"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.tied = (
            nn.Linear(6, 8),
            nn.Linear(8, 7, bias=False),
            nn.Linear(6, 8, bias=False),
        )
        self.norm = nn.BatchNorm1d(5)
        self.tied.weight = self.a.weight


def build(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with tied weights and sizes that do not divide, and an optimizer that has made a step."""
    torch.manual_seed(seed)
    model = Model()
    if layout == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    elif layout != "plain":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        inner = {"both": Shard(0), "fused": FUSED, "columns": Shard(1)}[layout]
        for owner, placement in ((model.a, inner), (model.b, Shard(0))):
            owner.weight = nn.Parameter(
                distribute_tensor(owner.weight.detach(), mesh["tensor"], [placement])
            )
        model.a.bias = nn.Parameter(
            distribute_tensor(model.a.bias.detach(), mesh["tensor"], [Replicate()])
        )
        model.tied.weight = model.a.weight
        fully_shard(model, mesh=mesh["shard"])  # the norm is on this mesh only: two copies
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


@pytest.mark.slow
def test_restore_any_layout_reads_any_other(ranks4, tmp_path: Path) -> None:
    model, optimizer = build("plain", 1)
    expected = everything(model, optimizer)
    for answer in ranks4.run(over_layouts, str(tmp_path)):
        assert answer == []
    for layout in LAYOUTS:
        keys = list(
            chain.from_iterable(
                safe_open(file, "pt").keys() for file in (tmp_path / layout).glob("*.safetensors")
            )
        )
        assert len(keys) == len(set(keys))  # no shard is written twice
        reader = checkpoint_format.Reader(tmp_path / layout)
        assert reader.entries.keys() == {*expected, "shared", *(f"rank.{n:05d}" for n in range(4))}
        for name, value in expected.items():
            assert torch.equal(reader.read(name), value), (layout, name)
        other, other_optimizer = build("plain", 2)
        saved = state.restore(tmp_path / layout, other, other_optimizer, None)
        assert list(saved.ranks) == [{"rank": n} for n in range(4)]
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
                here, there = (
                    [part for _, part in local_shards(tensor)] for tensor in (found[name], expected)
                )
                if len(here) != len(there) or not all(map(torch.equal, here, there)):
                    wrong.append(f"{source} to {layout}: {name}")
    world.close()
    return wrong


def test_save_tensors_are_spread_over_ranks_and_buffers_are_those_of_rank_0(
    ranks2, tmp_path: Path
) -> None:
    ranks2.run(save_replicated, str(tmp_path / "x"))
    files = [safe_open(file, "pt") for file in sorted((tmp_path / "x").glob("*.safetensors"))]
    keys = [set(file.keys()) for file in files]
    assert all(any(".weight" in key for key in part) for part in keys)
    reader = checkpoint_format.Reader(tmp_path / "x")
    assert (
        reader.read("model.norm.running_mean").tolist() == [0.0] * 5
    )  # the ranks differ: rank 0's counts
    assert "model.norm.running_mean@0" in keys[0]


def save_replicated(folder: str) -> None:
    world = World.join("cpu")
    model = Model()
    model.norm.running_mean += world.rank
    tensors = state.collect(model, torch.optim.SGD(model.parameters(), 0.1), {}, {}, world.rank)
    state.save(Path(folder), tensors, world)
    world.close()


@pytest.mark.parametrize("where", ["on the disk", "on one rank"])
def test_restore_damaged_file_is_named_on_all_ranks(ranks2, tmp_path: Path, where: str) -> None:
    ranks2.run(save_replicated, str(tmp_path / "x"))
    hidden = where == "on one rank"
    file = tmp_path / "x" / f"rank_0000{2 if hidden else 1}.safetensors"
    if not hidden:
        file.write_bytes(file.read_bytes()[:-9])
    for answer in ranks2.run(read_damaged, str(tmp_path / "x"), hidden):
        assert f"checkpoint file {file} cannot be read" in answer


def read_damaged(folder: str, hidden: bool) -> str:
    world = World.join("cpu")
    real = checkpoint_format.rank_file
    if hidden and world.rank == 1:  # a machine whose disk lacks the file
        checkpoint_format.rank_file = lambda folder, rank: real(folder, 2 * rank)
    with pytest.raises(UserError) as caught:
        state.restore(Path(folder), Model(), None, world.host_group)
    checkpoint_format.rank_file = real
    world.close()
    return str(caught.value)


def test_write_failure_of_one_rank_is_raised_on_all(ranks2, tmp_path: Path) -> None:
    assert (
        ranks2.run(one_fails, str(tmp_path))
        == ["rank 1: OSError: [Errno 28] No space left on device"] * 2
    )


def one_fails(folder: str) -> str:
    world = World.join("cpu")

    def parts() -> Any:
        if world.rank == 1:
            raise OSError(28, "No space left on device")
        yield from checkpoint_format.shards_of({"x": torch.ones(1)})

    with pytest.raises(RuntimeError) as caught:
        checkpoint_format.write(Path(folder), parts(), world.host_group)
    world.close()
    return str(caught.value)
