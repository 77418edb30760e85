"""Queries in groups with keys of their own: outputs and gradients of dense attention with a mask."""

import pytest
import torch
import torch.nn.functional as F

from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.actions.pi0 import suffix_groups
from mvp_engine.kit.actions.query_groups import KeyRows, grouped_query_attention

LENGTHS = (5, 1, 9)
CHUNK = 3


def batch():
    return PackedBatch.from_sequences([torch.zeros(n, dtype=torch.long) for n in LENGTHS])


def allowed_mask(draws):
    """(suffix queries, all keys): states see prefix and themselves, a chunk its prefix, its state and itself.

    Keys are prefixes, states, then the chunks of each sequence. The draw of what all draws share is -1.
    """
    rows = torch.arange(len(LENGTHS))
    prefixes = rows.repeat_interleave(torch.tensor(LENGTHS))
    sequence = torch.cat([prefixes, rows, rows.repeat_interleave(draws * CHUNK)])
    of_chunks = torch.arange(draws).repeat_interleave(CHUNK).repeat(len(LENGTHS))
    shared = torch.full((len(prefixes) + len(rows),), -1)
    draw = torch.cat([shared, of_chunks])
    queries = slice(len(prefixes), None)
    is_visible = (draw == -1) | (draw[queries, None] == draw)
    return (sequence[queries, None] == sequence) & is_visible


def inputs(draws, heads=4, kv_heads=1, size=8):
    g = torch.Generator().manual_seed(0)
    suffix = len(LENGTHS) * (1 + draws * CHUNK)
    keys = sum(LENGTHS) + suffix
    shapes = [(heads, suffix, size), (kv_heads, keys, size), (kv_heads, keys, size)]
    return [torch.randn(shape, generator=g) for shape in shapes]


def with_gradients(attend, *tensors):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = attend(*leaves)
    g = torch.Generator().manual_seed(1)
    (out * torch.randn(out.shape, generator=g).to(out)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_suffix_attention_equals_dense_attention_with_a_mask(draws, kv_heads):
    mask = allowed_mask(draws)
    groups = suffix_groups(batch(), 1, draws, CHUNK).groups
    tensors = inputs(draws, kv_heads=kv_heads)

    def dense(q, k, v):
        return F.scaled_dot_product_attention(q[None], k[None], v[None], mask, enable_gqa=True)[0]

    found = with_gradients(lambda q, k, v: grouped_query_attention(q, k, v, groups), *tensors)
    wanted = with_gradients(dense, *tensors)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_suffix_positions_continue_those_of_each_prefix():
    positions = suffix_groups(batch(), 1, 2, CHUNK).position_ids.tolist()
    states, chunks = positions[:3], positions[3:]
    assert states == list(LENGTHS)
    assert chunks[:6] == [6, 7, 8, 6, 7, 8]
    assert chunks[-3:] == [10, 11, 12]


def test_key_rows_list_every_use_of_a_key_once():
    index = torch.tensor([2, 0, 2, 2, 4])
    rows = KeyRows.of(index, 5)
    assert rows.uses.tolist() == [[1, 5, 5], [5, 5, 5], [0, 2, 3], [5, 5, 5], [4, 5, 5]]


@pytest.mark.gpu
@pytest.mark.parametrize("size, kv_heads", [(256, 1), (128, 2), (64, 4), (72, 1)])
def test_suffix_attention_kernels_on_a_gpu_equal_float32(size, kv_heads):
    """bf16: 2 % of the largest value."""
    draws = 2
    groups = suffix_groups(batch(), 1, draws, CHUNK).groups
    on_gpu = suffix_groups(batch().to("cuda"), 1, draws, CHUNK).groups
    tensors = inputs(draws, 8, kv_heads, size)
    wanted = with_gradients(lambda q, k, v: grouped_query_attention(q, k, v, groups), *tensors)
    halves = [tensor.to("cuda", torch.bfloat16) for tensor in tensors]
    found = with_gradients(lambda q, k, v: grouped_query_attention(q, k, v, on_gpu), *halves)
    for one, other in zip(found, wanted, strict=True):
        assert float((one.float().cpu() - other).abs().max()) <= 0.02 * float(other.abs().max())
