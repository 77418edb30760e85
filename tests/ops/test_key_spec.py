"""Attention of some chunks of the queries: the outputs and gradients of the whole sequences at these tokens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_flex_attention import MASKS, spec_of
from torch import Tensor

from mvp_engine.distributed.key_exchange import (
    KeyExchange,
    Keys,
    causal_keys,
    offsets_of,
    ranges_of,
    whole_sequence,
)
from mvp_engine.distributed.zigzag import Chunk, zigzag
from mvp_engine.hf.model.attention import context_spec
from mvp_engine.ops import attention as attention_ops
from mvp_engine.ops import cudnn_attention, flash_attention
from mvp_engine.ops.attention import AttnSpec, varlen_attention
from mvp_engine.ops.flex_attention import block_mask_of
from mvp_engine.ops.reference_attention import reference_attention

LENGTHS = [5, 1, 300, 128, 150, 37]
RANKS = 4


def shard_of(rank: int, lengths: list[int], device: str = "cpu") -> Any:
    """What attention reads of a ContextShard."""
    of_ranks = zigzag(lengths, RANKS)
    chunks = of_ranks[rank]
    at = torch.device(device)
    queries = ranges_of([(chunk.begin, chunk.end) for chunk in chunks]).to(at)

    def keys(window: int | None) -> KeyExchange:
        return KeyExchange.of(of_ranks, rank, causal_keys(window), at)

    counts = [chunk.tokens for chunk in chunks]
    shard = SimpleNamespace(keys=keys, queries=queries, chunks=chunks)
    shard.all_keys = KeyExchange.of(of_ranks, rank, whole_sequence, at)
    shard.cu_queries, shard.max_queries = offsets_of(counts, at), max(counts)
    return shard


def part_of(
    spec: AttnSpec, rank: int, lengths: list[int], device: str = "cpu"
) -> tuple[AttnSpec, Tensor, Keys]:
    shard = shard_of(rank, lengths, device)
    part, exchange = context_spec(spec, shard)
    return part, shard.queries, exchange.keys


@pytest.mark.parametrize(
    "extra", [{}, {"softcap": 3.0}, {"sinks": torch.tensor([0.3, -0.2, 1.0, 0.5])}], ids=str
)
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_reference_on_chunks_of_queries_equals_the_whole_sequences(
    options: dict[str, Any], extra: dict[str, Any]
) -> None:
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
def test_block_mask_on_chunks_of_queries_contains_the_pairs_of_the_reference(
    options: dict[str, Any],
) -> None:
    spec = spec_of(options, LENGTHS)
    for rank in range(RANKS):
        part, queries, keys = part_of(spec, rank, LENGTHS)
        tokens, num_keys = len(queries), len(keys.tokens)
        values = torch.eye(num_keys)[None]
        zeros = torch.zeros(1, num_keys, 16)
        plain = reference_attention(zeros[:, :tokens], zeros, values, part)
        mask = block_mask_of(part, tokens, num_keys)
        padded = mask.seq_lengths
        visible = torch.zeros(padded, dtype=torch.bool)
        visible[:tokens, :num_keys] = plain[0] > 0
        index = [torch.arange(size) for size in padded]
        assert torch.equal(mask.mask_mod(0, 0, index[0][:, None], index[1][None, :]), visible)  # type: ignore[arg-type]
        blocks = visible.view(padded[0] // 128, 128, padded[1] // 128, 128)
        assert torch.equal(mask.to_dense()[0, 0] > 0, blocks.any(3).any(1))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "cudnn", "varlen", "flex"])
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": 130}], ids=str)
def test_gpu_kernels_on_chunks_of_queries_equal_the_reference(
    monkeypatch, kernel: str, options: dict[str, Any]
) -> None:
    for name, module in {"flash": flash_attention, "cudnn": cudnn_attention}.items():
        if name != kernel:
            monkeypatch.setattr(module, "INSTALLED", False)
        elif not module.INSTALLED:
            pytest.skip(f"the package of {kernel} is not installed")
    if kernel == "flex":
        monkeypatch.setattr(attention_ops, "_torch_varlen_is_supported", lambda *_: False)
    lengths = [700, 1, 5, 2000, 64, 300]
    spec = spec_of(options, lengths, "cuda")
    g = torch.Generator().manual_seed(0)
    qkv = [
        torch.randn(heads, sum(lengths), 128, generator=g).cuda().bfloat16() for heads in (8, 2, 2)
    ]
    for rank in range(RANKS):
        part, queries, keys = part_of(spec, rank, lengths, "cuda")
        given = [qkv[0][:, queries], qkv[1][:, keys.tokens], qkv[2][:, keys.tokens]]
        weight = torch.randn(given[0].shape, generator=g).cuda().bfloat16()
        results = []
        for attend in (varlen_attention, reference_attention):
            tensors = [one.clone().requires_grad_() for one in given]
            if attend is reference_attention:
                tensors = [one.detach().float().requires_grad_() for one in given]
            out = attend(*tensors, part)
            results.append([out.detach(), *torch.autograd.grad(out, tensors, weight.to(out.dtype))])
        for mine, theirs in zip(*results, strict=True):
            assert float((mine.float() - theirs).norm() / theirs.norm()) < 1e-2


def test_key_exchange_sends_each_rank_the_rows_that_it_needs() -> None:
    """Rows of a plan of each rank, sent by hand, arrive as the keys of the plan; only needed rows travel."""
    lengths = [40, 3, 70, 9]
    of_ranks = zigzag(lengths, RANKS)
    for keys_of_chunk in (causal_keys(None), causal_keys(4), whole_sequence):
        plans = [
            KeyExchange.of(of_ranks, rank, keys_of_chunk, torch.device("cpu"))
            for rank in range(RANKS)
        ]
        own = [ranges_of([(chunk.begin, chunk.end) for chunk in chunks]) for chunks in of_ranks]
        for to, plan in enumerate(plans):
            parts = [
                own[source][one.sent_rows].split(one.sent)[to] for source, one in enumerate(plans)
            ]
            assert tuple(map(len, parts)) == plan.received
            arrived = torch.cat(parts)
            assert torch.equal(arrived[plan.keys.rows], plan.keys.tokens)
            assert set(arrived.tolist()) == set(plan.keys.tokens.tolist())
            assert len(arrived) == len(set(arrived.tolist()))


def test_key_exchange_ofwhole_sequences_sends_nothing_to_other_ranks() -> None:
    of_ranks = zigzag([64] * RANKS, RANKS)
    for rank in range(RANKS):
        plan = KeyExchange.of(of_ranks, rank, causal_keys(None), torch.device("cpu"))
        assert (
            plan.sent
            == plan.received
            == tuple(64 if other == rank else 0 for other in range(RANKS))
        )


def test_key_exchange_of_a_window_receives_the_window_before_each_chunk() -> None:
    chunks = [[Chunk(0, 10, 0, 40), Chunk(30, 40, 0, 40)], [Chunk(10, 30, 0, 40)]]
    plans = [KeyExchange.of(chunks, rank, causal_keys(4), torch.device("cpu")) for rank in range(2)]
    assert [plan.received for plan in plans] == [(20, 3), (3, 20)]
    assert plans[0].keys.tokens.tolist() == [*range(10), *range(27, 40)]
    assert plans[0].keys.cu_seqlens.tolist() == [0, 10, 23]


def test_context_spec_of_whole_sequences_is_that_of_an_ordinary_pack() -> None:
    lengths = [32] * RANKS
    spec = AttnSpec(offsets_of(lengths, torch.device("cpu")), 32)
    for rank in range(RANKS):
        part, exchange = context_spec(spec, shard_of(rank, lengths))
        assert part.keys is None
        assert exchange.is_local
        assert part.cu_seqlens.tolist() == [0, 32]
    part, exchange = context_spec(spec, shard_of(0, LENGTHS))
    assert part.keys is not None
    assert not exchange.is_local


@pytest.mark.parametrize("rank", range(RANKS))
def test_select_gives_a_row_the_sum_of_the_gradients_of_its_copies(rank: int) -> None:
    keys = shard_of(rank, LENGTHS).keys(None).keys
    received = torch.randn(int(keys.rows.max()) + 1, 3, requires_grad=True)
    weight = torch.randn(len(keys.rows), 3)
    expected = torch.autograd.grad(received.index_select(0, keys.rows), received, weight)[0]
    found = torch.autograd.grad(keys.select(received), received, weight)[0]
    assert keys.copies == 2
    assert torch.allclose(found, expected)
