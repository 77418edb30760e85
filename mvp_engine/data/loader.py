"""From a map-style dataset to micro-batches, in one global order that does not depend on the number of ranks.

The order comes from (seed, epoch) alone; each optimizer step takes the next `global_batch_size` samples of it and each
rank takes its stride of those. So the whole resume state is "epoch e, n samples done", right for any number of ranks.
A sample's own randomness comes from (seed, epoch, index): workers, ranks and resumes cannot change an augmentation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
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
from mvp_engine.data.worker_memory import Kept, keep_memory
from mvp_engine.errors import UserError


class SampleLoader:
    """Iterating gives this rank's micro-batches of the current epoch, from the cursor on; then call `set_epoch`."""

    global_cursor = True  # the state is the same on all ranks, and right on any number of them

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        micro_batch_size: int,
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
        self._tell_epoch(0)
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size or micro_batch_size * world_size
        self.accumulation = accumulation_steps(self.global_batch_size, micro_batch_size, world_size)
        self.rank, self.world_size, self.seed, self.shuffle = rank, world_size, seed, shuffle
        self.start, self._yielded = 0, 0
        self._make = lambda items, sampler: DataLoader(
            items,
            batch_sampler=sampler,
            collate_fn=Kept(_Surfacing(collate_fn or default_collate)),
            num_workers=num_workers,
            timeout=timeout if num_workers else 0.0,
            worker_init_fn=keep_memory,
        )
        self._ready = pinned if pin_memory else iter

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.size / self.global_batch_size)

    def set_epoch(self, epoch: int) -> None:
        self._tell_epoch(epoch)
        self.start, self._yielded = 0, 0

    def state_dict(self) -> dict[str, int]:
        steps = math.ceil(self._yielded / self.accumulation)
        return {
            "epoch": self.epoch,
            "samples": min(self.size, self.start + steps * self.global_batch_size),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._tell_epoch(state["epoch"])
        self.start, self._yielded = state["samples"], 0

    def _tell_epoch(self, epoch: int) -> None:
        """A dataset with `set_epoch` may be another one in each epoch, and of another size."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self.epoch, self.size = epoch, len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        self._yielded = 0
        for micro_batch in self._ready(self._items()):
            self._yielded += 1
            yield micro_batch

    def _items(self) -> Iterator[Any]:
        with keep_rng_state():
            return iter(
                self._make(_Seeded(self.dataset, self.seed, self.epoch), self._micro_batches())
            )

    def sample_ids(self, first: int, last: int) -> list[int]:
        """The dataset indices of this rank's micro-batches `first` to `last` (exclusive), counted from the cursor."""
        return [index for batch in self._micro_batches()[first:last] for index in batch]

    def _micro_batches(self) -> list[list[int]]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(derived_seed(self.seed, "order", self.epoch))
            order = torch.randperm(self.size, generator=generator).tolist()
        else:
            order = list(range(self.size))
        batches = []
        for step in range(self.start, self.size, self.global_batch_size):
            mine = order[step : step + self.global_batch_size][self.rank :: self.world_size]
            batches += [
                mine[i : i + self.micro_batch_size]
                for i in range(0, len(mine), self.micro_batch_size)
            ]
        return batches


class _Seeded(Dataset[Any]):
    """The dataset, with Python's, numpy's and torch's generators set for each sample."""

    def __init__(self, dataset: Dataset[Any], seed: int, epoch: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, epoch

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if hasattr(
            self.dataset, "__getitems__"
        ):  # batched reading: the dataset answers for being a function of index
            return _Surfacing(self.dataset.__getitems__)(indices)
        outside = None if get_worker_info() else rng_state()
        try:
            return [self._item(index) for index in indices]
        finally:
            if outside is not None:
                set_rng_state(outside)

    def _item(self, index: int) -> Any:
        seed_everything(derived_seed(self.seed, "sample", self.epoch, index), cuda=False)
        try:
            return _Surfacing(self.dataset.__getitem__)(index)
        except Exception as error:
            error.add_note(f"while reading sample {index} of {type(self.dataset).__name__}")
            raise


def pinned(items: Iterator[Any], ahead: int = 2) -> Iterator[Any]:
    """The same items in pinned memory, a few ahead, by a thread. torch's DataLoader would pin all that workers have
    ready: gigabytes, and while the driver makes room for them nobody can launch work."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    with ThreadPoolExecutor(1, "pin", torch.cuda.set_device, (device,)) as thread:
        ready: deque[Future[Any]] = deque()
        error: Exception | None = None
        while error is None:
            try:
                ready.append(thread.submit(pin, next(items)))
            except Exception as end:  # noqa: BLE001 - the end, or whatever went wrong: after what came before
                error = end
            while ready and (error or len(ready) > ahead):
                yield ready.popleft().result()
        if not isinstance(error, StopIteration):
            raise error


class _Surfacing:
    """Calls a user's function; a StopIteration from it would look like the end of the epoch, and becomes an error."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, value: Any) -> Any:
        try:
            return self.function(value)
        except StopIteration as error:
            raise RuntimeError(f"{self.function} raised StopIteration") from error


def accumulation_steps(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """How many micro-batches each rank adds up for one optimizer step."""
    per_pass = micro_batch_size * world_size
    if global_batch_size % per_pass:
        below = max(1, global_batch_size // per_pass) * per_pass
        nearest = sorted({below, (global_batch_size // per_pass + 1) * per_pass})
        raise UserError(
            f"data.global_batch_size={global_batch_size} is not a multiple of data.micro_batch_size={micro_batch_size} "
            f"times {world_size} data-parallel rank(s) = {per_pass}. The nearest that fit: "
            f"{' or '.join(map(str, nearest))}; or choose another data.micro_batch_size."
        )
    return global_batch_size // per_pass
