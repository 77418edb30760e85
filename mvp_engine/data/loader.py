"""SampleLoader: a map-style dataset as micro-batches, in one global order that does not depend on the number of ranks.

The order comes from (seed, epoch) alone; each optimizer step takes the next `global_batch_size` samples of it and each
rank takes its stride of those, in micro-batches of at most `micro_batch_size`. So the whole resume state is "epoch e, n
samples done", right for any number of ranks. A sample's own randomness comes from (seed, epoch, index): workers, ranks
and resumes cannot change an augmentation.

StepPlan: what every data-parallel rank holds in one optimizer step, known without communication.

A loader that derives the global order of an epoch from its seed knows this for all ranks. The FSDP backend then
schedules dummy forwards without a host all-gather in every step.

Memory of DataLoader workers: malloc settings, small tensors without shared memory, and shared memory that the worker
frees instead of the reader. And their time: the row of each batch that took longest.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory as pin

from mvp_engine.errors import UserError
from mvp_engine.process.watchdog import end_with_this_process


def derived_seed(*parts: object) -> int:
    """A 32-bit seed (numpy's limit) from anything printable; the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


def make_deterministic() -> None:
    """Let PyTorch compute the same bits in each run on a GPU; called before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def seed_everything(seed: int, cuda: bool = True) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if cuda and torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """All generators of this process, as values that `torch.load(weights_only=True)` reads back."""
    version, keys, gauss = random.getstate()
    _, words, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "python": [version, list(keys), gauss],
        "numpy": [
            torch.from_numpy(words.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    words, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", words.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def keep_rng_state() -> Iterator[None]:
    """A context after which all generators of this process are as before it: what it draws leaves no trace."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


MediaKinds = frozenset[str]  # keys of PackedBatch.media, such as "pixel_values"


@dataclass(frozen=True)
class StepPlan:
    """For each data-parallel rank, the media kinds of its micro-batches.

    A rank may turn out to hold fewer kinds than planned (a row that failed to decode is left out), never more. Without
    `media_known` the plan says only how many micro-batches there are; their kinds are then empty.
    """

    ranks: tuple[tuple[MediaKinds, ...], ...]
    media_known: bool = True
    num_samples: int | None = None  # of all ranks

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of the rank that has most; 0 at the end of an epoch."""
        return max(map(len, self.ranks), default=0)


T = TypeVar("T")


def implements(loader: object, protocol: type[T]) -> TypeGuard[T]:
    """Does a loader have all attributes of a protocol?

    `isinstance` would not see, from Python 3.12 on, what a wrapper passes on by `__getattr__`.
    """
    names = {*vars(protocol), *protocol.__annotations__}
    return all(hasattr(loader, name) for name in names if not name.startswith("_"))


class StatefulLoader(Protocol):
    """Keeps a cursor of its own. The loop replays the epoch of any other loader when it resumes."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class MovesBetweenRanks(Protocol):
    """A stateful loader whose positions on some ranks can be continued on another number of them."""

    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        """`states`: of all ranks that saved; ranks that share their data have the same one."""


class KnowsLength(Protocol):
    @property
    def steps_per_epoch(self) -> int: ...


class KnowsEpochs(Protocol):
    epochs_differ: bool  # in length; of a loader with a global cursor

    def steps_in_epoch(self, epoch: int) -> int: ...


class LimitsBatches(Protocol):
    def limit_batches(self, micro_batches: int) -> None:
        """Read only the first so many micro-batches of an epoch, counted over all ranks."""


class KnowsSamples(Protocol):
    def sample_ids(self, first: int, last: int) -> list[Any]:
        """The samples of this rank's micro-batches `first` to `last` (exclusive), counted from the cursor."""


class KnowsPlan(Protocol):
    accumulation: int  # micro-batches of a rank in one step

    def step_plan(self, step: int) -> StepPlan | None:
        """What all ranks hold in a step, counted from the cursor, if the loader knows."""


# Options of glibc's mallopt.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
SMALL_BYTES = 2**20  # of a tensor that is copied through the pipe of a worker


def start_worker(end_with_rank: Callable[[], None], _: int) -> None:
    """What a worker does first. `end_with_rank`: see `end_with_this_process`."""
    end_with_rank()
    keep_freed_memory()
    ForkingPickler.register(Tensor, _reduce)


def keep_freed_memory() -> None:
    """Configure malloc in a worker to keep what it frees: it needs the same sizes again soon.

    Otherwise the kernel clears the same pages for every batch. Does nothing where libc is not glibc.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc allows
        mallopt(M_TRIM_THRESHOLD, 512 << 20)
        mallopt(M_ARENA_MAX, 1)


def _reduce(tensor: Tensor) -> tuple[Any, ...]:
    """Pickle a small tensor by value.

    Shared memory costs the reader half a millisecond for each tensor, in which it asks the worker for a file.
    """
    is_dense = (
        tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_complex()
    )
    is_small = is_dense and tensor.is_contiguous() and tensor.nbytes <= SMALL_BYTES
    if not is_small or tensor.requires_grad:
        return reduce_tensor(tensor)
    data = bytearray(tensor.flatten().view(torch.uint8).numpy())
    return _rebuild, (data, tensor.dtype, tensor.shape)


def _rebuild(data: bytearray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shape)


class SlowRow(NamedTuple):
    """The row of a batch that took longest to load."""

    row: Any  # a sample's index, where it is in its file, or collate_fn
    row_seconds: float
    batch_seconds: float  # of all rows together
    worker: int | None  # None: the training process


class RowTimer(threading.local):
    """Times the rows that this thread loads, one after another, until their batch is complete."""

    def __init__(self) -> None:
        self._row: Any = None  # the one that is being loaded
        self._began = 0.0
        self._seconds = 0.0  # of the rows before it
        self._slowest: tuple[Any, float] = (None, -1.0)

    def begin(self, row: Any) -> None:
        """The row before it, if any, is loaded."""
        now = time.perf_counter()
        if self._row is not None:
            seconds = now - self._began
            self._seconds += seconds
            if seconds > self._slowest[1]:
                self._slowest = self._row, seconds
        self._row = row
        self._began = now

    def end(self) -> SlowRow:
        """The batch is complete: its slowest row."""
        self.begin(None)
        row, seconds = self._slowest
        info = get_worker_info()
        found = SlowRow(row, seconds, self._seconds, info.id if info else None)
        self._seconds = 0.0
        self._slowest = (None, -1.0)
        return found


ROW_TIMER = RowTimer()


class LoadedBatch(NamedTuple):
    """What a DataLoader yields: a batch, and which row it took longest to load."""

    batch: Any
    slow_row: SlowRow


class KeepLastBatches:
    """Calls a function that makes a batch; in a worker it keeps references to the last results.

    The reader maps a result in shared memory. If it held the last reference it would free that memory, which takes
    25 ms for 130 MB with the GIL held. So the worker frees it instead.
    """

    LAST = 3  # two batches that torch prefetches from a worker, and one that is being copied to the GPU

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.results: deque[Any] = deque(maxlen=self.LAST)

    def __call__(self, value: Any) -> LoadedBatch:
        ROW_TIMER.begin("collate_fn")
        result = self.function(value)
        if get_worker_info():
            self.results.append(result)
        return LoadedBatch(result, ROW_TIMER.end())


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
        self._collate = KeepLastBatches(
            partial(without_stop_iteration, collate_fn or default_collate)
        )
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
        with keep_rng_state():  # it draws a seed when it starts
            return iter(loader)

    def sample_ids(self, first: int, last: int) -> list[int]:
        """The dataset indices of this rank's micro-batches `first` to `last` (exclusive), counted from the cursor."""
        batches = self._micro_batches()[first:last]
        return [index for batch in batches for index in batch]

    def step_plan(self, step: int) -> StepPlan | None:
        """What all ranks hold in a step, counted from the cursor, if that is known."""
        if not (self._plans_steps or type(self) is SampleLoader):
            return None
        first = min(self.size, self.start + step * self.global_batch_size)
        last = min(self.size, first + self.global_batch_size)
        ranks = []
        for rank in range(self.world_size):
            places = self._chunks(range(first + rank, last, self.world_size))
            ranks.append(tuple(self._media_kinds(chunk) for chunk in places))
        return StepPlan(tuple(ranks), self._media_known, self._num_samples(first, last))

    _media_known = False  # the samples of a dataset may hold media, or not

    _plans_steps = False  # a subclass may load other samples than planned, unless it says otherwise

    def _media_kinds(self, places: range) -> MediaKinds:
        """The media kinds of the samples at these places of the epoch."""
        return frozenset()

    def _num_samples(self, first: int, last: int) -> int:
        """How many samples are at these places of the epoch."""
        return last - first

    def _micro_batches(self) -> list[list[int]]:
        order: Any = range(self.size)
        if self.shuffle:
            generator = torch.Generator().manual_seed(derived_seed(self.seed, "order", self.epoch))
            order = torch.randperm(self.size, generator=generator).tolist()
        batches: list[list[int]] = []
        for step in range(self.start, self.size, self.global_batch_size):
            samples = order[step : step + self.global_batch_size]
            batches += map(list, self._chunks(samples[self.rank :: self.world_size]))
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
            return without_stop_iteration(self.dataset.__getitems__, indices)
        items: list[Any] = []
        with nullcontext() if get_worker_info() else keep_rng_state():
            for index in indices:
                ROW_TIMER.begin(index)
                seed = derived_seed(self.seed, "sample", self.epoch, index)
                seed_everything(seed, cuda=False)
                try:
                    items.append(without_stop_iteration(self.dataset.__getitem__, index))
                except Exception as error:
                    error.add_note(f"while reading sample {index} of {type(self.dataset).__name__}")
                    raise
        return items


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


def without_stop_iteration(function: Callable[[Any], Any], value: Any) -> Any:
    """Calls a user's function. A StopIteration from it would look like the end of the epoch: it becomes an error."""
    try:
        return function(value)
    except StopIteration as error:
        raise RuntimeError(f"{function} raised StopIteration") from error


def accumulation_steps(
    global_batch_size: int, micro_batch_size: int, world_size: int, rank: int = 0
) -> int:
    """Gradient accumulation: the micro-batches of a rank in one optimizer step. Rank 0 has most; some may have none."""
    samples = range(rank, global_batch_size, world_size)
    return math.ceil(len(samples) / micro_batch_size)
