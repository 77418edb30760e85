"""Stacked experts are shared evenly by FSDP ranks, also by more ranks than there are experts."""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from conftest import CAMPAIGN
from families import overrides_of, parallel
from tiny_engines import (
    ALONE,
    adamw,
    assert_close,
    assert_equal,
    engine_of,
    packed,
    train,
    weights,
    whole_state,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.data_parallel import apply_fsdp, even_placement
from mvp_engine.distributed.dtensor import dim_slices
from mvp_engine.hf import LanguageModel

# The sizes of the published models.
MODELS = {
    "mixtral": {"model_type": "mixtral"},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "qwen3_235b": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "vocab_size": 151936,
    },
}


@contextmanager
def fake_world(size):
    """Rank 0 of `size` ranks that do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    world = World(0, size, 0, size, torch.device("cpu"))
    try:
        yield world
    finally:
        dist.destroy_process_group()
        world._forget_groups()


def elements_by_rank(model, ranks):
    """Parameters that each rank of a mesh of one dimension holds."""
    totals = [0] * ranks
    known = {}
    for param in model.parameters():
        assert isinstance(param, DTensor)
        key = (param.shape, param.placements)
        if key not in known:
            known[key] = [held(param, rank, ranks) for rank in range(ranks)]
        assert param.to_local().numel() == known[key][0]
        totals = [total + more for total, more in zip(totals, known[key], strict=True)]
    return totals


def held(param, rank, ranks):
    lengths = []
    for dim, size in enumerate(param.shape):
        slices = dim_slices(size, dim, param.placements, (ranks,), (rank,))
        lengths.append(sum(one.length for one in slices))
    return math.prod(lengths)


@pytest.mark.parametrize(
    "name, ranks",
    [
        ("mixtral", 16),
        ("gpt_oss", 64),
        pytest.param("qwen3_235b", 1024, marks=CAMPAIGN),
    ],
)
def test_fsdp_shards_of_published_moe_models_are_even(name, ranks):
    with fake_world(ranks) as world:
        model = LanguageModel.on_meta(None, MODELS[name])
        layout = Layout.of(world, parallel(shard=ranks))
        assert layout.shard_mesh is not None
        apply_fsdp(model, layout.shard_mesh)
        totals = elements_by_rank(model, ranks)
        assert sum(totals) == sum(param.numel() for param in model.parameters())
        assert max(totals) / min(totals) <= 1.05


@pytest.mark.parametrize(
    "shape, ranks, dim",
    [
        ((8, 6, 4), 4, 0),  # whole experts
        ((8, 32, 4), 16, 1),
        ((6, 12, 8), 4, 1),  # two ranks would hold 2 experts, two 1
        ((8, 6, 32), 16, 2),
        ((8, 6, 4), 16, 0),  # nothing divides
        ((8, 16), 16, 0),  # a matrix
    ],
)
def test_even_placement_of_shape_is_dimension(shape, ranks, dim):
    assert even_placement(nn.Parameter(torch.empty(shape, device="meta")), ranks).dim == dim


FEW = {"num_experts": 2, "num_local_experts": 2}  # fewer than ranks


def stepped(layout, family):
    engine = engine_of({**overrides_of(family), **FEW}, layout, adamw, seed=5)
    train(engine, packed(7, 3))
    return engine


def saved_on_ranks(layout, family, folder):
    """Save a tiny model after a step; returns what is sharded by dimension 1."""
    engine = stepped(layout, family)
    engine.save_checkpoint(folder)
    named = engine.model.named_parameters()
    sharded = [(name, param) for name, param in named if isinstance(param, DTensor)]
    return [name for name, param in sharded if any(one.is_shard(1) for one in param.placements)]


@CAMPAIGN
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_checkpoint_of_shards_inside_experts_is_that_of_one_rank(on_ranks, family, tmp_path):
    inner = on_ranks({"shard": 4}, saved_on_ranks, family, tmp_path / "saved")[0]
    assert sum(name.endswith("gate_up_proj") for name in inner) == 2
    alone = stepped(ALONE, family)
    expected = weights(alone.model)
    alone.load_checkpoint(tmp_path / "saved")
    assert_close(weights(alone.model), expected, floor=0.1)
    alone.save_checkpoint(tmp_path / "again")
    for saved, again in on_ranks({"shard": 4}, loaded, family, tmp_path):
        assert_equal(saved, again)


def loaded(layout, family, folder):
    """The weights and states of both checkpoints, read by these ranks."""
    engine = stepped(layout, family)
    states = []
    for name in ("saved", "again"):
        engine.load_checkpoint(folder / name)
        states.append(whole_state(engine))
    return states
