"""The checkpoint format: one file for each rank, readable on every layout, refused if it is incomplete."""

import json
import re
from itertools import product

import pytest
import torch
from conftest import user_error
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_engines import message_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from mvp_engine.checkpoint import format as checkpoint_format
from mvp_engine.checkpoint import state
from mvp_engine.checkpoint.format import SafetensorsReader
from mvp_engine.distributed.dtensor import local_shards

FUSED = _StridedShard(0, split_factor=2)


def write(folder, **tensors):
    checkpoint_format.write(folder, checkpoint_format.shards_of(tensors), None)
    return checkpoint_format.Reader(folder)


def test_reader_every_dtype_and_shape_round_trips(tmp_path):
    floats = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    kinds = [*floats, torch.int64, torch.uint8, torch.bool]
    tensors = {str(kind): torch.arange(6).view(2, 3).to(kind) for kind in kinds}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}
    tensors |= {"turned": torch.arange(6.0).view(2, 3).T}
    tensors |= {"a@0": torch.ones(1), "a": torch.zeros(2)}  # names may look like keys of the format
    reader = write(tmp_path, **tensors)
    assert reader.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        entry = reader.entries[name]
        assert (entry.shape, entry.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(reader.read(name), tensor)
        other = torch.ones_like(tensor)
        reader.fill({name: other})
        assert torch.equal(other, tensor)


def test_reader_slice_reads_only_overlapping_shards(tmp_path, monkeypatch):
    full = torch.arange(48.0).view(8, 6)
    parts = [
        checkpoint_format.Shard("x", full.shape, (r, c), full[r : r + 2, c : c + 3])
        for r in (0, 2, 4, 6)
        for c in (0, 3)
    ]
    checkpoint_format.write(tmp_path, parts, None)
    reader = checkpoint_format.Reader(tmp_path)
    touched = []
    read = SafetensorsReader.read

    def watched(self, path, key, index):
        part = read(self, path, key, index)
        touched.append((key, tuple(part.shape)))
        return part

    monkeypatch.setattr(SafetensorsReader, "read", watched)
    assert torch.equal(reader.read("x", (3, 1), (2, 2)), full[3:5, 1:3])
    assert touched == [("x@2,0", (1, 2)), ("x@4,0", (1, 2))]
    assert torch.equal(reader.read("x", (1, 0), (7, 6)), full[1:])
    assert torch.equal(reader.read("x"), full)
    message = r"a slice \(2, 2\) at \(7, 0\) exceeds the shape \(8, 6\)"
    with pytest.raises(IndexError, match=message):
        reader.read("x", (7, 0), (2, 2))


def test_reader_fill_casts_dtypes_and_refuses_other_shapes(tmp_path):
    reader = write(tmp_path, x=torch.tensor([1.0, 2.5]))
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    reader.fill({"x": half})
    assert half.tolist() == [1.0, 2.5]
    with user_error(r"x has the shape \(2,\) there and \(3,\) in this model"):
        reader.fill({"x": torch.zeros(3)})


def test_write_files_have_the_default_permissions(tmp_path):
    write(tmp_path / "sub", x=torch.ones(1))
    file, ordinary = tmp_path / "sub" / "rank_00000.safetensors", tmp_path / "ordinary"
    ordinary.touch()
    assert file.stat().st_mode == ordinary.stat().st_mode


def about(name, size, offset):
    return {"name": name, "dtype": "torch.float32", "shape": [size], "offset": [offset]}


def write_by_hand(folder, ranks=3):
    """A checkpoint of three ranks, written by hand: x in three shards, y complete and twice."""
    for rank in range(ranks):
        key = f"x@{2 * rank}"
        pieces = {key: about("x", 6, 2 * rank)}
        tensors = {key: torch.arange(6.0)[2 * rank : 2 * rank + 2]}
        if rank:
            pieces["y@0"] = about("y", 2, 0)
            tensors["y@0"] = torch.ones(2)
        metadata = {"ranks": str(ranks), "pieces": json.dumps(pieces)}
        save_file(tensors, folder / f"rank_{rank:05d}.safetensors", metadata)
    return sorted(folder.iterdir())


def test_reader_shards_that_two_ranks_wrote_count_once(tmp_path):
    write_by_hand(tmp_path)
    reader = checkpoint_format.Reader(tmp_path)
    assert [len(reader.shards(name)) for name in "xy"] == [3, 1]
    assert reader.read("x").tolist() == [0, 1, 2, 3, 4, 5]
    assert reader.read("y").tolist() == [1, 1]


@pytest.mark.parametrize("damage", ["gone", "cut", "empty", "overwritten", "foreign"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_reader_damaged_file_is_named(tmp_path, damage, rank):
    file = write_by_hand(tmp_path)[rank]
    data = file.read_bytes()
    file.unlink()
    if damage == "foreign":
        save_file({"x": torch.ones(6)}, file)
    elif damage != "gone":
        file.write_bytes({"cut": data[:-1], "empty": b"", "overwritten": b"\0" * len(data)}[damage])
    with user_error(f"{file} cannot be read .*Resume from an older one"):
        checkpoint_format.Reader(tmp_path)


def test_reader_tensor_with_a_missing_shard_is_named(tmp_path):
    size = torch.Size([4, 2])
    rows = [(row, torch.ones(1, 2)) for row in (0, 1, 3)]
    shards = [checkpoint_format.Shard("x", size, (row, 0), part) for row, part in rows]
    checkpoint_format.write(tmp_path, shards, None)
    with user_error("has only some shards of x"):
        checkpoint_format.Reader(tmp_path)


LAYOUTS = ["plain", "sharded", "both", "fused", "columns"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 7, bias=False)
        self.tied = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.tied.weight = self.a.weight


def distribute(owner, name, mesh, placement):
    tensor = distribute_tensor(getattr(owner, name).detach(), mesh, [placement])
    setattr(owner, name, nn.Parameter(tensor))


def build(layout, seed):
    """A model with tied weights and sizes that do not divide, and an optimizer that has made a step."""
    torch.manual_seed(seed)
    model = Model()
    if layout == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    elif layout != "plain":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        inner = {"both": Shard(0), "fused": FUSED, "columns": Shard(1)}[layout]
        distribute(model.a, "weight", mesh["tensor"], inner)
        distribute(model.b, "weight", mesh["tensor"], Shard(0))
        distribute(model.a, "bias", mesh["tensor"], Replicate())
        model.tied.weight = model.a.weight
        fully_shard(model, mesh=mesh["shard"])  # the norm is on this mesh only: two copies
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, foreach=False)
    for index, param in enumerate(model.parameters()):
        param.grad = param.detach() * (index + 1)
    optimizer.step()
    return model, optimizer


def everything(model, optimizer):
    found = state.tensors_of(model)[0]
    for name, param in model.named_parameters():
        found |= {f"optim.{name}.{key}": value for key, value in optimizer.state[param].items()}
    return found


@pytest.mark.slow
def test_restore_any_layout_reads_any_other(on_ranks, tmp_path):
    expected = everything(*build("plain", 1))
    for wrong in on_ranks({"replicate": 4}, over_layouts, tmp_path):
        assert wrong == []
    of_ranks = {"shared", *(f"rank.{n:05d}" for n in range(4))}
    for layout in LAYOUTS:
        folder = tmp_path / layout
        files = [safe_open(file, "pt") for file in folder.glob("*.safetensors")]
        keys = [key for file in files for key in file.keys()]  # noqa: SIM118 - no dict
        assert len(keys) == len(set(keys))  # no shard is written twice
        reader = checkpoint_format.Reader(folder)
        assert reader.entries.keys() == {*expected, *of_ranks}
        for name, value in expected.items():
            assert torch.equal(reader.read(name), value), (layout, name)
        other, other_optimizer = build("plain", 2)
        saved = state.restore(folder, other, other_optimizer, None)
        assert list(saved.ranks) == [{"rank": n} for n in range(4)]
        for name, value in everything(other, other_optimizer).items():
            assert torch.equal(value, expected[name]), (layout, name)


def over_layouts(layout, folder):
    """Save on all layouts, load each on each; returns what differs."""
    world = layout.world
    for name in LAYOUTS:
        model, optimizer = build(name, 1)
        tensors = state.collect(model, optimizer, {}, {"rank": world.rank}, world.rank)
        state.save(folder / name, tensors, world)
    wrong = []
    for source, target in product(LAYOUTS, LAYOUTS):
        right, other = (build(target, seed) for seed in (1, 2))
        state.restore(folder / source, *other, world.host_group)
        found = everything(*other)
        for name, expected in everything(*right).items():
            here, there = (
                [part for _, part in local_shards(tensor)] for tensor in (found[name], expected)
            )
            if len(here) != len(there) or not all(map(torch.equal, here, there)):
                wrong.append(f"{source} to {target}: {name}")
    return wrong


def test_save_tensors_are_spread_over_ranks_and_buffers_are_those_of_rank_0(on_ranks, tmp_path):
    on_ranks({"replicate": 2}, save_replicated, tmp_path)
    files = [safe_open(file, "pt") for file in sorted(tmp_path.glob("*.safetensors"))]
    keys = [set(file.keys()) for file in files]
    assert all(any(".weight" in key for key in part) for part in keys)
    mean = checkpoint_format.Reader(tmp_path).read("model.norm.running_mean")
    assert mean.tolist() == [0.0] * 5  # the ranks differ: rank 0's counts
    assert "model.norm.running_mean@0" in keys[0]


def save_replicated(layout, folder):
    world = layout.world
    model = Model()
    model.norm.running_mean += world.rank
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state.save(folder, state.collect(model, optimizer, {}, {}, world.rank), world)


@pytest.mark.parametrize("hidden", [False, True], ids=["on the disk", "on one rank"])
def test_restore_damaged_file_is_named_on_all_ranks(on_ranks, tmp_path, hidden):
    on_ranks({"replicate": 2}, save_replicated, tmp_path)
    file = tmp_path / f"rank_0000{2 if hidden else 1}.safetensors"
    if not hidden:
        file.write_bytes(file.read_bytes()[:-9])
    for message in on_ranks({"replicate": 2}, message_of, read_damaged, tmp_path, hidden):
        assert f"checkpoint file {file} cannot be read" in message


def read_damaged(layout, folder, hidden):
    real = checkpoint_format.rank_file
    if hidden and layout.world.rank == 1:  # a machine whose disk lacks the file
        checkpoint_format.rank_file = lambda folder, rank: real(folder, 2 * rank)
    try:
        state.restore(folder, Model(), None, layout.world.host_group)
    finally:
        checkpoint_format.rank_file = real


def test_write_failure_of_one_rank_is_raised_on_all(on_ranks, tmp_path):
    on_ranks({"replicate": 2}, fail_on_rank_1, tmp_path)


def fail_on_rank_1(layout, folder):
    def parts():
        if layout.world.rank == 1:
            raise OSError(28, "No space left on device")
        yield from checkpoint_format.shards_of({"x": torch.ones(1)})

    message = re.escape("rank 1: OSError: [Errno 28] No space left on device")
    with pytest.raises(RuntimeError, match=message):
        checkpoint_format.write(folder, parts(), layout.world.host_group)
