"""The data skill's check passes on the data kit and fails on loaders with common errors."""

import dataclasses

import pytest
import torch
from conftest import ROOT

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.imports import import_file

CHECK = import_file(ROOT / "skills" / "mllm-data" / "check.py")


def test_check_of_the_kit_passes():
    assert CHECK.problems(CHECK.with_kit) == []


class Changed:
    """The kit's loader with other batches."""

    def __init__(self, loader, change):
        self.loader, self.change = loader, change
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __iter__(self):
        return map(self.change, self.loader)


def off_by_one(batch):
    """The loss mask starts one token late: the first token of an answer has no loss."""
    has_loss = batch.labels != IGNORE
    first = has_loss & ~torch.cat([torch.tensor([False]), has_loss[:-1]])
    return dataclasses.replace(batch, labels=batch.labels.masked_fill(first, IGNORE))


def shifted_twice(batch):
    return dataclasses.replace(batch, labels=batch.labels.roll(-1))


def padded(batch):
    """Padded to the longest row, as collators do."""
    ones = [batch.select([s]) for s in range(batch.num_sequences)]
    longest = max(one.num_tokens for one in ones)
    rows = [
        torch.cat([one.input_ids, one.input_ids.new_zeros(longest - one.num_tokens)])
        for one in ones
    ]
    masks = [
        torch.cat([torch.ones(one.num_tokens), torch.zeros(longest - one.num_tokens)]) > 0
        for one in ones
    ]
    return PackedBatch.from_sequences(rows, masks, sequence_fields=batch.sequence_fields)


class Repeating(Changed):
    """A loader with a cursor that is one step behind."""

    def __init__(self, loader):
        super().__init__(loader, lambda batch: batch)
        self.state_dict = lambda: {
            **loader.state_dict(),
            "samples": loader.state_dict()["samples"] - 4,
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, words",
    [
        (off_by_one, "has loss, not 'It is "),
        (shifted_twice, "labels are not the next tokens"),
        (padded, "tokens, which are not the processor's own"),
        (None, "after a resume the rows are not the remaining ones: ["),
    ],
)
def test_check_of_a_broken_loader_names_the_problem(change, words):
    def make(settings, processor, rank, world_size, folder):
        loader = CHECK.with_kit(settings, processor, rank, world_size, folder)
        return Repeating(loader) if change is None else Changed(loader, change)

    assert any(words in problem for problem in CHECK.problems(make)), CHECK.problems(make)
