"""The packs of rows that are read sequentially from streams, filled window by window.

A rank has a few lanes. Row n of the streams belongs to lane n modulo all lanes of all ranks, so each row comes once. A
lane reads about a window of packs, packs it, yields the packs, and reads the next window meanwhile. The rows of the
emptiest pack wait for the next window. The lanes take turns in whichever worker they are, so the order of the packs
does not depend on the number of workers. Positions of lanes are in `stream_lanes`.

In an evaluation the ranks share the lanes: each reads the same rows and loads its own of their packs, so the packs do
not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from mvp_engine.data.batch import PackedBatch
from mvp_engine.data.rng import derived_seed
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.row_encoder import RowEncoder
from mvp_engine.kit.data.encode.sequences import EncodedSequence
from mvp_engine.kit.data.pack.plan import make_packs
from mvp_engine.kit.data.pack.stream_lanes import Cursor, is_of_lane, start_lanes
from mvp_engine.kit.data.pack.worker_watchdog import WorkerWatchdog
from mvp_engine.kit.data.read.bad_rows import BadRecord
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.sources import StreamMixture

FULL_SHARE = 0.99  # a pack with at least this share of its budget does not wait for the next window


@dataclass
class _EncodedRow:
    number: int  # in the global order of the streams
    stream: int
    where: str
    sides: list[EncodedSequence]
    tokens: int
    encoder: int
    waited: bool = False  # left over by the window before


@dataclass
class LaneOutput:
    """What a lane yields in its turn: a pack, or only counts at its end."""

    lane: int
    cursor: Cursor
    batch: PackedBatch | None = None
    bad: list[BadRecord] = field(default_factory=list)
    rows: int = 0  # read since the lane's last turn
    dropped: list[BadRecord] = field(default_factory=list)  # of these, over-long

    def pin_memory(self) -> LaneOutput:
        return replace(self, batch=self.batch and self.batch.pin_memory())


class StreamPackDataset(IterableDataset[Any]):
    """The packs of a rank from the cursors on, as `LaneOutput`; None for the turn of a lane that is at its end."""

    def __init__(
        self,
        streams: StreamMixture,
        row_encoder: RowEncoder,
        *,
        budget: int,
        window: int,
        lanes: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        shares_lanes: bool = False,
    ) -> None:
        """`shares_lanes`: all ranks have the same lanes, and each of them its own packs of these."""
        self.streams = streams
        self.row_encoder = row_encoder
        self.budget = budget
        self.window = window
        self.lanes_per_epoch = lanes  # of this rank, in an epoch that starts on as many ranks
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.shares_lanes = shares_lanes
        self.max_packs: float = math.inf  # of an epoch
        self.watchdog = WorkerWatchdog()
        self.set_cursors(0, self.first_cursors(), 0)

    def first_cursors(self) -> list[Cursor]:
        if self.shares_lanes:
            return start_lanes(self.lanes_per_epoch, 0, 1)
        return start_lanes(self.lanes_per_epoch, self.rank, self.world_size)

    def is_own(self, number: int) -> bool:
        """Does this rank load the pack with this number?"""
        return not self.shares_lanes or number % self.world_size == self.rank

    def _has_packs(self, lane: int) -> bool:
        """Is any pack of the lane this rank's? Their numbers are lane, lane + lanes, lane + 2 * lanes, ..."""
        apart = math.gcd(self.lanes, self.world_size)
        return not self.shares_lanes or lane % apart == self.rank % apart

    @property
    def lanes(self) -> int:
        """The lanes of this rank in the current epoch; after a resume on other ranks, also none."""
        return len(self.cursors)

    def set_cursors(self, epoch: int, cursors: list[Cursor], turn: int) -> None:
        """Start the next iteration here; `turn` is the lane that comes first."""
        self.epoch = epoch
        self.cursors = list(cursors)
        self.turn = turn

    def __iter__(self) -> Iterator[LaneOutput | None]:
        """Iterate over the lanes of this worker. The number of workers must divide that of lanes."""
        info = get_worker_info()
        worker = info.id if info else 0
        num_workers = info.num_workers if info else 1
        in_turn = [(self.turn + k) % self.lanes for k in range(self.lanes)]
        lanes = in_turn[worker::num_workers]
        active = {lane: _Lane(self, lane).outputs() for lane in lanes if self._has_packs(lane)}
        while active:
            for lane in lanes:
                output = next(active[lane], None) if lane in active else None
                if output is None:
                    active.pop(lane, None)
                yield output


