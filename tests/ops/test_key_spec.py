"""Attention of some chunks of the queries: the outputs and gradients of the whole sequences at these tokens."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_flex_attention import MASKS, blocks_of, spec_of
from test_fused_attention import MODULES, assert_near, use_only

from mvp_engine.distributed.sequence_parallel import (
    Chunk,
    KeyExchange,
    causal_keys,
    offsets_of,
    ranges_of,
    whole_sequence,
    zigzag,
)
from mvp_engine.hf.model.attention import context_spec
from mvp_engine.ops import attention as attention_ops
from mvp_engine.ops.attention import AttnSpec, reference_attention, varlen_attention
from mvp_engine.ops.flex_attention import block_mask_of

LENGTHS = [5, 1, 300, 128, 150, 37]
RANKS = 4
CPU = torch.device("cpu")


def shard_of(rank, lengths, device="cpu"):
    """What attention reads of a ContextShard."""
    of_ranks = zigzag(lengths, RANKS)
    chunks = of_ranks[rank]
    at = torch.device(device)
    queries = ranges_of([(chunk.begin, chunk.end) for chunk in chunks]).to(at)

    def keys(window):
        return KeyExchange.of(of_ranks, rank, causal_keys(window), at)

    counts = [chunk.tokens for chunk in chunks]
    shard = SimpleNamespace(keys=keys, queries=queries, chunks=chunks)
    shard.all_keys = KeyExchange.of(of_ranks, rank, whole_sequence, at)
    shard.cu_queries, shard.max_queries = offsets_of(counts, at), max(counts)
    return shard


def part_of(spec, rank, lengths, device="cpu"):
    shard = shard_of(rank, lengths, device)
    part, exchange = context_spec(spec, shard)
    return part, shard.queries, exchange.keys


@pytest.mark.parametrize(
    "extra", [{}, {"softcap": 3.0}, {"sinks": torch.tensor([0.3, -0.2, 1.0, 0.5])}], ids=str
)
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_reference_on_chunks_of_queries_equals_the_whole_sequences(options, extra):
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(heads, sum(LENGTHS), 8, generator=g, requires_grad=True) for heads in (4, 2, 2)
    )
    weight = torch.randn(4, sum(LENGTHS), 8, generator=g)
    spec = replace(spec_of(options, LENGTHS), **extra)
    whole = reference_attention(q, k, v, spec)
    expected = torch.autograd.grad(whole, (q, k, v), weight)
    found = [torch.zeros_like(one) for one in expected]
    for rank in range(RANKS):
        part, queries, keys = part_of(spec, rank, LENGTHS)
        out = reference_attention(q[:, queries], k[:, keys.tokens], v[:, keys.tokens], part)
        assert torch.allclose(out, whole[:, queries], rtol=1e-5, atol=1e-6)
        grads = torch.autograd.grad(out, (q, k, v), weight[:, queries])
        found = [one + grad for one, grad in zip(found, grads, strict=True)]
    for one, grad in zip(found, expected, strict=True):
        assert torch.allclose(one, grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_block_mask_on_chunks_of_queries_contains_the_pairs_of_the_reference(options):
    spec = spec_of(options, LENGTHS)
    for rank in range(RANKS):
        part, queries, keys = part_of(spec, rank, LENGTHS)
        tokens, num_keys = len(queries), len(keys.tokens)
        blocks_of(block_mask_of(part, tokens, num_keys), part, tokens, num_keys)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "cudnn", "varlen", "flex"])
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": 130}], ids=str)
def test_gpu_kernels_on_chunks_of_queries_equal_the_reference(monkeypatch, kernel, options):
    use_only(monkeypatch, kernel if kernel in MODULES else None)
    if kernel == "flex":
        monkeypatch.setattr(attention_ops, "_torch_varlen_is_supported", lambda *_: False)
    lengths = [700, 1, 5, 2000, 64, 300]
    spec = spec_of(options, lengths, "cuda")
    g = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    qkv = [torch.randn(heads, tokens, 128, generator=g).cuda().bfloat16() for heads in (8, 2, 2)]
    for rank in range(RANKS):
        part, queries, keys = part_of(spec, rank, lengths, "cuda")
        given = [qkv[0][:, queries], qkv[1][:, keys.tokens], qkv[2][:, keys.tokens]]
        weight = torch.randn(given[0].shape, generator=g).cuda().bfloat16()
        results = []
        for attend, dtype in (
            (varlen_attention, torch.bfloat16),
            (reference_attention, torch.float32),
        ):
            tensors = [x.detach().to(dtype, copy=True).requires_grad_() for x in given]
            out = attend(*tensors, part)
            results.append([out.detach(), *torch.autograd.grad(out, tensors, weight.to(dtype))])
        assert_near(*results)


def test_key_exchange_sends_each_rank_the_rows_that_it_needs():
    """Rows of a plan of each rank, sent by hand, arrive as the keys of the plan; only needed rows travel."""
    lengths = [40, 3, 70, 9]
    of_ranks = zigzag(lengths, RANKS)
    for keys_of_chunk in (causal_keys(None), causal_keys(4), whole_sequence):
        plans = [KeyExchange.of(of_ranks, rank, keys_of_chunk, CPU) for rank in range(RANKS)]
        own = [ranges_of([(chunk.begin, chunk.end) for chunk in chunks]) for chunks in of_ranks]
        sent = [
            rows[plan.sent_rows].split(plan.sent) for rows, plan in zip(own, plans, strict=True)
        ]
        for to, plan in enumerate(plans):
            parts = [of_source[to] for of_source in sent]
            assert tuple(map(len, parts)) == plan.received
            arrived = torch.cat(parts)
            assert torch.equal(arrived[plan.keys.rows], plan.keys.tokens)
            assert sorted(arrived.tolist()) == sorted(set(plan.keys.tokens.tolist()))


def test_key_exchange_of_whole_sequences_sends_nothing_to_other_ranks():
    of_ranks = zigzag([64] * RANKS, RANKS)
    for rank in range(RANKS):
        plan = KeyExchange.of(of_ranks, rank, causal_keys(None), CPU)
        only_itself = tuple(64 * (other == rank) for other in range(RANKS))
        assert plan.sent == plan.received == only_itself


def test_key_exchange_of_a_window_receives_the_window_before_each_chunk():
    chunks = [[Chunk(0, 10, 0, 40), Chunk(30, 40, 0, 40)], [Chunk(10, 30, 0, 40)]]
    plans = [KeyExchange.of(chunks, rank, causal_keys(4), CPU) for rank in range(2)]
    assert [plan.received for plan in plans] == [(20, 3), (3, 20)]
    assert plans[0].keys.tokens.tolist() == [*range(10), *range(27, 40)]
    assert plans[0].keys.cu_seqlens.tolist() == [0, 10, 23]


def test_context_spec_of_whole_sequences_is_that_of_an_ordinary_pack():
    lengths = [32] * RANKS
    spec = AttnSpec(offsets_of(lengths, CPU), 32)
    for rank in range(RANKS):
        part, exchange = context_spec(spec, shard_of(rank, lengths))
        assert part.keys is None
        assert exchange.is_local
        assert part.cu_seqlens.tolist() == [0, 32]
    part, exchange = context_spec(spec, shard_of(0, LENGTHS))
    assert part.keys is not None
    assert not exchange.is_local


@pytest.mark.parametrize("rank", range(RANKS))
def test_select_gives_a_row_the_sum_of_the_gradients_of_its_copies(rank):
    keys = shard_of(rank, LENGTHS).keys(None).keys
    received = torch.randn(int(keys.rows.max()) + 1, 3, requires_grad=True)
    weight = torch.randn(len(keys.rows), 3)
    expected = torch.autograd.grad(received.index_select(0, keys.rows), received, weight)[0]
    found = torch.autograd.grad(keys.select(received), received, weight)[0]
    assert keys.copies == 2
    assert torch.allclose(found, expected)
