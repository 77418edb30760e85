"""Zigzag: every token on one context rank, at most two chunks of a sequence, tokens and attended pairs balanced."""

import random

import pytest

from mvp_engine.distributed.sequence_parallel import Chunk, zigzag

R = random.Random(0)
MIXES = {
    "one long sequence": [[R.randint(8_000, 300_000)] for _ in range(20)],
    "short sequences": [[R.randint(1, 500) for _ in range(200)] for _ in range(20)],
    "long and short ones": [
        [R.randint(1, 500) for _ in range(100)] + [R.randint(4_000, 60_000)] for _ in range(20)
    ],
    "log-normal lengths": [
        [max(1, int(R.lognormvariate(5.5, 1.5))) for _ in range(200)] for _ in range(20)
    ],
    "two thirds of a pack, and single tokens": [[16_000] + [1] * 8_000],
    "one of 60 among single tokens": [[1] * 4_000 + [60]],
    "a few of thousands": [[R.randint(2_000, 5_000) for _ in range(4)] for _ in range(20)],
}


def assert_partition(lengths, of_ranks):
    chunks = sorted(chunk for chunks in of_ranks for chunk in chunks)
    at = 0
    for chunk in chunks:
        assert chunk.begin == at < chunk.end
        assert chunk.first <= chunk.begin
        assert chunk.end <= chunk.last
        at = chunk.end
    assert at == sum(lengths)
    for chunks in of_ranks:
        firsts = [chunk.first for chunk in chunks]
        assert all(firsts.count(first) <= 2 for first in firsts)


def largest_over_mean(values):
    return max(values) * len(values) / sum(values)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("mix", MIXES)
def test_zigzag_balances_tokens_and_pairs_of_every_mix(mix, ranks):
    for lengths in MIXES[mix]:
        of_ranks = zigzag(lengths, ranks)
        assert_partition(lengths, of_ranks)
        assert (
            largest_over_mean([sum(chunk.pairs for chunk in chunks) for chunks in of_ranks]) <= 1.03
        )
        assert (
            largest_over_mean([sum(chunk.tokens for chunk in chunks) for chunks in of_ranks])
            <= 1.03
        )


def test_zigzag_sequences_that_fill_ranks_evenly_stay_whole():
    for lengths in ([32_768] * 8, [2_048] * 64, [4_096] * 8 + [1_024] * 32):
        chunks = [chunk for chunks in zigzag(lengths, 8) for chunk in chunks]
        assert len(chunks) == len(lengths)
    mixed = zigzag([131_072] + [2_048] * 64, 8)
    # Of the long one two chunks, or two neighbours.
    assert sorted({len(chunks) for chunks in mixed}) == [
        9,
        10,
    ]


def test_zigzag_pairs_are_those_of_the_causal_mask():
    lengths = [37, 5]
    of_ranks = zigzag(lengths, 4)
    assert sum(chunk.pairs for chunks in of_ranks for chunk in chunks) == 37 * 38 // 2 + 5 * 6 // 2
    chunk = Chunk(begin=12, end=15, first=10, last=20)
    assert chunk.pairs == 3 + 4 + 5


@pytest.mark.parametrize("smallest", [1, 2])
def test_zigzag_pack_of_few_tokens_gives_every_rank_some(smallest):
    g = random.Random(1)
    for _ in range(500):
        ranks = g.choice([2, 3, 4, 8])
        lengths = [1] * g.randint(0, 5) + [g.randint(1, 9) for _ in range(g.randint(1, 8))]
        lengths += [1] * max(0, ranks * smallest - sum(lengths))
        of_ranks = zigzag(lengths, ranks, smallest)
        assert_partition(lengths, of_ranks)
        assert min(sum(chunk.tokens for chunk in chunks) for chunks in of_ranks) >= smallest
