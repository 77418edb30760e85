"""From a loader, whatever its kind, to the micro-batches of one step after another, with a cursor that resumes exactly.

A loader with `state_dict` and `load_state_dict` (such as `SampleLoader`) keeps its own cursor. Any other iterable is
put back by starting its epoch with the same random state and passing over what was already used.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from mvp_engine.data import rng_state, set_rng_state
from mvp_engine.distributed import World
from mvp_engine.errors import UserError


class Feed:
    def __init__(self, loader: Iterable[Any], accumulation: int, world: World) -> None:
        _refuse_same_data_on_all_ranks(loader, world)
        self.loader, self.accumulation, self.world = loader, accumulation, world
        self.epoch = 0
        self.used = (
            0  # micro-batches of this rank since the epoch, or the loader's saved cursor, began
        )
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

    def close(self) -> None:
        """End the loader's workers. Left to the garbage collector, which takes their queues away first, a DataLoader
        waits five seconds for each of them, in the middle of whatever the process does by then."""
        self._iterator = None

    def take_waited(self) -> float:
        """Seconds spent waiting for data since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def advance(self, micro_batches: int) -> dict[str, Any]:
        """A step over so many micro-batches begins; gives its place in the data."""
        place = {"epoch": self.epoch, "micro_batches": [self.used, self.used + micro_batches]}
        self.used += micro_batches
        self.steps += 1
        return place

    def next_epoch(self) -> None:
        if self.steps == 0:
            raise UserError(
                "the training loader gave no batch at all in a whole epoch: the dataset is empty, or everything in it "
                "was filtered out. Check what prepare_dataloader('train') returns."
            )
        self.epoch, self.used, self.steps, self._iterator, self._epoch_rng = (
            self.epoch + 1,
            0,
            0,
            None,
            None,
        )
        self._set_epoch()

    def sample_ids(self, place: dict[str, Any]) -> list[Any] | None:
        """The samples at a place in the current epoch, if the loader can tell."""
        if not hasattr(self.loader, "sample_ids"):
            return None
        return list(self.loader.sample_ids(*place["micro_batches"]))

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have in common."""
        return {"epoch": self.epoch, "steps": self.steps}

    def rank_state_dict(self) -> dict[str, Any]:
        """What each rank has for itself."""
        own = self.loader.state_dict() if self._keeps_cursor else None  # type: ignore[attr-defined]
        return {"used": self.used, "epoch_rng": self._epoch_rng, "loader": own}

    def load_state_dict(self, state: dict[str, Any], of_ranks: list[dict[str, Any]]) -> None:
        """`of_ranks` has an entry for each rank that saved."""
        self.epoch, self.steps = state["epoch"], state["steps"]
        self._set_epoch()
        same_ranks = len(of_ranks) == self.world.size
        if not same_ranks and not getattr(self.loader, "global_cursor", False):
            raise UserError(
                f"the cursor of {type(self.loader).__name__} is each rank's own, so it can only go on with the "
                f"{len(of_ranks)} rank(s) that saved the checkpoint. Use mvp_engine.data.SampleLoader to change that."
            )
        own = of_ranks[self.world.rank if same_ranks else 0]
        if self._keeps_cursor:
            self.loader.load_state_dict(own["loader"])  # type: ignore[attr-defined]
        elif own["epoch_rng"] is not None:
            self.used = own["used"]
            self._iterator = self._open_again(own["epoch_rng"])

    def _open(self) -> Iterator[Any]:
        if not self._keeps_cursor:
            generators = [generator.get_state() for generator in self._generators()]
            self._epoch_rng = {"process": rng_state(), "generators": generators}
        return iter(self.loader)

    def _open_again(self, epoch_rng: dict[str, Any]) -> Iterator[Any]:
        """Begin the epoch as it was begun, and pass over what was used."""
        self._epoch_rng = epoch_rng
        set_rng_state(epoch_rng["process"])
        for generator, state in zip(self._generators(), epoch_rng["generators"], strict=True):
            generator.set_state(state)
        iterator = iter(self.loader)
        for _ in islice(iterator, self.used):
            pass
        return iterator

    def _parts(self) -> list[Any]:
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        parts = [self.loader, getattr(self.loader, "sampler", None), batch_sampler]
        return [
            *parts,
            getattr(batch_sampler, "sampler", None),
            getattr(self.loader, "dataset", None),
        ]

    def _generators(self) -> list[torch.Generator]:
        """The random generators that the loader has for itself."""
        found = [getattr(part, "generator", None) for part in self._parts()]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _set_epoch(self) -> None:
        for part in {id(part): part for part in self._parts()}.values():
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)


def _refuse_same_data_on_all_ranks(loader: Iterable[Any], world: World) -> None:
    if (
        world.size == 1
        or not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
    ):
        return
    samplers = [
        loader.sampler,
        loader.batch_sampler,
        getattr(loader.batch_sampler, "sampler", None),
    ]
    plain = [
        s for s in samplers if s is not None and type(s).__module__ == "torch.utils.data.sampler"
    ]
    if len(plain) == len([s for s in samplers if s is not None]):
        raise UserError(
            f"prepare_dataloader('train') gave a torch DataLoader with a {type(loader.sampler).__name__}: each of the "
            f"{world.size} ranks would train on the same samples. Use mvp_engine.data.SampleLoader, or a "
            "DistributedSampler."
        )
