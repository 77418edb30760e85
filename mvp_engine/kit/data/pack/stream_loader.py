"""Packs of rows that come one after the other: filled window by window, with a cursor that resumes to the bit.

A rank has a few lanes. Row n of the streams belongs to lane n modulo all lanes of all ranks, so each comes once. A lane
reads about a window of packs, fills them, gives them away, and reads the next window meanwhile; what the emptiest pack
holds waits for the next window. The lanes take turns, whichever worker has them, so the order does not depend on the
number of workers. A lane's cursor says where its window begins, which rows it was left, and how many of its packs are
given away: going on means reading that window once more.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, default_convert, get_worker_info

from mvp_engine.data.batch import PackedBatch
from mvp_engine.data.loader import pinned
from mvp_engine.data.rng import derived_seed, keep_rng_state
from mvp_engine.data.worker_memory import Kept, keep_memory
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.row_encoder import Prepared, Sampler
from mvp_engine.kit.data.pack.plan import make_packs
from mvp_engine.kit.data.pack.worker_watchdog import Watch
from mvp_engine.kit.data.read.bad_rows import BadRecord, BadRows
from mvp_engine.kit.data.read.rows import BadRow
from mvp_engine.kit.data.read.streams import Streams

LOGGER = logging.getLogger("mvp_engine")
FULL = 0.99  # of a pack, from which it waits for nothing
Cursor = dict[str, Any]
NEW: Cursor = {"first": 0, "left": [], "window": 0, "packs": 0}  # of a lane that has not begun


@dataclass
class _Item:
    number: int
    which: int
    where: str
    sides: list[Prepared]
    tokens: int
    encoder: int
    waited: bool = False  # left over by the window before


@dataclass
class Given:
    """What a lane gives in its turn."""

    lane: int
    cursor: Cursor
    batch: PackedBatch | None = None
    bad: list[BadRecord] = field(default_factory=list)
    rows: int = 0  # that were read since the lane's last turn
    dropped: int = 0  # of these, over-long

    def pin_memory(self) -> Given:
        return replace(self, batch=self.batch and self.batch.pin_memory())


class WindowedPacks(IterableDataset[Any]):
    """The packs of a rank from the cursors on; what is given is None for a lane that is at its end."""

    def __init__(
        self,
        streams: Streams,
        sampler: Sampler,
        *,
        budget: int,
        window: int,
        lanes: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.streams, self.sampler, self.budget, self.window, self.lanes = (
            streams,
            sampler,
            budget,
            window,
            lanes,
        )
        self.rank, self.world_size, self.seed, self.shuffle = rank, world_size, seed, shuffle
        self.watch = Watch()
        self.begin(0, [NEW] * lanes, 0)

    def begin(self, epoch: int, cursors: list[Cursor], turn: int) -> None:
        self.epoch, self.cursors, self.turn = epoch, list(cursors), turn

    def __iter__(self) -> Iterator[Given | None]:
        """The number of workers must divide that of lanes."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        mine = [(self.turn + k) % self.lanes for k in range(self.lanes)][worker::workers]
        left = {lane: self._lane(lane) for lane in mine}
        while left:
            for lane in mine:
                given = next(left[lane], None) if lane in left else None
                if given is None:
                    left.pop(lane, None)
                yield given

    def _lane(self, lane: int) -> Iterator[Given]:
        cursor = self.cursors[lane]
        given, first, kept, ahead = (
            Given(lane, cursor),
            cursor["first"],
            list[_Item](),
            list[_Item](),
        )
        items = self._items(lane, cursor, given)
        for item in items:
            if item.number >= first:
                items = chain([item], items)
                break
            kept.append(replace(item, waited=True))
        number, skip = cursor["window"], cursor["packs"]
        self._read(items, ahead, kept)
        while kept or ahead:
            cursor = {"first": first, "left": [item.number for item in kept], "window": number}
            first = ahead[-1].number + 1 if ahead else first
            packs, kept, ahead = *self._pack(kept + ahead, lane, number), []
            for done, pack in enumerate(packs, 1):
                if done > skip:
                    batch = self._load(pack, given.bad)
                    yield replace(
                        given, batch=batch, cursor={**cursor, "packs": done}, bad=list(given.bad)
                    )
                    given.bad.clear()
                    given.rows = given.dropped = 0
                self._read(items, ahead, kept, done / len(packs))
            self._read(items, ahead, kept)
            number, skip = number + 1, 0
            given.cursor = {**cursor, "packs": len(packs)}
        if given.rows:
            yield given

    def _read(
        self, items: Iterator[_Item], ahead: list[_Item], kept: list[_Item], share: float = 1.0
    ) -> None:
        """Up to this share of the next window, which begins with what was kept."""
        tokens = sum(item.tokens for item in chain(kept, ahead))
        while (
            tokens < share * self.window * self.budget and (item := next(items, None)) is not None
        ):
            ahead.append(item)
            tokens += item.tokens

    def _items(self, lane: int, cursor: Cursor, given: Given) -> Iterator[_Item]:
        """This lane's good rows, from the cursor's window on; of the others `given` is told."""
        every, left = self.lanes * self.world_size, set(cursor["left"])
        for number, (which, where, read) in enumerate(self.streams.rows()):
            if number % every != lane * self.world_size + self.rank:
                continue
            if number < cursor["first"] and number not in left:
                continue
            stream = self.streams.streams[which]
            self.watch.at(where)
            given.rows += 1
            try:
                sides = self.sampler.prepare(read(), stream.format, stream.root)
            except BadRow as bad:
                if bad.reason == "overlong" and self.sampler.overlong == "error":
                    raise UserError(
                        f"data: {where}: {bad.detail}: raise micro_batch_tokens, or set overlong"
                    ) from None
                if bad.reason == "overlong" and self.sampler.overlong == "drop":
                    given.dropped += 1
                else:
                    given.bad.append(BadRecord(stream.name, where, bad.reason, bad.detail))
                continue
            except Exception as error:
                error.add_note(f"while reading {where}")
                raise
            tokens = sum(len(side.ids) for side in sides)
            yield _Item(number, which, where, sides, tokens, self.sampler.encoder_cost(sides))

    def _pack(
        self, items: list[_Item], lane: int, number: int
    ) -> tuple[list[list[_Item]], list[_Item]]:
        """The packs of a window, and what is to wait for the next: once, and only if a pack would not be full."""
        tokens, encoder = np.array([(item.tokens, item.encoder) for item in items], np.int64).T
        packs = [
            [items[i] for i in pack]
            for pack in make_packs(tokens, encoder, self.budget, len(items))
        ]
        sizes = [sum(item.tokens for item in pack) for pack in packs]
        emptiest = min(range(len(packs)), key=sizes.__getitem__)
        waits = sizes[emptiest] < FULL * self.budget and not any(
            item.waited for item in packs[emptiest]
        )
        kept = [replace(item, waited=True) for item in packs.pop(emptiest)] if waits else []
        if self.shuffle:
            seed = derived_seed(
                self.seed, "window", self.epoch, lane * self.world_size + self.rank, number
            )
            packs = [packs[i] for i in np.random.default_rng(seed).permutation(len(packs))]
        return packs, kept

    def _load(self, pack: list[_Item], bad: list[BadRecord]) -> PackedBatch:
        batches = []
        for item in pack:
            stream = self.streams.streams[item.which]
            self.watch.at(item.where)
            try:
                batches += self.sampler.load(
                    item.sides, stream.root, {"source": item.which, "sample": item.number}
                )
            except BadRow as error:
                bad.append(BadRecord(stream.name, item.where, error.reason, error.detail))
            except Exception as error:
                error.add_note(f"while reading {item.where}")
                raise
        batches = batches or [self.sampler.nothing({"source": 0, "sample": -1})]
        return PackedBatch.concat(batches) if len(batches) > 1 else batches[0]


