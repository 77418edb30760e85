"""SampleLoader: one global order, whatever the ranks, the batch sizes or the place where it starts again."""

import random
import threading
import traceback
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from conftest import user_error
from torch.utils.data import Dataset

from mvp_engine.data import SampleLoader, accumulation_steps
from mvp_engine.data import loader as data_loader


class Numbers(Dataset[Any]):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index, random.random() + np.random.rand() + float(torch.rand(()))


def loader(size=50, rank=0, world=1, micro=2, total=8, **more):
    return SampleLoader(
        Numbers(size),
        micro_batch_size=micro,
        global_batch_size=total,
        rank=rank,
        world_size=world,
        **more,
    )


def order(loaders):
    """The samples of each global step, put together from all ranks."""
    steps = []
    for part in loaders:
        for i, batch in enumerate(part):
            step = i // part.accumulation
            steps += [set()] * (step + 1 - len(steps))
            steps[step] = steps[step] | set(batch[0].tolist())
    return steps


@pytest.mark.parametrize("micro", [2, 5, 16])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 17])
@pytest.mark.parametrize("size", [1, 7, 48, 50])
def test_sample_loader_on_any_number_of_ranks_gives_equal_steps(world, size, micro):
    alone = order([loader(size, total=16, micro=4)])
    parts = [loader(size, rank, world, micro=micro, total=16) for rank in range(world)]
    assert order(parts) == alone
    assert sum(len(step) for step in alone) == size
    for part in parts:
        assert max((len(batch[0]) for batch in part), default=0) <= micro


def test_sample_loader_epochs_differ_and_repeat_with_the_seed():
    first, second = loader(), loader()
    second.set_epoch(1)
    assert order([first]) != order([second])
    assert order([first]) == order([loader()])
    assert order([loader(seed=1)]) != order([first])


@pytest.mark.parametrize("worlds", [(1, 1), (2, 1), (1, 2), (4, 2), (3, 2), (2, 3), (9, 3)])
def test_sample_loader_cursor_is_valid_on_another_number_of_ranks(worlds):
    straight = order([loader()])
    before, after = worlds
    parts = [loader(rank=r, world=before) for r in range(before)]
    done = [set(), set()]
    for part in parts:
        iterator = iter(part)
        for step in range(2):
            for _ in range(part.accumulation):
                done[step] |= set(next(iterator)[0].tolist())
    resumed = [loader(rank=r, world=after) for r in range(after)]
    for part in resumed:
        part.load_state_dict(parts[0].state_dict())
    assert done + order(resumed) == straight


def test_sample_randomness_depends_only_on_seed_epoch_and_index():
    def values(part):
        return {int(i): float(v) for batch in part for i, v in zip(*batch, strict=True)}

    alone = values(loader())
    assert values(loader(num_workers=2)) == alone
    assert values(loader(rank=0, world=2)) | values(loader(rank=1, world=2)) == alone
    other = loader()
    other.set_epoch(1)
    assert values(other) != alone


def test_sample_loading_does_not_change_the_training_generators():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    list(loader())
    list(loader(num_workers=1))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()


def test_sample_ids_are_those_of_the_loaded_samples():
    part = loader(rank=1, world=2)
    iterator = iter(part)
    for _ in range(3):
        next(iterator)
    assert part.sample_ids(3, 4) == next(iterator)[0].tolist()
    part.load_state_dict(part.state_dict())
    assert part.sample_ids(0, 1) == next(iter(part))[0].tolist()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sample_loader_limited_to_micro_batches_reads_the_same_samples_on_any_ranks(
    world,
):
    for batches, expected in ((3, range(6)), (100, range(11))):
        found = []
        for rank in range(world):
            part = SampleLoader(
                Numbers(11), micro_batch_size=2, rank=rank, world_size=world, shuffle=False
            )
            part.limit_batches(batches)
            for again in range(2):  # `set_epoch` keeps the limit
                part.set_epoch(again)
                read = [index for indices, _ in part for index in indices.tolist()]
            found += read
        assert sorted(found) == list(expected)


class Growing(Numbers):
    def set_epoch(self, epoch):
        self.size = 7 + 5 * epoch


