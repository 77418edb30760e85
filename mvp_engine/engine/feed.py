"""From a loader, whatever its kind, to the micro-batches of one step after another, with a cursor that resumes exactly.

A loader with `state_dict` and `load_state_dict` (such as `SampleLoader`) keeps its own cursor. Any other iterable is
put back by starting its epoch with the same random state and passing over what was already used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from mvp_engine.data import rng_state, set_rng_state
from mvp_engine.distributed import World
from mvp_engine.errors import UserError

LOGGER = logging.getLogger("mvp_engine")


class Feed:
    def __init__(self, loader: Iterable[Any], accumulation: int, world: World) -> None:
        _refuse_same_data_on_all_ranks(loader, world)
        self.loader, self.accumulation, self.world = loader, accumulation, world
        self.epoch = 0
        self.used = 0  # micro-batches of this rank since the epoch, or the loader's saved cursor, began
        self.steps = 0  # steps in this epoch
        self._waited = 0.0
        self._iterator: Iterator[Any] | None = None
        self._epoch_rng: dict[str, Any] | None = None
        self._keeps_cursor = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")

    @property
    def steps_per_epoch(self) -> int | None:
        if hasattr(self.loader, "steps_per_epoch"):
            return int(self.loader.steps_per_epoch)
        try:
            return -(-len(self.loader) // self.accumulation)  # type: ignore[arg-type]
        except TypeError:
            return None

    def take(self) -> list[Any]:
        """This rank's micro-batches of the next step. Empty when this rank has none left in this epoch."""
        started = time.perf_counter()
        if self._iterator is None:
            self._iterator = self._open()
        micro_batches = list(islice(self._iterator, self.accumulation))
        self._waited += time.perf_counter() - started
        return micro_batches

    def take_waited(self) -> float:
        """Seconds spent waiting for data since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def advance(self, micro_batches: int) -> None:
        """A step over so many micro-batches was made."""
        self.used += micro_batches
        self.steps += 1

    def next_epoch(self) -> None:
        if self.steps == 0:
            raise UserError(
                "the training loader gave no batch at all in a whole epoch: the dataset is empty, or everything in it "
                "was filtered out. Check what prepare_dataloader('train') returns."
            )
        self.epoch, self.used, self.steps, self._iterator = self.epoch + 1, 0, 0, None
        self._set_epoch()

    def place(self, micro_batches: int) -> dict[str, Any]:
        """Where in the data the step over the next `micro_batches` is."""
        return {"epoch": self.epoch, "micro_batches": [self.used, self.used + micro_batches]}

    def sample_ids(self, place: dict[str, Any]) -> list[Any] | None:
        """The samples at a place in the current epoch, if the loader can tell."""
        if not hasattr(self.loader, "sample_ids"):
            return None
        return list(self.loader.sample_ids(*place["micro_batches"]))

    def state_dict(self) -> dict[str, Any]:
        """The cursor that all ranks share."""
        own = self.loader.state_dict() if self._keeps_cursor else None  # type: ignore[attr-defined]
        return {"epoch": self.epoch, "steps": self.steps, "loader": own}

    def rank_state_dict(self) -> dict[str, Any]:
        """What only this rank has."""
        return {"used": self.used, "epoch_rng": self._epoch_rng}

    def load_state_dict(self, state: dict[str, Any], own: dict[str, Any] | None) -> None:
        """`own` is this rank's state, or None when the run goes on with another number of ranks."""
        self.epoch, self.steps = state["epoch"], state["steps"]
        self._set_epoch()
        if self._keeps_cursor:
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        elif own is None:
            raise UserError(
                f"{type(self.loader).__name__} has no state_dict, so it can only resume on the number of ranks that "
                "saved the checkpoint. Use mvp_engine.data.SampleLoader to change that number."
            )
        else:
            self.used = own["used"]
            self._iterator = self._open_again(own)

    def _open(self) -> Iterator[Any]:
        self._epoch_rng = None if self._keeps_cursor else rng_state()
        return iter(self.loader)

    def _open_again(self, own: dict[str, Any]) -> Iterator[Any] | None:
        if own["epoch_rng"] is None:
            return None
        self._epoch_rng = own["epoch_rng"]
        set_rng_state(own["epoch_rng"])
        LOGGER.info("the loader has no state_dict: passing over the %d micro-batches already used", self.used)
        iterator = iter(self.loader)
        for _ in islice(iterator, self.used):
            pass
        return iterator

    def _set_epoch(self) -> None:
        for owner in (self.loader, getattr(self.loader, "sampler", None), getattr(self.loader, "dataset", None)):
            if owner is not None and hasattr(owner, "set_epoch"):
                owner.set_epoch(self.epoch)
                return


def _refuse_same_data_on_all_ranks(loader: Iterable[Any], world: World) -> None:
    if world.size == 1 or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if type(loader.sampler).__module__ == "torch.utils.data.sampler" and not any(
        isinstance(s, DistributedSampler) for s in samplers
    ):
        raise UserError(
            f"prepare_dataloader('train') gave a torch DataLoader with a {type(loader.sampler).__name__}: each of the "
            f"{world.size} ranks would train on the same samples. Use mvp_engine.data.SampleLoader, or a "
            "DistributedSampler."
        )
