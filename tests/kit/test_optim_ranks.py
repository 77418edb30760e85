"""The optimizer kit on sharded layouts: updates equal those of one rank, checkpoints load on any layout."""

import pytest
import torch
import torch.distributed as dist
from conftest import CAMPAIGN
from families import parallel
from test_optim import contents, net, settings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor, local_shards, local_tensor, shard_slices
from mvp_engine.errors import UserError
from mvp_engine.kit import OptimKit
from mvp_engine.model_engine import FSDPEngine

ONE_RANK = World(0, 1, 0, 1, torch.device("cpu"))


def engine(world, options):
    made = FSDPEngine(net(), Layout.of(world, parallel(shard=world.size)))
    made.initialize(OptimKit(settings(**options), seed=5).build_optimizer)
    return made


def steps(model, optimizer, first, last):
    """Updates by random gradients that do not depend on the layout."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            full = torch.randn(param.shape, generator=generator)
            param.grad = torch.empty_like(param)
            for offset, shard in local_shards(param.grad):
                shard.copy_(full[shard_slices(offset, shard)])
        optimizer.step()


def gathered(made):
    """The full tensors of all weights and optimizer states."""
    found = {}
    for name, param in made.model.named_parameters():
        found[name] = full_tensor(param.detach()).clone()
        for key, value in made.optimizer.state[param].items():
            found[f"{name}/{key}"] = full_tensor(value).clone()
    return found


def train_and_save(options, folder):
    """On each of two ranks: the full tensors after three steps, and the bytes of this rank's optimizer states."""
    world = World.join("cpu")
    made = engine(world, options)
    steps(made.model, made.optimizer, 0, 3)
    made.save_checkpoint(folder)
    found = gathered(made)
    states = [value for state in made.optimizer.state.values() for value in state.values()]
    world.close()
    return found, sum(local_tensor(value).nbytes for value in states if value.ndim)


LOW_PRECISION = (torch.bfloat16, torch.int8)
KINDS = [
    {"state_dtype": "float32"},
    {"state_dtype": "int8"},
    {"name": "muon"},
    pytest.param({"state_dtype": "bfloat16"}, marks=CAMPAIGN),
    pytest.param({"name": "muon", "state_dtype": "int8"}, marks=CAMPAIGN),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS, ids=lambda options: "-".join(options.values()))
def test_optimizer_on_two_shards_updates_and_resumes_like_one_rank(ranks2, tmp_path, options):
    """Bit-equal with low-precision states; within 1e-6 with torch's fused kernel and with Muon's matmuls."""
    options = {**options, "ema": 0.9}
    one = engine(ONE_RANK, options)
    steps(one.model, one.optimizer, 0, 3)
    (two, own_bytes), (other, other_bytes) = ranks2.run(train_and_save, options, tmp_path / "saved")
    expected = gathered(one)
    assert expected.keys() == two.keys() == other.keys()
    for name, value in expected.items():
        assert torch.equal(two[name], other[name]), name
        exact = is_elementwise(name, expected) or "momentum" in name
        assert torch.allclose(
            value.float(), two[name].float(), rtol=0, atol=0 if exact else 1e-6
        ), name
    all_bytes = sum(value.nbytes for name, value in expected.items() if "/" in name and value.ndim)
    assert own_bytes + other_bytes == all_bytes  # no state is replicated
    resumed = engine(ONE_RANK, options)
    resumed.load_checkpoint(tmp_path / "saved")
    loaded = gathered(resumed)
    assert all(torch.equal(loaded[name], value) for name, value in two.items())
    steps(resumed.model, resumed.optimizer, 3, 5)
    steps(one.model, one.optimizer, 3, 5)
    for name, value in gathered(one).items():
        atol = 0 if is_elementwise(name, expected) else 1e-6
        assert torch.allclose(value.float(), gathered(resumed)[name].float(), rtol=0, atol=atol), (
            name
        )


def is_elementwise(name, found):
    """Whether a result does not depend on the shard sizes. Muon's and that of torch's fused kernel do.

    The fused kernel computes the last elements of a tensor by another code path, an ulp apart.
    """
    param = name.partition("/")[0]
    return any(
        found.get(f"{param}/exp_avg{key}", torch.empty(0)).dtype in LOW_PRECISION
        for key in ("", "_codes")
    )


ROW_OPTIONS = [
    {"state_dtype": "int8"},
    {"name": "muon"},
    {"state_dtype": "bfloat16"},
]


