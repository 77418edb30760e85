"""The loader of packs from streams: micro-batches of one pack each, and a cursor that resumes bit-exactly.

The packs of rows that are read in order from shards, filled window by window.

A rank has a few lanes, and each lane its own units of the streams: whole shards in a shuffled order, and of some
shards every n-th row (`Stream.units`). A lane reads about a window of packs, shuffles and packs its rows, yields the
packs, and reads the next window meanwhile. The rows of the emptiest pack wait for the next window. The lanes take turns
in whichever worker they are, so the order of the packs does not depend on the number of workers.

The state of a lane says all about it, so any rank can continue it: a training that resumes on other ranks deals the
lanes of all old ranks out to the new ones, for the rest of the epoch. Each lane then finishes its window as it would
have; where lanes do not divide evenly, each is split in several from the next window on.

In an evaluation the ranks share the lanes: each reads the same rows and loads its own of their packs, so the packs do
not depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, default_convert, get_worker_info

from mvp_engine.data.batch import PackedBatch
from mvp_engine.data.loader import (
    KeepLastBatches,
    LoadedBatch,
    SlowRow,
    accumulation_steps,
    derived_seed,
    keep_rng_state,
    pinned,
    start_worker,
)
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.row_encoder import EncodedSequence, RowEncoder
from mvp_engine.kit.data.pack.packer import make_packs
from mvp_engine.kit.data.pack.packs import WorkerWatchdog, check_seconds
from mvp_engine.kit.data.read.bad_rows import BadRecord, BadRows, append_new
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.shards import ROW_BITS, ShardRow, Stream, Unit
from mvp_engine.process.watchdog import end_with_this_process

# The state of a lane. A position has an entry for each stream: [unit, row in its shard, where that begins, rows taken].
#   at: the position where its window begins; next: where it ends
#   left: the rows that the window before left over, as [stream, unit, row, where it begins]
#   window, packs: the number of the window, and how many of its packs were yielded
#   units: [stride, offset, first]: unit n of stream s is of the lane if n % stride == offset, or n < first[s];
#       all of these rules hold. The stride of the first one is the number of lanes of the epoch.
#   rows: [stream, unit, first, stride, offset]: the same for the rows of a unit that was split between lanes
Cursor = dict[str, Any]
Position = list[list[int]]

MAX_SPLIT = 4  # lanes after a split, as a multiple of those that a new epoch has
FORMAT = 2  # of the cursors


def start_lanes(lanes: int, rank: int, world_size: int, streams: int = 1) -> list[Cursor]:
    """The lanes of a rank at the start of an epoch: unit n is of lane n modulo all lanes of all ranks."""
    every = lanes * world_size
    return [
        _lane([[every, lane * world_size + rank, [0] * streams]], [], [[0] * 4] * streams)
        for lane in range(lanes)
    ]


def _lane(units: list[Any], rows: list[Any], at: Position) -> Cursor:
    return {
        "units": units,
        "rows": rows,
        "at": at,
        "next": at,
        "left": [],
        "window": 0,
        "packs": 0,
    }


def owns_unit(cursor: Cursor, stream: int, unit: int) -> bool:
    return all(
        unit < first[stream] or unit % stride == offset for stride, offset, first in cursor["units"]
    )


def owns_row(cursor: Cursor, stream: int, unit: int, row: int) -> bool:
    return all(
        row < first or row % stride == offset
        for which, number, first, stride, offset in cursor["rows"]
        if (which, number) == (stream, unit)
    )


def move_lanes(
    states: Sequence[dict[str, Any]], lanes: int, world_size: int, units: Sequence[Sequence[Unit]]
) -> list[list[Cursor]]:
    """The lanes of all ranks that saved, dealt out to `world_size` ranks in the order of their next turns.

    `states` has one entry for each data-parallel rank that saved; `lanes` is the number of lanes of a rank in a new
    epoch; `units` are those of each stream in this one.
    """
    in_turn: list[tuple[int, int, Cursor]] = []
    for rank, state in enumerate(states):
        for lane, cursor in enumerate(state["lanes"]):
            turn = (lane - state["turn"]) % len(state["lanes"])
            in_turn.append((turn, rank, cursor))
    in_turn.sort(key=lambda entry: entry[:2])
    cursors = [cursor for _, _, cursor in in_turn]
    ways = _ways(len(cursors), lanes, world_size)
    parts: list[Cursor] = []
    for index in range(ways):
        parts += [_split(cursor, ways, index, units) for cursor in cursors]
    return [parts[rank::world_size] for rank in range(world_size)]


def _ways(found: int, lanes: int, world_size: int) -> int:
    """In how many lanes to split each, so that all ranks have as many, or at least one."""
    even = math.lcm(found, world_size)
    if even <= MAX_SPLIT * lanes * world_size:
        return even // found
    return math.ceil(world_size / found)


def _split(cursor: Cursor, ways: int, index: int, units: Sequence[Sequence[Unit]]) -> Cursor:
    """One of the lanes that a lane is split in from its next window on; the first of them finishes the window.

    They divide the rest of the units that it is reading by rows, and the units after these.
    """
    if ways == 1:
        return cursor
    stride, offset, _ = cursor["units"][-1]
    following = [unit + 1 for unit, *_ in cursor["next"]]
    unit_rules = [*cursor["units"], [stride * ways, offset + index * stride, following]]
    row_rules = list(cursor["rows"])
    for stream, (unit, row, _, _) in enumerate(cursor["next"]):
        if unit < len(units[stream]):
            _, stride, offset = units[stream][unit]
            for which, number, _, by, rest in cursor["rows"]:
                if (which, number) == (stream, unit):
                    stride, offset = by, rest
            row_rules.append([stream, unit, row, stride * ways, offset + index * stride])
    if index == 0:
        return {**cursor, "units": unit_rules, "rows": row_rules}
    at = [[unit, row, place, 0] for unit, row, place, _ in cursor["next"]]
    return _lane(unit_rules, row_rules, at)


FULL_SHARE = 0.99  # a pack with at least this share of its budget does not wait for the next window


class StreamMixture(NamedTuple):
    """Several streams, and their weights in each lane."""

    streams: list[Stream]
    weights: list[float]


@dataclass
class _EncodedRow:
    key: list[int]  # its stream, unit, number in the shard, and where it begins
    sample: int
    where: str
    sides: list[EncodedSequence]
    tokens: int
    encoder: int
    after: Position  # of the lane, behind this row
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


@dataclass(eq=False, repr=False)
class StreamPackDataset(IterableDataset[Any]):
    """The packs of a rank from the cursors on, as `LaneOutput`; None for the turn of a lane that is at its end."""

    streams: StreamMixture
    row_encoder: RowEncoder
    _: KW_ONLY
    budget: int
    window: int
    lanes_per_epoch: int  # of this rank, in an epoch that starts on as many ranks
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    shuffle: bool = True
    shares_lanes: bool = (
        False  # all ranks have the same lanes, and each of them its own packs of these
    )

    def __post_init__(self) -> None:
        self.max_packs: float = math.inf  # of an epoch
        self.watchdog = WorkerWatchdog()
        self.set_cursors(0, self.first_cursors(), 0)

    def first_cursors(self) -> list[Cursor]:
        streams = len(self.streams.streams)
        if self.shares_lanes:
            return start_lanes(self.lanes_per_epoch, 0, 1, streams)
        return start_lanes(self.lanes_per_epoch, self.rank, self.world_size, streams)

    def units(self, lanes: int, epoch: int) -> list[list[Unit]]:
        """The units of each stream in an epoch that began with so many lanes on all ranks."""
        seed = (self.seed, epoch) if self.shuffle else None
        return [stream.units(lanes, seed) for stream in self.streams.streams]

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
        first, *_ = self.start["units"]
        self.units = dataset.units(first[0], dataset.epoch)
        self.offset = self.start["units"][-1][1]  # another one for each lane
        self.output = LaneOutput(lane, self.start)  # collects what happened since the last turn
        self.kept: list[_EncodedRow] = []  # left over by the window before
        self.ahead: list[_EncodedRow] = []  # read for the next window
        self.position: Position = [list(place) for place in self.start["at"]]
        self.rows = self._good_rows()

    def outputs(self) -> Iterator[LaneOutput]:
        at = self.start["at"]
        window = self.start["window"]
        skip = self.start["packs"]
        number = self.output.lane  # of the next pack: the lanes take turns
        self.kept = list(self._left_rows())
        self._read_ahead()
        while self.kept or self.ahead:
            left = [row.key for row in self.kept]
            cursor = {**self.start, "at": at, "left": left, "window": window}
            at = self.ahead[-1].after if self.ahead else at
            cursor["next"] = at
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

    def _left_rows(self) -> Iterator[_EncodedRow]:
        """Read the rows again that the window before the cursor left over."""
        for (stream, unit), group in groupby(self.start["left"], lambda key: key[:2]):
            keys = {number: place for _, _, number, place in group}
            first = min(keys)
            shard = self.dataset.streams.streams[stream].shards[self.units[stream][unit].shard]
            for row in shard.rows(first, keys[first], keys.__contains__):
                found = self._encode(stream, unit, row)
                if found is not None:
                    yield replace(found, waited=True)
                keys.pop(row.number)
                if not keys:
                    break
            if keys:
                raise UserError(
                    f"data: row {min(keys)} of {shard.name}, which waited for a pack, cannot be read again: restore "
                    "the file"
                )

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
        """The encoded rows of this lane, from the cursor's window on; bad rows are recorded in `output`.

        The next row comes from the stream that is furthest behind its weight.
        """
        weights = self.dataset.streams.weights
        taken = [place[3] for place in self.position]
        remaining = {index: self._stream_rows(index) for index in range(len(weights))}
        while remaining:
            index = min(remaining, key=lambda one: (taken[one] + 1) / weights[one])
            taken[index] += 1
            found = next(remaining[index], None)
            if found is None:
                del remaining[index]
                continue
            unit, row = found
            self.position[index] = [unit, row.number + 1, row.end, taken[index]]
            self.output.rows += 1
            encoded = self._encode(index, unit, row)
            if encoded is not None:
                yield encoded

    def _stream_rows(self, stream: int) -> Iterator[tuple[int, ShardRow]]:
        """The rows of a stream that are of this lane, and the unit of each."""
        shards = self.dataset.streams.streams[stream].shards
        first, number, place, _ = self.start["at"][stream]
        for unit in range(first, len(self.units[stream])):
            if not owns_unit(self.start, stream, unit):
                continue
            shard, stride, offset = self.units[stream][unit]
            rules = [rule[2:] for rule in self.start["rows"] if rule[:2] == [stream, unit]]
            owns = None
            if stride > 1 or rules:
                owns = partial(_owns, stride, offset, rules)
            begin = (number, place) if unit == first else (0, 0)
            for row in shards[shard].rows(begin[0], begin[1], owns):
                yield unit, row

    def _encode(self, stream: int, unit: int, row: ShardRow) -> _EncodedRow | None:
        """A row that is not bad."""
        self.dataset.watchdog.set_position(row.where)
        source = self.dataset.streams.streams[stream]
        try:
            sides = self.row_encoder.encode(row.read(), source.format, source.root)
            tokens = sum(side.num_positions for side in sides)
            if tokens > self.row_encoder.max_tokens:  # prepared for longer rows
                raise BadRow(
                    "overlong", f"{tokens} tokens; {self.row_encoder.max_tokens} are allowed"
                )
        except BadRow as bad:
            self._record_bad(bad, source.name, row.where)
            return None
        except Exception as error:
            error.add_note(f"while reading {row.where}")
            raise
        return _EncodedRow(
            key=[stream, unit, row.number, row.place],
            sample=(self.units[stream][unit].shard << ROW_BITS) + row.number,
            where=row.where,
            sides=sides,
            tokens=tokens,
            encoder=self.row_encoder.encoder_cost(sides),
            after=list(self.position),
        )

    def _record_bad(self, bad: BadRow, name: str, where: str) -> None:
        if bad.reason == "overlong" and self.row_encoder.overlong == "error":
            raise UserError(
                f"data: {where}: {bad.detail}: raise data.pack_tokens, or set data.overlong"
            ) from None
        records = self.output.dropped if bad.reason == "overlong" else self.output.bad
        records.append(BadRecord(name, where, bad.reason, bad.detail))

    def _pack_window(self, window: int) -> list[list[_EncodedRow]]:
        """Pack the rows read so far. The emptiest pack waits for the next window, if it is not full.

        A row waits only once, so it cannot starve.
        """
        rows = self.kept + self.ahead
        if self.dataset.shuffle:
            rows = [rows[i] for i in self._random("rows", window).permutation(len(rows))]
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
            emptiest_rows = sorted(packs.pop(emptiest), key=lambda row: row.key)
            self.kept = [replace(row, waited=True) for row in emptiest_rows]
        if self.dataset.shuffle:
            packs = [packs[i] for i in self._random("window", window).permutation(len(packs))]
        return packs

    def _random(self, what: str, window: int) -> np.random.Generator:
        data = self.dataset
        return np.random.default_rng(derived_seed(data.seed, what, data.epoch, self.offset, window))

    def _load_pack(self, pack: list[_EncodedRow], cursor: Cursor) -> LaneOutput:
        """Decode the media of a pack; the counts since the last turn go with it."""
        batches: list[PackedBatch] = []
        for row in pack:
            source = self.dataset.streams.streams[row.key[0]]
            self.dataset.watchdog.set_position(row.where)
            fields = {"source": row.key[0], "sample": row.sample}
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


def _owns(stride: int, offset: int, rules: list[list[int]], row: int) -> bool:
    return row % stride == offset and all(
        row < first or row % by == rest for first, by, rest in rules
    )


LOGGER = logging.getLogger("mvp_engine")


class StreamLoader:
    """This rank's micro-batches of one pack each. The cursor is the rank's own; those of all ranks can be moved to
    another number of them."""

    slow_row: SlowRow | None = None  # of the last micro-batch

    def __init__(
        self,
        dataset: StreamPackDataset,
        bad_rows: BadRows,
        *,
        global_batch_size: int | None = None,  # packs of one step on all ranks
        num_workers: int = 0,
        pin_memory: bool = False,
        stall_seconds: float = 300.0,
        overlong_file: Path | None = None,
    ) -> None:
        self.global_batch_size = global_batch_size or dataset.world_size
        self.accumulation = accumulation_steps(
            self.global_batch_size, 1, dataset.world_size, dataset.rank
        )
        self.dataset = dataset
        self.bad_rows = bad_rows
        self.overlong_file = overlong_file
        self.stall_seconds = stall_seconds
        self.pin_memory = pin_memory
        self.max_workers = num_workers
        self.rows = 0  # read since this loader was made
        self.dropped = 0  # of these, over-long
        # Rows and tokens of each stream that this rank was given, over resumes and epochs.
        self._seen = np.zeros((len(dataset.streams.streams), 2), np.int64)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._set_cursors(self.dataset.first_cursors(), 0)
        self.num_packs = 0  # of this epoch so far
        self.num_tokens = 0

    def _set_cursors(self, cursors: list[Cursor], turn: int) -> None:
        self.cursors = list(cursors)
        self.turn = turn
        self.dataset.set_cursors(self.epoch, cursors, turn)

    def limit_batches(self, micro_batches: int) -> None:
        """Read only the first so many packs of an epoch; of an evaluation counted over all ranks."""
        self.dataset.max_packs = micro_batches

    @property
    def num_workers(self) -> int:
        """The largest number of workers that divides the lanes."""
        workers = range(1, min(self.max_workers, self.dataset.lanes) + 1)
        return max((n for n in workers if self.dataset.lanes % n == 0), default=0)

    @property
    def fill_ratio(self) -> float:
        """Tokens of this epoch's packs so far, divided by the tokens that fit into them."""
        return self.num_tokens / max(1, self.num_packs * self.dataset.budget)

    def state_dict(self) -> dict[str, Any]:
        data = self.dataset
        return {
            "epoch": self.epoch,
            "turn": self.turn,
            "lanes": list(self.cursors),
            "of": self._fingerprint([data.seed, data.shuffle]),
            "rank": data.rank,
            "ranks": data.world_size,
            "given": self.num_packs,
            "tokens": self.num_tokens,
            "seen": self._seen.tolist(),
        }

    def seen(self) -> dict[str, dict[str, float]]:
        """Rows, tokens and whole passes of each stream that this rank was trained on, over resumes."""
        names = [stream.name for stream in self.dataset.streams.streams]
        return {
            name: {"rows": rows, "tokens": tokens, "epochs": self.epoch}
            for name, (rows, tokens) in zip(names, self._seen.tolist(), strict=True)
        }

    seen_of_rank = True  # other ranks have seen other rows

    def _note_seen(self, batch: PackedBatch) -> None:
        source = batch.sequence_fields["source"].numpy()
        rows = np.stack([source, batch.sequence_fields["sample"].numpy()])
        rows = np.unique(rows[:, rows[1] >= 0], axis=1)[0]  # both sides of a pair are one row
        counts = np.bincount(rows, minlength=len(self._seen))
        tokens = np.bincount(source, batch.host_lengths, len(self._seen))
        self._seen += np.stack([counts, tokens], axis=1).astype(np.int64)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where this rank was saved, on as many ranks."""
        self._check(state)
        if (state["rank"], state["ranks"]) != (self.dataset.rank, self.dataset.world_size):
            raise UserError(
                f"the position is of rank {state['rank']} of {state['ranks']}: load_rank_states takes those of all"
            )
        self.epoch = state["epoch"]
        self._set_cursors(state["lanes"], state["turn"])
        self.num_packs = state["given"]
        self.num_tokens = state["tokens"]
        self._seen = np.array(state["seen"], np.int64)

    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        """Continue the lanes of other ranks than these, from the states of all of them; no row comes twice or never.

        Ranks that share their data have the same state, which counts once.
        """
        by_rank = {state["rank"]: state for state in states}
        for state in by_rank.values():
            self._check(state)
        saved = [by_rank[rank] for rank in sorted(by_rank)]
        ranks = self.dataset.world_size
        first = next(lane["units"][0] for state in saved for lane in state["lanes"])
        units = self.dataset.units(first[0], saved[0]["epoch"])
        lanes = move_lanes(saved, self.dataset.lanes_per_epoch, ranks, units)
        self.epoch = saved[0]["epoch"]
        self._set_cursors(lanes[self.dataset.rank], 0)
        self.num_packs = sum(state["given"] for state in saved) // ranks
        self.num_tokens = sum(state["tokens"] for state in saved) // ranks
        # What ranks that are gone have seen counts for the first one.
        seen = np.array([state["seen"] for state in saved], np.int64).sum(0)
        self._seen = seen if self.dataset.rank == 0 else np.zeros_like(seen)

    def _check(self, state: dict[str, Any]) -> None:
        if state["of"] != self._fingerprint([self.dataset.seed, self.dataset.shuffle]):
            raise UserError(
                "the streams, the processor or the packing is not what the checkpoint was trained with, so its "
                "position in the streams is not valid here: restore them, set resume_data=restart, or start a new "
                "run (model.path)"
            )

    def __iter__(self) -> Iterator[PackedBatch]:
        if self.dataset.shares_lanes:
            self.set_epoch(self.epoch)  # each evaluation reads the same packs
        self._set_cursors(self.cursors, self.turn)
        outputs = self.dataset.watchdog.iterate(self._start, self.stall_seconds)
        for output, slow_row in pinned(outputs) if self.pin_memory else outputs:
            if output is None:
                continue
            self.slow_row = slow_row
            self._record(output)
            if output.batch is not None:
                self.num_packs += 1
                self.num_tokens += output.batch.num_tokens
                self._note_seen(output.batch)
                yield output.batch
        LOGGER.info(
            "streams: %d packs, %.1f%% full. Of %d rows read so far, over-long: %d; bad: %s",
            self.num_packs,
            100 * self.fill_ratio,
            self.rows,
            self.dropped,
            self.bad_rows,
        )

    def row_name(self, source: int, sample: int) -> str:
        """A row by the values of `source` and `sample` in `sequence_fields`: its shard and its number in it."""
        return self.dataset.streams.streams[source].row_name(sample)

    def _record(self, output: LaneOutput) -> None:
        self.cursors[output.lane] = output.cursor
        self.turn = (output.lane + 1) % self.dataset.lanes
        self.rows += output.rows
        self.dropped += len(output.dropped)
        if self.overlong_file is not None and output.dropped:
            append_new(self.overlong_file, output.dropped)
        # An estimate of the rows read by all ranks that share the list of bad rows: they take as many packs each.
        ranks = self.dataset.world_size if self.bad_rows.file else 1
        self.bad_rows.rows = self.rows * ranks
        if output.bad:
            self.bad_rows.found_in_training(output.bad)

    def end_report(self) -> str | None:
        return self.bad_rows.report()

    def _start(self) -> Iterator[LoadedBatch]:
        with keep_rng_state():
            loader = DataLoader(
                self.dataset,
                batch_size=None,
                num_workers=self.num_workers,
                timeout=check_seconds(self.stall_seconds) if self.num_workers else 0.0,
                collate_fn=KeepLastBatches(default_convert),
                worker_init_fn=partial(start_worker, end_with_this_process()),
            )
            return iter(loader)

    def _fingerprint(self, settings: list[Any]) -> str:
        """A hash of everything that the meaning of a cursor depends on."""
        data = self.dataset
        sizes = [FORMAT, data.budget, data.window, *settings]
        streams = [(one.name, one.format, one.fingerprint) for one in data.streams.streams]
        parts: list[Any] = [sizes, streams, data.streams.weights]
        parts += [data.row_encoder.overlong, data.row_encoder.max_tokens]
        text = repr(parts) + data.row_encoder.fingerprint
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
