"""Feed: the micro-batches of one step after another from any loader, with a cursor that resumes exactly.

A loader with `state_dict` and `load_state_dict` (such as `SampleLoader`) keeps its own cursor. Any other iterable is
resumed by starting its epoch with the same random state and skipping what was used.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from mvp_engine.config.schema import Train
from mvp_engine.data import rng_state, set_rng_state
from mvp_engine.data.loader import (
    KnowsEpochs,
    KnowsLength,
    KnowsPlan,
    KnowsSamples,
    MovesBetweenRanks,
    StatefulLoader,
    StepPlan,
    implements,
)
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError, count

LOGGER = logging.getLogger("mvp_engine")
COMPARED_STEPS = 2  # of a training, after which the data of the ranks are compared


class Feed:
    def __init__(
        self, loader: Iterable[Any], accumulation: int, world: World, layout: Layout | None = None
    ) -> None:
        """`layout`: without one, each rank has data of its own."""
        _refuse_same_data_on_all_ranks(loader, world)
        self.data_rank = layout.data_rank if layout else world.rank
        self.data_size = layout.data_size if layout else world.size
        self.loader = loader
        self.accumulation = accumulation
        self.world = world
        self.epoch = 0
        self.steps = 0  # in this epoch
        self.first_step = 0  # of the training, at which the first epoch of these data began
        self.is_restarted = False  # at this start: the data are others (`resume_data`)
        self.used = 0  # micro-batches of this rank since the epoch, or the loader's cursor, began
        self._steps_since_cursor = 0
        self._waited = 0.0
        # Of the micro-batch of the last step that was waited for longest: seconds, its number, its slowest row.
        self.longest_wait: dict[str, Any] = {}
        self._iterator: Iterator[Any] | None = None
        self._epoch_rng: dict[str, Any] | None = None
        self.same_data: str | None = None  # which ranks train on the same rows, and the fix
        # Fingerprints of the first steps' micro-batches, until they are compared; None: no need to.
        divides_itself = self.data_size == 1 or _has_global_cursor(loader)
        self._first_steps: list[list[int]] | None = None if divides_itself else []
        self._stateful = loader if implements(loader, StatefulLoader) else None
        # On the type: a wrapper that passes attributes on may change what is loaded.
        knows = implements(loader, KnowsPlan) and hasattr(type(loader), "step_plan")
        other_steps = getattr(loader, "accumulation", None) != accumulation
        self._planned: Any = loader if knows and not world.any(other_steps)[0] else None

    @property
    def steps_per_epoch(self) -> int | None:
        if implements(self.loader, KnowsLength):
            return int(self.loader.steps_per_epoch)
        try:
            return -(-len(self.loader) // self.accumulation)  # type: ignore[arg-type]
        except TypeError:
            return None

    def planned_steps(self, train: Train) -> int | None:
        """Optimizer steps of the training, if they are known. All ranks must call it."""
        of_ranks = self.world.all_gather(self.steps_per_epoch)  # loaders may differ in length
        limits = [train.max_steps]
        if train.epochs is not None and None not in of_ranks:
            in_epochs = self._steps_in_epochs(train.epochs, max(of_ranks), train.max_steps)
            limits.append(self.first_step + in_epochs)
        return min((limit for limit in limits if limit is not None), default=None)

    def _steps_in_epochs(self, epochs: int, first: int, limit: int | None) -> int:
        """Steps in all epochs, of which the first one has `first`. It stops to count at `limit`.

        To count the packs of an epoch takes seconds if it has millions of rows: each rank does so for some epochs.
        """
        loader = self.loader
        if not implements(loader, KnowsEpochs) or not loader.epochs_differ:
            return epochs * first
        steps = first
        for start in range(1, epochs, self.world.size):
            if limit is not None and steps >= limit:
                break
            epoch = start + self.world.rank
            own = loader.steps_in_epoch(epoch) if epoch < epochs else 0
            steps += sum(self.world.all_gather(own))
        return steps

    def next_plan(self) -> StepPlan | None:
        """What all ranks hold in the next step, if the loader planned it for these ranks."""
        plan = self._planned and self._planned.step_plan(self._steps_since_cursor)
        return plan if plan and len(plan.ranks) == self.data_size else None

    def take(self) -> list[Any]:
        """This rank's micro-batches of the next step. Empty when this rank has none left in this epoch."""
        began = started = time.perf_counter()
        longest = -1.0
        self.longest_wait = {}
        if self._iterator is None:
            self._iterator = self._open()
        micro_batches = []
        for micro_batch in islice(self._iterator, self.accumulation):
            micro_batches.append(micro_batch)
            seconds = time.perf_counter() - began
            began += seconds
            if seconds > longest:
                longest = seconds
                row = getattr(self.loader, "slow_row", None)
                self.longest_wait = {
                    "micro_batch": len(micro_batches),
                    **(row._asdict() if row else {}),
                }
        self._waited += time.perf_counter() - started
        if self._first_steps is not None:
            self._first_steps.append([_fingerprint(one) for one in micro_batches])
            if len(self._first_steps) == COMPARED_STEPS:
                self._compare_ranks([*chain(*self._first_steps)])
        return micro_batches

    def _compare_ranks(self, own: list[int]) -> None:
        """Warn if data-parallel ranks have the same micro-batches. All ranks call it, once.

        Ranks of one data-parallel rank share theirs. Micro-batches that are all equal say nothing: constant data.
        """
        self._first_steps = None
        by_rank = dict(self.world.all_gather((self.data_rank, own)))
        first_with: dict[tuple[int, ...], int] = {}
        for rank, found in sorted(by_rank.items()):
            first = first_with.setdefault(tuple(found), rank)
            if first != rank and len(set(found)) > 1 and self.same_data is None:
                self.same_data = (
                    f"data-parallel ranks {first} and {rank} of {self.data_size} got the same micro-batches in the "
                    f"first {COMPARED_STEPS} steps: {type(self.loader).__name__} ignores its rank, so rows are trained "
                    "on several times in one step. Let it take every n-th row: islice(rows, layout.data_rank, None, "
                    "layout.data_size), with the engine's self.layout; or return self.sample_loader(...)"
                )
                if self.world.is_main:
                    LOGGER.warning("%s", self.same_data)

    def close(self) -> None:
        """End the loader's workers now.

        The garbage collector takes their queues away first, and a DataLoader then waits five seconds for each worker,
        in the middle of whatever the process does by then.
        """
        self._iterator = None

    def take_waited(self) -> float:
        """Seconds spent waiting for data since the last call."""
        waited = self._waited
        self._waited = 0.0
        return waited

    def advance(self, micro_batches: int) -> dict[str, Any]:
        """A step over so many micro-batches begins; returns its place in the data."""
        place = {"epoch": self.epoch, "micro_batches": [self.used, self.used + micro_batches]}
        self.used += micro_batches
        self.steps += 1
        self._steps_since_cursor += 1
        return place

    def next_epoch(self) -> None:
        if self.steps == 0:
            raise UserError(
                "the training loader gave no batch at all in a whole epoch: the dataset is empty, or everything in it "
                "was filtered out. Check what prepare_dataloader('train') returns."
            )
        self._begin(self.epoch + 1)

    def rewind(self) -> None:
        """Start the first epoch."""
        self._begin(0)

    def _begin(self, epoch: int, steps: int = 0) -> None:
        """Start an epoch, after its first `steps` steps."""
        self.epoch = epoch
        self.steps = steps
        self.used = 0
        self._steps_since_cursor = 0
        self._iterator = None
        self._epoch_rng = None
        for part in self._parts():
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def sample_ids(self, place: dict[str, Any]) -> list[Any] | None:
        """The samples at a place in the current epoch, if the loader knows."""
        if not implements(self.loader, KnowsSamples):
            return None
        return list(self.loader.sample_ids(*place["micro_batches"]))

    def state_dict(self) -> dict[str, Any]:
        """The state that all ranks have in common."""
        return {"epoch": self.epoch, "steps": self.steps}

    def rank_state_dict(self) -> dict[str, Any]:
        """The state of this rank."""
        own = self._stateful.state_dict() if self._stateful else None
        ranks = {"data_rank": self.data_rank, "data_size": self.data_size}
        return {"used": self.used, "epoch_rng": self._epoch_rng, "loader": own, **ranks}

    def load_state_dict(
        self, state: dict[str, Any], num_saved: int, rank_state: Callable[[int], dict[str, Any]]
    ) -> None:
        """`rank_state(n)` is the state of rank n of the `num_saved` ranks that saved; only what is needed is read."""
        self._begin(state["epoch"], state["steps"])
        first = rank_state(0)
        # Checkpoints of earlier versions do not say which ranks share their data.
        knows = "data_size" in first
        own_rank = self.data_rank if knows else self.world.rank
        own_size = self.data_size if knows else self.world.size
        saved_size = first.get("data_size", num_saved)
        is_global = _has_global_cursor(self.loader)
        if saved_size != own_size and not is_global:
            by_rank: dict[int, dict[str, Any]] = {}
            for rank in range(num_saved):
                one = rank_state(rank)
                by_rank[one.get("data_rank", rank)] = one
            self._load_from_other_ranks(list(by_rank.values()), saved_size)
            return
        own = first if is_global else self._saved_state(own_rank, num_saved, rank_state)
        if self._stateful:
            self._stateful.load_state_dict(own["loader"])
        elif own["epoch_rng"] is not None:
            self.used = own["used"]
            self._iterator = self._replay(own["epoch_rng"])

    def _saved_state(
        self, data_rank: int, num_saved: int, rank_state: Callable[[int], dict[str, Any]]
    ) -> dict[str, Any]:
        """The saved state of a data-parallel rank: on the same layout that of this rank itself."""
        likely = self.world.rank % num_saved
        for rank in [likely, *range(num_saved)]:
            one = rank_state(rank)
            if one.get("data_rank", rank) == data_rank:
                return one
        raise AssertionError(f"no rank saved the data of data-parallel rank {data_rank}")

    def _load_from_other_ranks(self, of_ranks: list[dict[str, Any]], saved_size: int) -> None:
        """Continue on another number of data-parallel ranks than that of the checkpoint."""
        states = [own["loader"] for own in of_ranks]
        has_ranks = all(state and "ranks" in state for state in states)
        if not implements(self.loader, MovesBetweenRanks) or not has_ranks:
            raise UserError(
                f"the cursor of {type(self.loader).__name__} is each rank's own, and the checkpoint was saved by "
                f"{count(saved_size, 'data-parallel rank')}: start as many (--nproc {saved_size}), or use "
                "mvp_engine.data.SampleLoader: its cursor is valid on any number of ranks."
            )
        self.loader.load_rank_states(states)

    def _open(self) -> Iterator[Any]:
        if not self._stateful:
            generators = [generator.get_state() for generator in self._generators()]
            self._epoch_rng = {"process": rng_state(), "generators": generators}
        return iter(self.loader)

    def _replay(self, epoch_rng: dict[str, Any]) -> Iterator[Any]:
        """Start the epoch with the random state that it was started with, and skip what was used."""
        self._epoch_rng = epoch_rng
        set_rng_state(epoch_rng["process"])
        for generator, state in zip(self._generators(), epoch_rng["generators"], strict=True):
            generator.set_state(state)
        iterator = iter(self.loader)
        for _ in islice(iterator, self.used):
            pass
        return iterator

    def _parts(self) -> list[Any]:
        """The loader and its samplers and dataset, each once."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        parts = [
            self.loader,
            getattr(self.loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(self.loader, "dataset", None),
        ]
        return list({id(part): part for part in parts}.values())

    def _generators(self) -> list[torch.Generator]:
        """The random generators that the loader has for itself."""
        found = [getattr(part, "generator", None) for part in self._parts()]
        generators = [one for one in found if isinstance(one, torch.Generator)]
        return list({id(generator): generator for generator in generators}.values())


def _fingerprint(value: Any) -> int:
    """A checksum of the data in nested containers, equal in all processes; of other objects, that of their type."""
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return crc32(data.tobytes(), crc32(f"{value.dtype} {tuple(value.shape)}".encode()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        return crc32(repr([_fingerprint(one) for one in value]).encode())
    if hasattr(value, "tobytes"):  # numpy, PIL
        return crc32(value.tobytes())
    is_plain = isinstance(value, str | bytes | int | float | None)
    return crc32(repr(value if is_plain else type(value)).encode())


def _has_global_cursor(loader: Iterable[Any]) -> bool:
    """Is the state of rank 0 right for all ranks, and on any number of them?"""
    return getattr(loader, "global_cursor", False)


def _refuse_same_data_on_all_ranks(loader: Iterable[Any], world: World) -> None:
    if world.size == 1 or not isinstance(loader, DataLoader):
        return
    if isinstance(loader.dataset, IterableDataset):
        return
    inner = getattr(loader.batch_sampler, "sampler", None)
    samplers = [one for one in (loader.sampler, loader.batch_sampler, inner) if one is not None]
    if all(type(one).__module__ == "torch.utils.data.sampler" for one in samplers):
        raise UserError(
            f"prepare_dataloader('train') gave a torch DataLoader with a {type(loader.sampler).__name__}: each of the "
            f"{world.size} ranks would train on the same samples. Use mvp_engine.data.SampleLoader, or a "
            "DistributedSampler."
        )


def micro_batches_per_step(
    loader: Iterable[Any], global_batch_size: int, micro_batch_size: int, layout: Layout
) -> int:
    """Gradient accumulation: the micro-batches of this rank in one step.

    A loader of global batches, such as `SampleLoader`, divides them among the ranks itself, also unevenly. Of any other
    loader a micro-batch is taken to have `micro_batch_size` samples.
    """
    ranks = count(layout.data_size, "data-parallel rank")
    if getattr(loader, "global_batch_size", None) == global_batch_size:
        if global_batch_size < layout.data_size and not _has_global_cursor(loader):
            raise UserError(
                f"data.global_batch_size={global_batch_size} on {ranks}: each rank reads data of its own from "
                f"{type(loader).__name__}, so it needs a micro-batch in every step. Raise it, or lower --nproc."
            )
        return int(loader.accumulation)  # type: ignore[attr-defined]
    per_forward = micro_batch_size * layout.data_size
    if global_batch_size % per_forward:
        nearest = max(1, round(global_batch_size / per_forward)) * per_forward
        raise UserError(
            f"data.global_batch_size={global_batch_size} is not a multiple of data.micro_batch_size="
            f"{micro_batch_size} times {ranks} = {per_forward}, and "
            f"{type(loader).__name__} makes its micro-batches itself: set data.global_batch_size={nearest}, another "
            "data.micro_batch_size, or return self.sample_loader(...), which fits any number of ranks."
        )
    return global_batch_size // per_forward
