"""DTensor geometry: the shards of all ranks are the full tensor, for every kind of placement."""

from itertools import pairwise, product
from math import prod

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from mvp_engine.distributed.dtensor import dim_slices, full_tensor, is_writer, local_shards

FUSED = _StridedShard(0, split_factor=2)


def numbered(*shape):
    return torch.arange(1.0, 1 + prod(shape)).view(shape)


def test_local_shards_of_a_plain_tensor_is_one_view():
    for tensor in (numbered(3, 4), torch.tensor(2.5), torch.empty(0, 3), nn.Parameter(numbered(2))):
        [(offset, part)] = local_shards(tensor)
        assert offset == (0,) * tensor.ndim
        assert part.shape == tensor.shape
        assert part.data_ptr() == tensor.data_ptr()
        assert not part.requires_grad


# Placements on a mesh of 4 or of 2 x 2 that DTensor splits from left to right: its own full_tensor() is the reference.
DTENSOR_CASES = [
    ((8, 3), (4,), (Shard(0),)),
    *(((size, 3), (4,), (Shard(0),)) for size in (7, 5, 3, 1)),  # the last ranks hold less
    ((3, 10), (4,), (Shard(1),)),
    ((5, 6), (2, 2), (Replicate(), Shard(0))),
    ((5, 6), (2, 2), (Shard(1), Replicate())),
    ((5, 7), (2, 2), (Shard(1), Shard(0))),
    ((9, 2), (2, 2), (Shard(0), Shard(0))),
    ((16, 2), (4,), (FUSED,)),
    ((3, 8), (4,), (_StridedShard(1, split_factor=2),)),
    ((4, 6), (2, 2), (_StridedShard(1, split_factor=3), Shard(0))),
    ((), (2, 2), (Replicate(), Replicate())),
    ((0, 4), (4,), (Shard(0),)),
]
# Placements on the tensor mesh of 2, then FSDP2 over 2.
FSDP_CASES = [
    *(((size, 4), Shard(0)) for size in (8, 7, 9, 5, 3, 1)),
    ((6, 5), Shard(1)),
    ((5, 4), Replicate()),
]
FSDP_CASES += [((size, 4), FUSED) for size in (8, 12, 4)]


def test_local_shards_of_all_ranks_cover_the_tensor_once(on_ranks):
    answers = on_ranks({"replicate": 4}, shards_of_all_cases)
    for case in range(len(DTENSOR_CASES) + len(FSDP_CASES)):
        expected, _, reference = answers[0][case]
        found = torch.zeros_like(expected)
        written = torch.zeros_like(expected)
        for answer in answers:
            for offset, part, writes in answer[case][1]:
                index = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
                found[index] = part
                written[index] += writes
        assert torch.equal(found, expected), case
        assert torch.equal(written, torch.ones_like(expected)), case  # each element by one rank
        if reference is not None:
            assert torch.equal(found, reference)


def shards_of_all_cases(layout):
    found = []
    for shape, mesh, placements in DTENSOR_CASES:
        full = numbered(*shape)
        tensor = distribute_tensor(full, init_device_mesh("cpu", mesh), placements)
        assert torch.equal(full_tensor(tensor), full)
        is_strided = any(isinstance(placement, _StridedShard) for placement in placements)
        # torch's own of a strided shard is an error before torch 2.13.
        has_reference = not is_strided or torch.__version__ >= "2.13"
        found.append((full, described(tensor), tensor.full_tensor() if has_reference else None))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    for shape, placement in FSDP_CASES:
        full = numbered(*shape)
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(full, mesh["tensor"], [placement]))
        fully_shard(module, mesh=mesh["shard"])
        assert torch.equal(full_tensor(module.weight.detach()), full)
        # torch's full_tensor() of a fused weight under FSDP2 is wrong or an error, depending on its version.
        reference = None if placement is FUSED else module.weight.full_tensor().detach()
        found.append((full, described(module.weight), reference))
    return found


def described(tensor):
    writes = is_writer("name", tensor)
    return [(offset, part.clone(), writes) for offset, part in local_shards(tensor)]


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 12, 13, 24, 25])
@pytest.mark.parametrize("tensor_ranks", [2, 4])
@pytest.mark.parametrize("kind", ["split", "fused", "fused, as torch 2.11 marks it"])
def test_dim_slices_fsdp_splits_what_tensor_parallel_left(size, tensor_ranks, kind):
    """Sizes that do not divide: DTensor's order of splitting differs from that of FSDP2."""
    inner = Shard(0) if kind == "split" else _StridedShard(0, split_factor=3)
    outer = Shard(0) if "2.11" in kind else _StridedShard(0, split_factor=tensor_ranks)
    third = -(-size // 3)
    parts = torch.arange(size).tensor_split([third, 2 * third])
    for first, second in product(range(3), range(tensor_ranks)):
        parts = parts if "fused" in kind else (torch.arange(size),)
        left = torch.cat([chunk(part, tensor_ranks, second) for part in parts])
        placements = (Replicate(), outer, inner)
        found = dim_slices(size, 0, placements, (2, 3, tensor_ranks), (1, first, second))
        indices = [n for begin, _, length in found for n in range(begin, begin + length)]
        assert indices == chunk(left, 3, first).tolist()
        lengths = [length for _, _, length in found]
        assert [start for _, start, _ in found] == [sum(lengths[:i]) for i in range(len(found))]
        assert all(a[0] + a[2] != b[0] for a, b in pairwise(found))  # neighbours are joined


def chunk(tensor, shares, index):
    chunks = tensor.chunk(shares)
    return chunks[index] if index < len(chunks) else tensor[:0]


def test_is_writer_spreads_names_over_the_ranks(on_ranks):
    for plain, replicated in on_ranks({"replicate": 4}, share_of_names):
        assert 10 < plain < 40
        assert 10 < replicated < 40


def share_of_names(layout):
    mesh = init_device_mesh("cpu", (2, 2))
    names = [f"layers.{n}.weight" for n in range(100)]
    replicated = distribute_tensor(torch.ones(2), mesh, (Replicate(), Replicate()))
    tensors = (torch.ones(2), replicated)
    return [sum(is_writer(name, tensor) for name in names) for tensor in tensors]


def test_local_shards_of_a_partial_dtensor_is_refused(on_ranks):
    on_ranks({"replicate": 2}, shards_of_a_partial_tensor)


def shards_of_a_partial_tensor(layout):
    tensor = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(ValueError, match="a Partial DTensor has no value to save or to load"):
        local_shards(tensor)
