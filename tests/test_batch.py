"""PackedBatch: nothing lost, nothing leaked, never over budget."""

import dataclasses
import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mvp_engine.data.batch import IGNORE, Media, PackedBatch, best_fit


def refused(words, make, *args, **options):
    """The call raises an error with these words."""
    with pytest.raises(ValueError, match=words):
        make(*args, **options)


def make(lengths, seed=0, axes=0):
    """Random sequences with every kind of field; sequence s has s % 3 images of 1 to 4 patches."""
    g = torch.Generator().manual_seed(seed)
    count = torch.arange(len(lengths))
    ids = [torch.randint(100, (n,), generator=g) for n in lengths]
    owner = count.repeat_interleave(count % 3)
    rows = torch.randint(1, 5, (len(owner),), generator=g)
    values = torch.randn(int(rows.sum()), 2, generator=g)
    positions = [torch.randint(9, (axes, n), generator=g) for n in lengths] if axes else None
    return PackedBatch.from_sequences(
        ids,
        [torch.rand(n, generator=g) < 0.6 for n in lengths],
        position_ids=positions,
        token_fields={"advantage": [torch.randn(n, generator=g) for n in lengths]},
        sequence_fields={"id": count, "reward": torch.randn(len(lengths), generator=g)},
        media={"image": Media(values, rows, owner, {"grid": torch.rand(len(owner), 3)})},
    )


some_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(some_lengths, st.integers(0, 99))
@settings(deadline=None)
def test_labels_never_cross_a_sequence_boundary(lengths, seed):
    batch = make(lengths, seed)
    starts = batch.cu_seqlens.tolist()
    for begin, end in pairwise(starts):
        assert batch.labels[end - 1] == IGNORE
        for t in range(begin, end - 1):
            assert batch.labels[t] in (IGNORE, batch.input_ids[t + 1])