class _Lane:
    """Reads the rows of one lane, packs them window by window, and loads the packs."""

    def __init__(self, dataset: StreamPackDataset, lane: int) -> None:
        self.dataset = dataset
        self.row_encoder = dataset.row_encoder
        self.start = dataset.cursors[lane]
        self.offset = self.start["rules"][-1][-1]  # another one for each lane
        self.output = LaneOutput(lane, self.start)  # collects what happened since the last turn
        self.kept: list[_EncodedRow] = []  # left over by the window before
        self.ahead: list[_EncodedRow] = []  # read for the next window
        self.rows = self._good_rows()

    def outputs(self) -> Iterator[LaneOutput]:
        first = self.start["first"]
        window = self.start["window"]
        skip = self.start["packs"]
        number = self.output.lane  # of the next pack: the lanes take turns
        self._restore_kept(first)
        self._read_ahead()
        while self.kept or self.ahead:
            left = [row.number for row in self.kept]
            cursor = {"first": first, "left": left, "window": window, "rules": self.start["rules"]}
            if self.ahead:
                first = self.ahead[-1].number + 1
            cursor["next"] = first
            packs = self._pack_window(window)
            for done, pack in enumerate(packs, 1):
                if number >= self.dataset.max_packs:
                    return
                if done > skip and self.dataset.is_own(number):
                    yield self._load_pack(pack, {**cursor, "packs": done})
                number += self.dataset.lanes
                self._read_ahead(done / len(packs))
            self._read_ahead()
            self.output.cursor = {**cursor, "packs": len(packs)}
            window += 1
            skip = 0
        if self.output.rows:
            yield self.output

    def _restore_kept(self, first: int) -> None:
        """Read the rows that the window before the cursor left over."""
        for row in self.rows:
            if row.number >= first:
                self.rows = chain([row], self.rows)
                return
            self.kept.append(replace(row, waited=True))

    def _read_ahead(self, share: float = 1.0) -> None:
        """Read up to this share of the next window, which starts with the rows that were kept."""
        tokens = sum(row.tokens for row in chain(self.kept, self.ahead))
        while tokens < share * self.dataset.window * self.dataset.budget:
            row = next(self.rows, None)
            if row is None:
                return
            self.ahead.append(row)
            tokens += row.tokens

    def _good_rows(self) -> Iterator[_EncodedRow]:
        """The encoded rows of this lane, from the cursor's window on; bad rows are recorded in `output`."""
        left = set(self.start["left"])
        for number, (stream, where, read) in enumerate(self.dataset.streams.rows()):
            if not is_of_lane(self.start, number):
                continue
            if number < self.start["first"] and number not in left:
                continue
            self.dataset.watchdog.set_position(where)
            self.output.rows += 1
            source = self.dataset.streams.streams[stream]
            try:
                sides = self.row_encoder.encode(read(), source.format, source.root)
            except BadRow as bad:
                self._record_bad(bad, source.name, where)
                continue
            except Exception as error:
                error.add_note(f"while reading {where}")
                raise
            tokens = sum(side.num_positions for side in sides)
            encoder = self.row_encoder.encoder_cost(sides)
            yield _EncodedRow(number, stream, where, sides, tokens, encoder)

    def _record_bad(self, bad: BadRow, name: str, where: str) -> None:
        if bad.reason == "overlong" and self.row_encoder.overlong == "error":
            raise UserError(
                f"data: {where}: {bad.detail}: raise mllm.micro_batch_tokens, or set mllm.overlong"
            ) from None
        records = self.output.dropped if bad.reason == "overlong" else self.output.bad
        records.append(BadRecord(name, where, bad.reason, bad.detail))

    def _pack_window(self, window: int) -> list[list[_EncodedRow]]:
        """Pack the rows read so far. The emptiest pack waits for the next window, if it is not full.

        A row waits only once, so it cannot starve.
        """
        rows = self.kept + self.ahead
        tokens = np.array([row.tokens for row in rows], np.int64)
        encoder = np.array([row.encoder for row in rows], np.int64)
        packs = []
        for pack in make_packs(tokens, encoder, self.dataset.budget, len(rows)):
            packs.append([rows[i] for i in pack])
        self.ahead = []
        self.kept = []
        sizes = [sum(row.tokens for row in pack) for pack in packs]
        emptiest = min(range(len(packs)), key=sizes.__getitem__)
        waited = any(row.waited for row in packs[emptiest])
        if sizes[emptiest] < FULL_SHARE * self.dataset.budget and not waited:
            self.kept = [replace(row, waited=True) for row in packs.pop(emptiest)]
        if self.dataset.shuffle:
            seed = derived_seed(
                self.dataset.seed, "window", self.dataset.epoch, self.offset, window
            )
            packs = [packs[i] for i in np.random.default_rng(seed).permutation(len(packs))]
        return packs

    def _load_pack(self, pack: list[_EncodedRow], cursor: Cursor) -> LaneOutput:
        """Decode the media of a pack; the counts since the last turn go with it."""
        batches: list[PackedBatch] = []
        for row in pack:
            source = self.dataset.streams.streams[row.stream]
            self.dataset.watchdog.set_position(row.where)
            fields = {"source": row.stream, "sample": row.number}
            try:
                batches += self.row_encoder.load(row.sides, source.root, fields)
            except BadRow as error:
                self.output.bad.append(
                    BadRecord(source.name, row.where, error.reason, error.detail)
                )
            except Exception as error:
                error.add_note(f"while reading {row.where}")
                raise
        if not batches:
            batches = [self.row_encoder.empty_batch({"source": 0, "sample": -1})]
        batch = PackedBatch.concat(batches) if len(batches) > 1 else batches[0]
        loaded = replace(self.output, batch=batch, cursor=cursor)
        self.output.bad = []
        self.output.rows = 0
        self.output.dropped = []
        return loaded