def test_sample_loader_steps_of_another_epoch_are_counted_without_leaving_this_one():
    part = SampleLoader(Growing(7), micro_batch_size=2, global_batch_size=8)
    assert [part.steps_in_epoch(epoch) for epoch in range(4)] == [1, 2, 3, 3]
    assert (part.epoch, len(part.dataset), part.steps_per_epoch) == (0, 7, 1)


class Broken(Numbers):
    def __getitem__(self, index):
        raise StopIteration if index % 2 else ValueError("rotten")


@pytest.mark.parametrize("workers", [0, 1])
def test_sample_that_raises_is_named(workers):
    with pytest.raises((ValueError, RuntimeError), match=r"rotten|StopIteration") as caught:
        list(SampleLoader(Broken(8), micro_batch_size=1, num_workers=workers))
    notes = "".join(getattr(caught.value, "__notes__", [])) + str(caught.value)
    assert "sample" in notes
    # Or it is for the garbage collector, which waits five seconds for a worker.
    traceback.clear_frames(caught.tb)


# With workers the micro-batches of a step.
@pytest.mark.parametrize("workers, ahead", [(0, 2), (1, 4)])
def test_pinning_thread_prefetches_a_few_micro_batches(monkeypatch, workers, ahead):
    begun, threads = [], set()

    def pin(item):  # what torch does needs a GPU
        threads.add(threading.current_thread())
        begun.append(item)
        return item

    monkeypatch.setattr(data_loader, "pin", pin)
    plain, part = (
        [batch[0].tolist() for batch in loader()],
        loader(pin_memory=True, num_workers=workers),
    )
    assert part.accumulation == 4
    items = part._items
    read = []
    monkeypatch.setattr(part, "_items", lambda: (read.append(item) or item for item in items()))
    for count, batch in enumerate(part):
        assert len(read) == min(len(plain), count + (ahead if count >= ahead else 2) + 1)
        assert batch[0].tolist() == plain[count]
        assert len(begun) <= count + ahead + 1
        assert part.state_dict()["samples"] == min(50, 8 * (count // 4 + 1))  # ahead is not used
    assert len(begun) == len(plain) == count + 1
    assert threading.main_thread() not in threads
    assert not any(thread.is_alive() for thread in threads)


def test_pinning_thread_delivers_micro_batches_before_a_failing_sample(monkeypatch):
    def items():
        yield from range(4)
        raise ValueError("rotten")

    monkeypatch.setattr(data_loader, "pin", lambda item: item)
    seen = []
    with pytest.raises(ValueError, match="rotten"):
        seen.extend(data_loader.pinned(items()))
    assert seen == [0, 1, 2, 3]


def test_pinning_thread_that_fails_raises_in_the_training(monkeypatch):
    def pin(item):
        if item == 2:
            raise RuntimeError("no memory to pin")
        return item

    monkeypatch.setattr(data_loader, "pin", pin)
    seen = []
    with pytest.raises(RuntimeError, match="no memory to pin"):
        seen.extend(data_loader.pinned(iter(range(9)), 4))
    assert seen == [0, 1]


class Large(Numbers):
    def __getitem__(self, index):
        """How many of the large ones before are still there, in this process."""
        self.before = [one for one in getattr(self, "before", []) if one() is not None]
        made = torch.full((1 << 10,), float(len(self.before)))
        self.before.append(weakref.ref(made.untyped_storage()))
        return made


@pytest.mark.parametrize("workers, there", [(1, [0, 1, 2, 3, 3, 3]), (0, [0, 1, 1, 1, 1, 1])])
def test_worker_keeps_its_last_micro_batches_in_shared_memory(workers, there):
    part = SampleLoader(
        Large(6),
        micro_batch_size=1,
        shuffle=False,
        num_workers=workers,
        collate_fn=lambda few: few[0],
    )
    assert [int(one[0]) for one in part] == there


def test_accumulation_steps_of_uneven_parts_are_each_ranks_own():
    assert accumulation_steps(64, 8, 4) == 2
    assert [accumulation_steps(128, 128, 3, rank) for rank in range(3)] == [1, 1, 1]
    assert [accumulation_steps(3, 1, 2, rank) for rank in range(2)] == [2, 1]
    assert [accumulation_steps(1, 1, 2, rank) for rank in range(2)] == [1, 0]


def test_sample_loader_on_an_iterator_is_refused():
    with user_error("needs a map-style dataset"):
        SampleLoader(iter([1]), micro_batch_size=1)
