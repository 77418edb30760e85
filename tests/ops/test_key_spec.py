"""Attention of some chunks of the queries: the outputs and gradients of the whole sequences at these tokens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_flex_attention import MASKS, spec_of
from torch import Tensor

from mvp_engine.distributed.context import Keys, keys_of, offsets_of
from mvp_engine.distributed.zigzag import Chunk, zigzag
from mvp_engine.hf.context_attention import context_spec
from mvp_engine.ops import attention as attention_ops
from mvp_engine.ops import cudnn_attention
from mvp_engine.ops.attention import AttnSpec, varlen_attention
from mvp_engine.ops.flex_block_mask import block_mask_of
from mvp_engine.ops.reference_attention import reference_attention

LENGTHS = [5, 1, 300, 128, 150, 37]
RANKS = 4


def shard_of(rank: int, lengths: list[int], device: str = "cpu") -> Any:
    """What attention reads of a ContextShard whose keys are gathered in the order of the batch."""
    chunks = zigzag(lengths, RANKS)[rank]
    at = torch.device(device)
    places = torch.arange(sum(lengths))
    queries = torch.cat([torch.arange(chunk.begin, chunk.end) for chunk in chunks]).to(at)

    def keys(whole: bool) -> Keys:
        return keys_of([(chunk.first, chunk.last if whole else chunk.end) for chunk in chunks], places, at)

    counts = [chunk.tokens for chunk in chunks]
    shard = SimpleNamespace(keys=keys(False), all_keys=keys(True), queries=queries, chunks=chunks)
    shard.cu_queries, shard.max_queries = offsets_of(counts, at), max(counts)
    return shard


def part_of(spec: AttnSpec, rank: int, lengths: list[int], device: str = "cpu") -> tuple[AttnSpec, Tensor, Keys]:
    shard = shard_of(rank, lengths, device)
    part, keys = context_spec(spec, shard)
    return part, shard.queries, keys


@pytest.mark.parametrize("extra", [{}, {"softcap": 3.0}, {"sinks": torch.tensor([0.3, -0.2, 1.0, 0.5])}], ids=str)
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_reference_on_chunks_of_queries_equals_the_whole_sequences(
    options: dict[str, Any], extra: dict[str, Any]
) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, sum(LENGTHS), 8, generator=g, requires_grad=True) for heads in (4, 2, 2))
    weight = torch.randn(4, sum(LENGTHS), 8, generator=g)
    spec = replace(spec_of(options, LENGTHS), **extra)
    whole = reference_attention(q, k, v, spec)
    expected = torch.autograd.grad(whole, (q, k, v), weight)
    found = [torch.zeros_like(one) for one in expected]
    for rank in range(RANKS):
        part, queries, keys = part_of(spec, rank, LENGTHS)
        out = reference_attention(q[:, queries], k[:, keys.rows], v[:, keys.rows], part)
        assert torch.allclose(out, whole[:, queries], rtol=1e-5, atol=1e-6)
        grads = torch.autograd.grad(out, (q, k, v), weight[:, queries])
        found = [one + grad for one, grad in zip(found, grads, strict=True)]
    for one, grad in zip(found, expected, strict=True):
        assert torch.allclose(one, grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_block_mask_on_chunks_of_queries_contains_the_pairs_of_the_reference(options: dict[str, Any]) -> None:
    spec = spec_of(options, LENGTHS)
    for rank in range(RANKS):
        part, queries, keys = part_of(spec, rank, LENGTHS)
        tokens, num_keys = len(queries), len(keys.rows)
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
@pytest.mark.parametrize("kernel", ["cudnn", "varlen", "flex"])
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": 130}], ids=str)
def test_gpu_kernels_on_chunks_of_queries_equal_the_reference(
    monkeypatch, kernel: str, options: dict[str, Any]
) -> None:
    if kernel == "cudnn" and not cudnn_attention.INSTALLED:
        pytest.skip("nvidia-cudnn-frontend is not installed")
    if kernel != "cudnn":
        monkeypatch.setattr(cudnn_attention, "INSTALLED", False)
    if kernel == "flex":
        monkeypatch.setattr(attention_ops, "_torch_varlen_is_supported", lambda *_: False)
    lengths = [700, 1, 5, 2000, 64, 300]
    spec = spec_of(options, lengths, "cuda")
    g = torch.Generator().manual_seed(0)
    qkv = [torch.randn(heads, sum(lengths), 128, generator=g).cuda().bfloat16() for heads in (8, 2, 2)]
    for rank in range(RANKS):
        part, queries, keys = part_of(spec, rank, lengths, "cuda")
        given = [qkv[0][:, queries], qkv[1][:, keys.rows], qkv[2][:, keys.rows]]
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


def test_chunk_that_is_a_whole_sequence_needs_no_other_keys() -> None:
    chunks = [Chunk(0, 3, 0, 3), Chunk(8, 10, 5, 12)]
    keys = keys_of([(chunk.first, chunk.end) for chunk in chunks], torch.arange(12), torch.device("cpu"))
    assert keys.rows.tolist() == [0, 1, 2, 5, 6, 7, 8, 9]
    assert keys.cu_seqlens.tolist() == [0, 3, 8]
    assert keys.max_seqlen == 5