@given(some_lengths, st.integers(40, 90), st.integers(0, 3))
@settings(deadline=None)
def test_split_stays_within_the_budget_and_its_order_can_be_restored(lengths, budget, axes):
    batch = make(lengths, axes=axes)
    split = batch.split(budget)
    assert all(part.num_tokens <= budget for part in split.parts)
    assert sum(int(part.num_loss_tokens) for part in split.parts) == int(batch.num_loss_tokens)
    order = [s for members in split.members for s in members]
    restored = PackedBatch.concat(split.parts).select([order.index(s) for s in range(len(lengths))])
    assert restored.equals(batch)
    assert torch.equal(
        split.merge_tokens([part.input_ids for part in split.parts]), batch.input_ids
    )


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200))
@settings(deadline=None)
def test_best_fit_is_close_to_the_optimal_number_of_bins(sizes):
    bins = best_fit(sizes, 1000)
    assert sorted(i for members in bins for i in members) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in members) <= 1000 for members in bins)
    assert len(bins) <= 11 / 9 * -(-sum(sizes) // 1000) * 1.5 + 1


def test_split_counts_media_costs_against_the_budget():
    batch = make([10, 10, 10])
    assert [len(m) for m in batch.split(30, costs=[25, 5, 20]).members] == [2, 1]
    more = "sequence 1 costs 31 tokens, more than the budget of 30"
    refused(more, batch.split, 30, costs=[1, 31, 1])
    both = r"sequences \[0, 2\], which stay together, cost 20 tokens"
    refused(both, batch.split, 19, together=[7, 8, 7])
    refused("3 costs and 2 ids were given for 3 sequences", batch.split, 30, together=[0, 1])


@given(some_lengths, st.integers(1, 5), st.integers(0, 99))
@settings(deadline=None)
def test_split_together_never_cuts_a_group(lengths, groups, seed):
    batch = make(lengths)
    ids = torch.randint(groups, (len(lengths),), generator=torch.Generator().manual_seed(seed))
    totals = torch.zeros(groups, dtype=torch.long).index_add(0, ids, batch.lengths)
    budget = int(totals.max())
    split = batch.split(budget, together=ids)
    assert sorted(s for members in split.members for s in members) == list(range(len(lengths)))
    assert all(part.num_tokens <= budget for part in split.parts)
    for group in range(groups):
        sequences = (ids == group).nonzero()[:, 0].tolist()
        holders = [members for members in split.members if set(members) & set(sequences)]
        assert len(holders) <= 1
        assert all(members == sorted(members) for members in holders)


def test_select_and_concat_keep_media_with_their_sequences():
    batch = make([3, 4, 5, 6, 7])  # images: none, 1, 2, none, 1
    part = batch.select([4, 0, 2])
    images = part.media["image"]
    assert images.sequence_ids.tolist() == [0, 2, 2]
    old = batch.media["image"]
    patches = old.values.split(old.row_counts.tolist())
    assert torch.equal(images.values, torch.cat([patches[3], patches[1], patches[2]]))
    assert torch.equal(images.fields["grid"], old.fields["grid"][[3, 1, 2]])
    assert batch.select([0, 3]).media["image"].values.shape == (0, 2)


def test_concat_and_select_hold_shared_media_once():
    def owners(batch):
        media = batch.media["image"]
        return media.sequence_ids.tolist(), media.shared_with.tolist()

    image, other = make([4]).select([0]), make([3, 4]).select([1])  # none, and one image
    pair = PackedBatch.concat([other, image, other, other])
    assert owners(pair) == ([0], [0, 1, 0, 0])
    assert torch.equal(pair.media["image"].values, other.media["image"].values)
    assert owners(pair.select([3, 1, 2])) == ([0], [0, 1, 0])
    assert pair.select([2]).equals(other)
    assert owners(other.select([0, 0])) == ([0], [0, 0])
    twice = PackedBatch.concat([pair, pair.select([0, 3])])
    assert owners(twice) == ([0, 4], [0, 1, 0, 0, 4, 4])
    assert pickle.loads(pickle.dumps(pair)).equals(pair)
    assert not pair.equals(PackedBatch.concat([other, image, other.select([0]), other]))


def test_split_sequences_with_shared_media_stay_together_up_to_a_quarter_of_the_budget():
    one, two = (make([3, 4, length]).select([2]) for length in (5, 6))  # with two images each
    batch = PackedBatch.concat([one, two] * 6)
    assert batch.media_units(11) == [0, 1, 0, 3, 4, 5, 4, 7, 8, 9, 8, 11]
    split = batch.split(48)
    assert all(part.num_tokens <= 48 for part in split.parts)
    assert len(split.parts) == 2
    ids = batch.media_units(12)
    for members in split.members:
        assert all(ids[s] not in [ids[m] for m in members] for s in range(12) if s not in members)
    assert make([3, 4]).media_units(100) == [0, 1]


def test_media_with_wrong_shared_sequences_raise():
    def shared_with(*sequences):
        return dataclasses.replace(media, shared_with=torch.tensor(sequences))

    media = make([3, 4]).media["image"]
    refused("belong to a sequence that uses those of another one", shared_with, 0, 0)
    ids = [torch.arange(3), torch.arange(4)]
    words = "shared_with has 3 entries for 2 sequences"
    refused(words, PackedBatch.from_sequences, ids, media={"image": shared_with(0, 1, 1)})


@pytest.mark.parametrize("axes", [0, 3])
def test_pickle_and_device_copy_keep_all_fields(axes):
    batch = make([3, 9, 2], axes=axes)
    assert pickle.loads(pickle.dumps(batch)).equals(batch)
    assert batch.to("cpu").equals(batch)
    moved = batch.to("meta")
    assert moved.token_fields["advantage"].is_meta
    assert moved.media["image"].values.is_meta
    assert moved.max_seqlen == 9


def test_batch_fields_of_wrong_size_are_refused_by_name():
    ids, ends = torch.arange(5), torch.tensor([0, 2, 5], dtype=torch.int32)

    def batch(input_ids=ids, labels=ids, cu_seqlens=ends, **fields):
        return PackedBatch(input_ids, labels, ids, cu_seqlens, **fields)

    def image(*lengths):
        return {"image": make([*lengths]).media["image"]}

    refused("labels has 4 entries for 5 tokens", batch, labels=ids[:4])
    refused("old has 3 entries for 5 tokens", batch, token_fields={"old": ids[:3]})
    words = "reward has 3 entries for 2 sequences"
    refused(words, batch, sequence_fields={"reward": ids[:3]})
    refused("sequence 1 is empty", batch, cu_seqlens=torch.tensor([0, 5, 5], dtype=torch.int32))
    refused("int32", batch, cu_seqlens=torch.tensor([0, 5]))
    for wrong in (ids.float(), ids[:, None], ids > 2):
        refused(r"input_ids must be \(T,\) of integers", batch, input_ids=wrong)
    words = "image belong to sequences 1 to 2; there are 2"
    refused(words, batch, media=image(2, 2, 2))
    words = "add up to 3, but values has 4 rows"
    refused(words, Media, torch.zeros(4, 2), torch.tensor([1, 2]), torch.tensor([0, 0]))
    refused("different token_fields", PackedBatch.concat, [make([2]), batch()])
    bare = make([2, 2])
    bare.media["image"] = dataclasses.replace(bare.media["image"], fields={})
    words = "cannot concatenate image with different fields"
    refused(words, PackedBatch.concat, [bare, make([2, 2])])


def test_from_sequences_with_fields_of_other_lengths_is_refused():
    """Even where the total is right."""

    def batch(*masks, **fields):
        return PackedBatch.from_sequences([torch.arange(5), torch.arange(3)], *masks, **fields)

    swapped = [torch.ones(3), torch.ones(5)]
    words = "of sequence 0 has 3 entries for 5 tokens"
    refused(f"old {words}", batch, token_fields={"old": swapped})
    positions = [part.expand(3, -1) for part in swapped]
    refused(f"position_ids {words}", batch, position_ids=positions)
    for length in (1, 2, 6):
        words = f"loss_masks of sequence 0 has {length} entries for 5 tokens"
        refused(words, batch, [torch.ones(length), torch.ones(3)])
    words = "old has 1 entries for 2 sequences"
    refused(words, batch, token_fields={"old": [torch.ones(8)]})


def test_equals_compares_all_fields_bit_by_bit():
    one, two = make([4, 2]), make([4, 2])
    for batch in (one, two):
        batch.token_fields["advantage"][1] = float("nan")
    two.media["image"].fields["grid"] = one.media["image"].fields["grid"]
    assert one.equals(two)
    two.token_fields["advantage"] = one.token_fields["advantage"].view(torch.int32)
    assert not one.equals(two)
