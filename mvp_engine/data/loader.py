"""SampleLoader: a map-style dataset as micro-batches, in one global order that does not depend on the number of ranks.

The order comes from (seed, epoch) alone; each optimizer step takes the next `global_batch_size` samples of it and each
rank takes its stride of those, in micro-batches of at most `micro_batch_size`. So the whole resume state is "epoch e, n
samples done", right for any number of ranks. A sample's own randomness comes from (seed, epoch, index): workers, ranks
and resumes cannot change an augmentation.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory as pin

from mvp_engine.data.rng import (
    derived_seed,
    keep_rng_state,
    rng_state,
    seed_everything,
    set_rng_state,
)
from mvp_engine.data.step_plan import MediaKinds, StepPlan
from mvp_engine.data.worker_memory import ROW_TIMER, KeepLastBatches, SlowRow, start_worker
from mvp_engine.errors import UserError
from mvp_engine.process.watchdog import end_with_this_process

MOST_PINNED = 8  # micro-batches: those of images have 150 MB


class SampleLoader:
    """Iterating yields this rank's micro-batches of the current epoch, from the cursor on; then call `set_epoch`."""

    global_cursor = True  # the state of rank 0 is right for all ranks, and on any number of them
    size: int  # samples of the epoch
    slow_row: SlowRow | None = None  # of the last micro-batch

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        micro_batch_size: int,  # at most
        global_batch_size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        timeout: float = 0.0,  # seconds to wait for a worker; 0: for ever
    ) -> None:
        if not isinstance(dataset, Sized):
            raise UserError(
                f"{type(dataset).__name__} has no __len__; SampleLoader needs a map-style dataset"
            )
        self.dataset: Any = dataset
        self._max_samples = sys.maxsize  # of an epoch
        self._begin_epoch(0)
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size or micro_batch_size * world_size
        self.accumulation = accumulation_steps(
            self.global_batch_size, micro_batch_size, world_size, rank
        )
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.start = 0  # the cursor: samples of this epoch that were used before this iteration
        self._yielded = 0  # micro-batches since
        self._num_workers = num_workers
        self._timeout = timeout if num_workers else 0.0
        self._collate = KeepLastBatches(_RaiseStopIteration(collate_fn or default_collate))
        self._pins = pin_memory

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.size / self.global_batch_size)

    @property
    def epochs_differ(self) -> bool:
        """May epochs have other lengths than this one?"""
        return hasattr(self.dataset, "set_epoch")

    def steps_in_epoch(self, epoch: int) -> int:
        return math.ceil(self._epoch_size(epoch) / self.global_batch_size)

    def _epoch_size(self, epoch: int) -> int:
        if hasattr(self.dataset, "epoch_size"):
            size = self.dataset.epoch_size(epoch)
        elif self.epochs_differ:
            self.dataset.set_epoch(epoch)
            size = len(self.dataset)
            self.dataset.set_epoch(self.epoch)
        else:
            size = len(self.dataset)
        return min(size, self._max_samples)

    def set_epoch(self, epoch: int) -> None:
        self._begin_epoch(epoch)
        self.start = 0
        self._yielded = 0

    def state_dict(self) -> dict[str, int]:
        steps = math.ceil(self._yielded / max(1, self.accumulation))  # 0 where a rank has no part
        samples = min(self.size, self.start + steps * self.global_batch_size)
        return {"epoch": self.epoch, "samples": samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.set_epoch(state["epoch"])
        self.start = state["samples"]

    def limit_batches(self, micro_batches: int) -> None:
        """Read only the first so many micro-batches of an epoch, counted over all ranks."""
        self._max_samples = micro_batches * self.micro_batch_size
        self.size = min(self.size, self._max_samples)

    def _begin_epoch(self, epoch: int) -> None:
        """A dataset with `set_epoch` may be another one in each epoch, and of another size."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self.epoch = epoch
        self.size = min(len(self.dataset), self._max_samples)

    def __iter__(self) -> Iterator[Any]:
        self._yielded = 0
        items = self._items()
        if self._pins:
            # A step takes all its micro-batches at once. Without workers, reading ahead would delay the first one.
            prefetch = max(2, min(self.accumulation, MOST_PINNED)) if self._num_workers else 2
            items = pinned(items, prefetch)
        for micro_batch, slow_row in items:
            self._yielded += 1
            self.slow_row = slow_row
            yield micro_batch

    def _items(self) -> Iterator[Any]:
        """The micro-batches as `LoadedBatch`."""
        loader: DataLoader[Any] = DataLoader(
            _SeededDataset(self.dataset, self.seed, self.epoch),
            batch_sampler=self._micro_batches(),
            collate_fn=self._collate,
            num_workers=self._num_workers,
            timeout=self._timeout,
            worker_init_fn=partial(start_worker, end_with_this_process()),
        )
        with keep_rng_state():
            return iter(loader)

    def sample_ids(self, first: int, last: int) -> list[int]:
        """The dataset indices of this rank's micro-batches `first` to `last` (exclusive), counted from the cursor."""
        batches = self._micro_batches()[first:last]
        return [index for batch in batches for index in batch]

    def step_plan(self, step: int) -> StepPlan | None:
        """What all ranks hold in a step, counted from the cursor, if that is known."""
        if not self._plans_steps():
            return None
        first = min(self.size, self.start + step * self.global_batch_size)
        last = min(self.size, first + self.global_batch_size)
        ranks = []
        for rank in range(self.world_size):
            places = self._chunks(range(first + rank, last, self.world_size))
            ranks.append(tuple(self._media_kinds(chunk) for chunk in places))
        return StepPlan(tuple(ranks), self._media_known, self._num_samples(first, last))

    _media_known = False  # the samples of a dataset may hold media, or not

    def _plans_steps(self) -> bool:
        """A subclass may load other samples than planned, unless it says otherwise."""
        return type(self) is SampleLoader

    def _media_kinds(self, places: range) -> MediaKinds:
        """The media kinds of the samples at these places of the epoch."""
        return frozenset()

    def _num_samples(self, first: int, last: int) -> int:
        """How many samples are at these places of the epoch."""
        return last - first

    def _micro_batches(self) -> list[list[int]]:
        order = list(range(self.size))
        if self.shuffle:
            generator = torch.Generator().manual_seed(derived_seed(self.seed, "order", self.epoch))
            order = torch.randperm(self.size, generator=generator).tolist()
        batches = []
        for step in range(self.start, self.size, self.global_batch_size):
            samples = order[step : step + self.global_batch_size]
            batches += self._chunks(samples[self.rank :: self.world_size])
        return batches

    def _chunks(self, samples: Any) -> list[Any]:
        size = self.micro_batch_size
        return [samples[i : i + size] for i in range(0, len(samples), size)]


class _SeededDataset(Dataset[Any]):
    """The dataset, with Python's, numpy's and torch's generators seeded for each sample."""

    def __init__(self, dataset: Dataset[Any], seed: int, epoch: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch = epoch

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            # Batched reading: the dataset itself must be a function of the indices.
            ROW_TIMER.begin(indices)
            return _RaiseStopIteration(self.dataset.__getitems__)(indices)
        outside = None if get_worker_info() else rng_state()
        try:
            return [self._item(index) for index in indices]
        finally:
            if outside is not None:
                set_rng_state(outside)

    def _item(self, index: int) -> Any:
        ROW_TIMER.begin(index)
        seed_everything(derived_seed(self.seed, "sample", self.epoch, index), cuda=False)
        try:
            return _RaiseStopIteration(self.dataset.__getitem__)(index)
        except Exception as error:
            error.add_note(f"while reading sample {index} of {type(self.dataset).__name__}")
            raise


def pinned(items: Iterator[Any], prefetch: int = 2) -> Iterator[Any]:
    """The same items in pinned memory, prefetched by a thread.

    torch's DataLoader would pin all batches that workers have ready: gigabytes, and while the driver allocates them
    no kernel can be launched.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    with ThreadPoolExecutor(1, "pin", torch.cuda.set_device, (device,)) as thread:
        ready: deque[Future[Any]] = deque()
        error: Exception | None = None
        yielded = 0
        while error is None:
            try:
                ready.append(thread.submit(pin, next(items)))
            except Exception as end:  # noqa: BLE001 - StopIteration or a failure; raised after what came before
                error = end
            # At first only two, so that the first step does not wait for the micro-batches of the second one.
            while ready and (error or len(ready) > (prefetch if yielded >= prefetch else 2)):
                yielded += 1
                yield ready.popleft().result()
        if not isinstance(error, StopIteration):
            raise error


class _RaiseStopIteration:
    """Calls a user's function. A StopIteration from it would look like the end of the epoch: it becomes an error."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, value: Any) -> Any:
        try:
            return self.function(value)
        except StopIteration as error:
            raise RuntimeError(f"{self.function} raised StopIteration") from error


def accumulation_steps(
    global_batch_size: int, micro_batch_size: int, world_size: int, rank: int = 0
) -> int:
    """Gradient accumulation: the micro-batches of a rank in one optimizer step. Rank 0 has most; some may have none."""
    samples = range(rank, global_batch_size, world_size)
    return math.ceil(len(samples) / micro_batch_size)
