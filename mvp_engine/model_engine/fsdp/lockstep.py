"""The same passes on all ranks, whatever their data: sharded ranks gather parameters from each other in every one.

A rank with fewer micro-batches than another repeats one that does not count. A rank whose micro-batch lacks a kind of
media that another's has runs a small sample with such media beside it, whose outputs are dropped, so that every rank
calls every encoder as often as the others. What is repeated or run along comes from the data itself, if need be from
another rank's: it suits every model, and nobody has to say which encoders there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.distributed import World

Pass = tuple[Any, bool]  # a micro-batch, and whether it counts


class Passes:
    def __init__(self, world: World) -> None:
        self.world = world
        self._filler: Any = (
            None  # the last micro-batch of the call under way, or one that was lent for it
        )
        self._samples: dict[
            str, PackedBatch
        ] = {}  # one for each kind of media; the same on all ranks

    def through(self, micro_batches: Iterable[Any]) -> Iterator[Pass]:
        """One pass after the other, until no rank has a micro-batch left."""
        self._filler = None
        for micro_batch in micro_batches:
            yield from self._round([micro_batch])
        while passes := self._round([]):
            yield from passes

    def together(self, micro_batches: list[Any]) -> list[Pass]:
        """As many passes as the rank with most micro-batches needs. All ranks ask at the same time.

        What does not count is a micro-batch of this very call, if need be another rank's: an older one may be of
        another kind, with other fields, and the caller's step would stumble over it on this rank alone.
        """
        self._filler = None
        return self._round(micro_batches)

    def _round(self, micro_batches: list[Any]) -> list[Pass]:
        self._filler = micro_batches[-1] if micro_batches else self._filler
        spare = None if self._filler is None else _kinds(self._filler)
        said = self.world.all_gather(
            ([_kinds(micro_batch) for micro_batch in micro_batches], spare)
        )
        most = max(len(kinds) for kinds, _ in said)
        if most == 0:
            return []
        lender, lent = next(
            (rank, spare) for rank, (_, spare) in enumerate(said) if spare is not None
        )
        if any(spare is None for _, spare in said):
            filler = self.world.broadcast(
                self._filler if self.world.rank == lender else None, lender
            )
            self._filler = filler if self._filler is None else self._filler
        passes = [(micro_batch, True) for micro_batch in micro_batches]
        passes += [(self._filler, False)] * (most - len(passes))
        of_ranks = [
            kinds + [lent if spare is None else spare] * (most - len(kinds))
            for kinds, spare in said
        ]
        if not any(kinds for of_rank in of_ranks for kinds in of_rank):
            return passes
        self._agree_on_samples(
            [batch for batch, _ in passes], set().union(*(k for of in of_ranks for k in of))
        )
        needed = [self._needed(list(kinds)) for kinds in zip(*of_ranks, strict=True)]
        return [
            (self._completed(batch, kinds), counts)
            for (batch, counts), kinds in zip(passes, needed, strict=True)
        ]

    def _agree_on_samples(self, batches: list[Any], kinds: set[str]) -> None:
        """A sample for each kind that was not seen before: the smallest that any rank has now."""
        new = sorted(kinds - set(self._samples))
        if not new:
            return
        offers = self.world.all_gather({kind: _smallest(batches, kind) for kind in new})
        for kind in new:
            found = [offer[kind] for offer in offers if offer[kind] is not None]
            self._samples[kind] = min(found, key=lambda sample, kind=kind: _size(sample, kind))  # type: ignore[misc]

    def _needed(self, of_ranks: list[set[str]]) -> set[str]:
        """The kinds that all ranks run in a pass: those that one has, and those that come with a sample of such."""
        needed: set[str] = set().union(*of_ranks)
        while (
            more := {
                other
                for kind in needed
                if any(kind not in kinds for kinds in of_ranks)
                for other in _kinds(self._samples[kind])
            }
            - needed
        ):
            needed |= more
        return needed

    def _completed(self, micro_batch: Any, kinds: set[str]) -> Any:
        beside: list[PackedBatch] = []
        for kind in sorted(kinds - _kinds(micro_batch)):
            if not any(kind in _kinds(sample) for sample in beside):  # one sample may have several
                beside.append(self._samples[kind])
        return dataclasses.replace(micro_batch, beside=beside) if beside else micro_batch


def _smallest(batches: list[Any], kind: str) -> PackedBatch | None:
    """The smallest sequence with such media, with nothing to learn."""
    found = [
        batch.select([int(owner)])
        for batch in batches
        if kind in _kinds(batch)
        for owner in batch.media[kind].sequence_ids.unique()
    ]
    if not found:
        return None
    sample = min(found, key=lambda sample: _size(sample, kind))
    return dataclasses.replace(sample, labels=torch.full_like(sample.labels, IGNORE))


def _size(sample: PackedBatch, kind: str) -> tuple[int, int]:
    return len(_kinds(sample)), int(sample.media[kind].row_counts.sum())


def _kinds(micro_batch: Any) -> set[str]:
    if not isinstance(micro_batch, PackedBatch):
        return set()
    return {kind for kind, media in micro_batch.media.items() if len(media.row_counts)}