def train_with_sharded_rows(folder):
    """Matrices that are sharded inside of rows, as by tensor parallel; loads an int8 checkpoint on such a layout."""
    from mvp_engine.checkpoint import state

    world = World.join("cpu")
    mesh = init_device_mesh("cpu", (2,))
    made = []
    for options in ROW_OPTIONS:
        is_int8 = options.get("state_dtype") == "int8"
        model = one_matrix(lambda full: distribute_tensor(full, mesh, [Shard(1)]), wide=is_int8)
        optimizer = OptimKit(settings(**options), seed=5).build_optimizer(model)
        steps(model, optimizer, 0, 2)
        made += [full_tensor(param.detach()) for param in model.parameters()]
    model = one_matrix(lambda full: distribute_tensor(full, mesh, [Shard(1)]))
    try:
        OptimKit(settings(state_dtype="int8")).build_optimizer(model)
    except UserError as error:
        message = str(error)
    for dim in (0, 1):
        model = one_matrix(lambda full, dim=dim: distribute_tensor(full, mesh, [Shard(dim)]))
        optimizer = OptimKit(settings(), seed=5).build_optimizer(model)
        state.restore(folder, model, optimizer, world.host_group)
        kept = optimizer.state[next(model.parameters())]
        made += [full_tensor(kept[key]) for key in ("exp_avg", "exp_avg_sq")]
    world.close()
    return made, message


def one_matrix(place=lambda full: full, wide=False):
    """A model of one block with one matrix: rows of 300, or wide ones of whole int8 blocks on each of two ranks."""
    torch.manual_seed(4)
    model = nn.Module()
    block = nn.ParameterDict({"weight": nn.Parameter(place(torch.randn(5, 512 if wide else 300)))})
    model.layers = nn.ModuleList([block])
    return model


def test_optimizer_on_rows_sharded_inside_of_blocks_updates_like_one_rank_or_raises(
    ranks2, tmp_path
):
    expected = []
    for options in ROW_OPTIONS:
        model = one_matrix(wide=options.get("state_dtype") == "int8")
        optimizer = OptimKit(settings(**options), seed=5).build_optimizer(model)
        steps(model, optimizer, 0, 2)
        expected += [param.detach() for param in model.parameters()]
    saved = FSDPEngine(one_matrix(), Layout(ONE_RANK))
    saved.initialize(OptimKit(settings(state_dtype="int8"), seed=5).build_optimizer)
    steps(saved.model, saved.optimizer, 0, 2)
    saved.save_checkpoint(tmp_path / "saved")
    converted = FSDPEngine(one_matrix(), Layout(ONE_RANK))
    converted.initialize(OptimKit(settings()).build_optimizer)
    converted.load_checkpoint(tmp_path / "saved")
    kept = contents(converted.model, converted.optimizer)
    expected += 2 * [kept["layers.0.weight/exp_avg"], kept["layers.0.weight/exp_avg_sq"]]
    for found, message in ranks2.run(train_with_sharded_rows, tmp_path / "saved"):
        for a, b in zip(expected, found, strict=True):
            assert torch.allclose(a, b, atol=1e-6)
        assert "optim.state_dtype=int8: layers.0.weight is sharded inside of rows" in message
        assert "Set optim.state_dtype=bfloat16" in message


def muon_on_a_mesh(shape, placements):
    world = World.join("cpu")
    mesh = init_device_mesh("cpu", shape)
    model = six_matrices(lambda full: distribute_tensor(full, mesh, placements))
    optimizer = OptimKit(settings(name="muon")).build_optimizer(model)
    steps(model, optimizer, 0, 2)
    found = [full_tensor(param.detach()) for param in model.parameters()]
    dist.barrier()
    world.close()
    return found


def six_matrices(place=lambda full: full):
    torch.manual_seed(4)
    model = nn.Module()
    shapes = [(6, 10), (9, 4), (5, 5), (7, 12), (8, 8), (3, 6, 6)]
    blocks = [
        nn.ParameterDict({"weight": nn.Parameter(place(torch.randn(shape)))}) for shape in shapes
    ]
    model.layers = nn.ModuleList(blocks)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "placements", [["copy", 0], [0, 1]], ids=["replicate-shard", "shard-tensor"]
)
def test_muon_on_a_mesh_of_two_dimensions_updates_like_one_rank(ranks4, placements):
    from torch.distributed.tensor import Replicate

    model = six_matrices()
    optimizer = OptimKit(settings(name="muon")).build_optimizer(model)
    steps(model, optimizer, 0, 2)
    on_mesh = [Replicate() if dim == "copy" else Shard(dim) for dim in placements]
    for found in ranks4.run(muon_on_a_mesh, (2, 2), on_mesh):
        for param, other in zip(model.parameters(), found, strict=True):
            assert torch.allclose(param.detach(), other, atol=1e-6)