class StreamLoader:
    """This rank's micro-batches of one pack each. The cursor is this rank's own: resume on as many ranks."""

    def __init__(
        self,
        packs: WindowedPacks,
        bad_rows: BadRows,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        stall_seconds: float = 300.0,
    ) -> None:
        self.packs, self.bad_rows, self.stall_seconds = packs, bad_rows, stall_seconds
        workers = max((n for n in range(1, num_workers + 1) if packs.lanes % n == 0), default=0)
        self._make = lambda: DataLoader(
            packs,
            batch_size=None,
            num_workers=workers,
            timeout=stall_seconds if workers else 0.0,
            collate_fn=Kept(default_convert),
            worker_init_fn=keep_memory,
        )
        self._ready = pinned if pin_memory else iter
        self.rows = self.dropped = 0  # since this loader was made
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.cursors, self.turn = epoch, [NEW] * self.packs.lanes, 0
        self.given = self.tokens = 0

    @property
    def fill(self) -> float:
        """The share of this epoch's packs so far that holds tokens."""
        return self.tokens / max(1, self.given * self.packs.budget)

    def state_dict(self) -> dict[str, Any]:
        counts = {"given": self.given, "tokens": self.tokens}
        return {
            "epoch": self.epoch,
            "turn": self.turn,
            "lanes": list(self.cursors),
            "of": self._id(),
            **counts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["of"] != self._id():
            raise UserError(
                "the streams, the processor, the packing or the number of ranks is not what the checkpoint was trained "
                "with, so its place in the streams means nothing here: put them back, or start a new run (model.path)"
            )
        self.epoch, self.turn, self.cursors = state["epoch"], state["turn"], list(state["lanes"])
        self.given, self.tokens = state["given"], state["tokens"]

    def __iter__(self) -> Iterator[PackedBatch]:
        self.packs.begin(self.epoch, self.cursors, self.turn)
        self.cursors = list(self.cursors)
        for given in self._ready(self.packs.watch.items(self._begin, self.stall_seconds)):
            if given is None:
                continue
            self.cursors[given.lane], self.turn = given.cursor, (given.lane + 1) % self.packs.lanes
            self.rows, self.dropped = self.rows + given.rows, self.dropped + given.dropped
            ranks = self.packs.world_size if self.bad_rows.file else 1
            self.bad_rows.rows = self.rows * ranks  # about: all ranks take as many packs
            self.bad_rows.add(given.bad)
            if given.batch is not None:
                self.given, self.tokens = self.given + 1, self.tokens + given.batch.num_tokens
                yield given.batch
        LOGGER.info(
            "streams: %d packs, %.1f%% full. Of %d rows read so far, over-long: %d; bad: %s",
            *(self.given, 100 * self.fill, self.rows, self.dropped, self.bad_rows),
        )

    def _begin(self) -> Iterator[Given | None]:
        with keep_rng_state():
            return iter(self._make())

    def _id(self) -> str:
        packs = self.packs
        sizes = [
            packs.budget,
            packs.window,
            packs.lanes,
            packs.rank,
            packs.world_size,
            packs.seed,
            packs.shuffle,
        ]
        streams = [(stream.name, stream.format) for stream in packs.streams.streams]
        told = repr(
            [
                sizes,
                streams,
                packs.streams.weights,
                packs.sampler.overlong,
                packs.sampler.most_tokens,
            ]
        )
        return hashlib.blake2b(
            (told + packs.sampler.fingerprint).encode(), digest_size=8
        ).hexdigest()
