"""Feed: plans of loaders are used where they are true, and wrappers of loaders keep their cursor."""

import torch
from conftest import user_error
from torch.utils.data import TensorDataset

from mvp_engine.config.schema import Train
from mvp_engine.data import SampleLoader
from mvp_engine.distributed import Layout, World
from mvp_engine.engine.feed import Feed, micro_batches_per_step

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def loader(kind=SampleLoader, size=37, **options):
    return kind(
        TensorDataset(torch.arange(size)),
        **{"micro_batch_size": 2, "global_batch_size": 4, **options},
    )


class Wrapper:
    """Passes everything on to another loader."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Filtering(SampleLoader):
    def __iter__(self):
        return (batch for batch in super().__iter__() if len(batch[0]) > 1)


def test_plan_of_a_sample_loader_has_the_micro_batches_of_the_step():
    feed = Feed(loader(), 2, ALONE)
    sizes = []
    while micro_batches := feed.take():
        plan = feed.next_plan()
        assert plan is not None
        assert plan.num_micro_batches == len(micro_batches)
        sizes.append(len(micro_batches))
        feed.advance(len(micro_batches))
    assert sizes == [2] * 9 + [1]
    plan = feed.next_plan()
    assert plan is not None
    assert plan.num_micro_batches == 0


def test_plan_of_a_loader_with_other_steps_than_the_feed_is_not_used():
    assert Feed(loader(), 1, ALONE).next_plan() is None


def test_plan_of_a_subclass_that_changes_what_is_loaded_is_not_used():
    assert Feed(loader(Filtering), 2, ALONE).next_plan() is None


def test_wrapper_of_a_loader_keeps_cursor_and_length_and_has_no_plan():
    wrapper = Wrapper(loader())
    feed = Feed(wrapper, 2, ALONE)
    assert feed.next_plan() is None
    assert feed.steps_per_epoch == 10
    feed.advance(len(feed.take()))
    assert feed.rank_state_dict()["loader"] == {"epoch": 0, "samples": 4}


class Growing(TensorDataset):
    def set_epoch(self, epoch):
        self.tensors = (torch.arange(8 + 3 * epoch),)


def test_planned_steps_are_those_of_all_epochs_each_of_its_own_length():
    feed = Feed(SampleLoader(Growing(torch.arange(8)), micro_batch_size=4), 1, ALONE)
    made = 0
    while feed.epoch < 4:
        micro_batches = feed.take()
        if micro_batches:
            feed.advance(1)
            made += 1
        else:
            feed.next_epoch()
    feed = Feed(SampleLoader(Growing(torch.arange(8)), micro_batch_size=4), 1, ALONE)
    options = {"precision": "auto"}
    assert feed.planned_steps(Train(max_steps=None, epochs=4, **options)) == made == 2 + 3 + 4 + 5
    assert feed.planned_steps(Train(max_steps=20, epochs=4, **options)) == made
    # Does not count all epochs.
    assert feed.planned_steps(Train(max_steps=9, epochs=10**9, **options)) == 9


class OwnCursor(SampleLoader):
    global_cursor = False


def test_micro_batches_per_step_of_a_loader_without_global_batches_must_divide():
    three = Layout(World(2, 3, 2, 3, torch.device("cpu")), replicate=3)
    ranks = {"rank": 2, "world_size": 3}
    assert micro_batches_per_step(loader(**ranks), 4, 2, three) == 1
    assert micro_batches_per_step(loader(global_batch_size=2, **ranks), 2, 2, three) == 0
    assert micro_batches_per_step([], 12, 2, three) == 2
    refused = (
        "4 is not a multiple of data.micro_batch_size=2 times 3 data-parallel ranks = 6, and list"
    )
    with user_error(refused):
        micro_batches_per_step([], 4, 2, three)
    with user_error(r"data\.global_batch_size=2 on 3 data-parallel ranks: each rank reads"):
        micro_batches_per_step(loader(OwnCursor, global_batch_size=2, **ranks), 2, 2, three)
