"""How a batch is divided among data-parallel ranks: by tokens, and by what encoders read."""

import os

import pytest
import torch

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.distributed import World
from mvp_engine.kit.data.pack.packer import ENCODER_VALUES_PER_TOKEN
from mvp_engine.worker import group


def images(rows, sequences, shared_with):
    """Images whose rows cost as much as a token each."""
    values = torch.zeros(sum(rows), ENCODER_VALUES_PER_TOKEN)
    return Media(
        values, torch.tensor(rows), torch.tensor(sequences), shared_with=torch.tensor(shared_with)
    )


def batch_of(lengths, media=None):
    batch = PackedBatch.from_sequences([torch.arange(3, 3 + length) for length in lengths])
    batch.media = {} if media is None else {"pixel_values": media}
    return batch


def test_by_data_rank_counts_encoder_work_and_shared_media_once():
    lengths = [4, 4, 24, 24, 24, 24]
    assert group.by_data_rank(batch_of(lengths), 2) == [[0, 2, 4], [1, 3, 5]]
    # Sequences 0 and 1 share an image of 30 rows, sequence 3 has one of 20.
    batch = batch_of(lengths, images([30, 20], [0, 3], [0, 0, 2, 3, 4, 5]))
    assert group.encoder_work(batch, [[0, 1], [2], [3], [0], [1, 4]]) == [30, 0, 20, 30, 30]
    # By work, from the largest: 3 (44), 0 with 1 (38), 2, 4, 5 (24 each).
    assert group.by_data_rank(batch, 2) == [[3, 4], [0, 1, 2, 5]]


@pytest.mark.parametrize("chosen", [None, "max_split_size_mb:64"])
def test_world_at_a_gpu_sets_expandable_segments_unless_the_user_has_chosen(monkeypatch, chosen):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    if chosen:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", chosen)
    seen = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda _: seen.append(os.environ["PYTORCH_ALLOC_CONF"])
    )
    World.at(0, 1, None, "cuda:0")
    assert seen == [chosen or "expandable_segments:True"]
