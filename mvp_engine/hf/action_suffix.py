"""The suffix of packed prefixes: tokens of states and action chunks, their positions, and the keys each attends to.

Legend: S sequences, N draws of noise, C steps of a chunk, L_s the length of prefix s, T the tokens of all prefixes.

Suffix tokens lie behind all prefixes: first `heads` tokens of each sequence (its state), which all draws share, then
the chunks, (S, N, C). Tables are built on the host from lengths that the host has: no host sync.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.action_model import LENGTH_MULTIPLE
from mvp_engine.hf.media_features import copy_to_device
from mvp_engine.ops.query_groups import KeyRows, QueryGroup


class Suffix(NamedTuple):
    """What a forward needs of all suffix tokens."""

    position_ids: Tensor  # (U,): they continue those of the prefix
    groups: list[QueryGroup]  # the states, then the chunks


def suffix_groups(batch: PackedBatch, heads: int, draws: int, chunk: int) -> Suffix:
    """States attend to their prefix and themselves; a chunk to its prefix, its state and itself."""
    lengths = batch.host_lengths
    count = len(lengths)
    prefix = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    first_chunk = prefix + count * heads
    state_keys = []
    chunk_keys = []
    for s in range(count):
        own = torch.arange(int(starts[s]), int(starts[s + 1]))
        state = prefix + s * heads + torch.arange(heads)
        state_keys += [own, state]
        for n in range(draws):
            start = first_chunk + (s * draws + n) * chunk
            chunk_keys += [own, state, torch.arange(start, start + chunk)]
    sizes_S = torch.tensor(lengths)
    total = first_chunk + count * draws * chunk
    with_state_S = sizes_S + heads
    with_chunk = (with_state_S + chunk).repeat_interleave(draws)
    groups = [
        _group(count, heads, state_keys, with_state_S, total),
        _group(count * draws, chunk, chunk_keys, with_chunk, total),
    ]
    positions = torch.cat(
        [
            (sizes_S[:, None] + torch.arange(heads)).flatten(),
            (with_state_S.repeat_interleave(draws)[:, None] + torch.arange(chunk)).flatten(),
        ]
    )
    device = batch.cu_seqlens.device
    return Suffix(copy_to_device(positions, device), [group.to(device) for group in groups])


def _group(
    sequences: int, queries: int, keys: list[Tensor], key_lengths: Tensor, total: int
) -> QueryGroup:
    """`sequences` of `queries` each."""
    boundaries = torch.arange(sequences + 1, dtype=torch.int32) * queries
    key_boundaries = torch.cat([torch.zeros(1, dtype=torch.long), key_lengths.cumsum(0)]).int()
    longest = -(-int(key_lengths.max()) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE  # a bound for kernels
    return QueryGroup(
        cu_seqlens=boundaries,
        max_seqlen=queries,
        is_even=True,
        keys=KeyRows.of(torch.cat(keys), total),
        cu_seqlens_k=key_boundaries,
        max_seqlen_k=longest,
    )
