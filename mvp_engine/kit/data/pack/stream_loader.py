"""The loader of packs from streams: micro-batches of one pack each, and a cursor that resumes bit-exactly.

The lanes of streams: which rows each of them reads, and how they move to another number of ranks.

A lane reads the rows n with n % stride == offset. The state of a lane says all about it, so any rank can continue it: a
training that resumes on other ranks deals the lanes of all old ranks out to the new ones, for the rest of the epoch.
Each lane then finishes its window as it would have; where lanes do not divide evenly, each is split in several from the
next window on.

The packs of rows that are read sequentially from streams, filled window by window.

A rank has a few lanes. Row n of the streams belongs to lane n modulo all lanes of all ranks, so each row comes once. A
lane reads about a window of packs, packs it, yields the packs, and reads the next window meanwhile. The rows of the
emptiest pack wait for the next window. The lanes take turns in whichever worker they are, so the order of the packs
does not depend on the number of workers. Positions of lanes are in `stream_lanes`.

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
from itertools import chain
from pathlib import Path
from typing import Any

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
from mvp_engine.kit.data.pack.packs import WorkerWatchdog, check_seconds
from mvp_engine.kit.data.pack.plan import make_packs
from mvp_engine.kit.data.read.bad_rows import BadRecord, BadRows, append_new
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.sources import StreamMixture
from mvp_engine.process.watchdog import end_with_this_process

# The position of a lane: the number of the first row of its window, the rows that the window before left over, the
# number of the window, how many of its packs were yielded, and the number of the first row after it. To resume, the
# lane reads that window again. `rules` say which rows are of the lane: (from row, stride, offset), each of them valid
# from its row on.
Cursor = dict[str, Any]
START: Cursor = {"first": 0, "left": [], "window": 0, "packs": 0, "next": 0}

MAX_SPLIT = 4  # lanes after a split, as a multiple of those that a new epoch has


def start_lanes(lanes: int, rank: int, world_size: int) -> list[Cursor]:
    """The lanes of a rank at the start of an epoch: row n of the streams is of lane n modulo all lanes of all ranks."""
    stride = lanes * world_size
    return [{**START, "rules": [[0, stride, lane * world_size + rank]]} for lane in range(lanes)]


def is_of_lane(cursor: Cursor, row: int) -> bool:
    rules = cursor["rules"]
    return all(row < first or row % stride == offset for first, stride, offset in rules)


def move_lanes(states: Sequence[dict[str, Any]], lanes: int, world_size: int) -> list[list[Cursor]]:
    """The lanes of all ranks that saved, dealt out to `world_size` ranks in the order of their next turns.

    `states` has one entry for each data-parallel rank that saved; `lanes` is the number of lanes of a rank in a new
    epoch.
    """
    in_turn: list[tuple[int, int, Cursor]] = []
    for rank, state in enumerate(states):
        for lane, cursor in enumerate(state["lanes"]):
            turn = (lane - state["turn"]) % len(state["lanes"])
            in_turn.append((turn, rank, cursor))
    in_turn.sort(key=lambda entry: entry[:2])
    cursors = [cursor for _, _, cursor in in_turn]
    ways = _ways(len(cursors), lanes, world_size)
    if any(cursor["next"] is None for cursor in cursors):
        ways = 1  # saved by an earlier version, and not read since
    parts: list[Cursor] = []
    for index in range(ways):
        parts += [_split(cursor, ways, index) for cursor in cursors]
    return [parts[rank::world_size] for rank in range(world_size)]


def _ways(found: int, lanes: int, world_size: int) -> int:
    """In how many lanes to split each, so that all ranks have as many, or at least one."""
    even = math.lcm(found, world_size)
    if even <= MAX_SPLIT * lanes * world_size:
        return even // found
    return math.ceil(world_size / found)


def _split(cursor: Cursor, ways: int, index: int) -> Cursor:
    """One of the lanes that a lane is split in from its next window on; the first of them finishes the window."""
    if ways == 1:
        return cursor
    first = cursor["next"]
    _, stride, offset = cursor["rules"][-1]
    rules = [*cursor["rules"], [first, stride * ways, offset + index * stride]]
    if index == 0:
        return {**cursor, "rules": rules}
    return {**START, "first": first, "next": first, "rules": rules}


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
                f"data: {where}: {bad.detail}: raise data.pack_tokens, or set data.overlong"
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
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where this rank was saved, on as many ranks."""
        if "ranks" not in state:
            state = self._of_earlier_version(state)
        self._check(state)
        if (state["rank"], state["ranks"]) != (self.dataset.rank, self.dataset.world_size):
            raise UserError(
                f"the position is of rank {state['rank']} of {state['ranks']}: load_rank_states takes those of all"
            )
        self.epoch = state["epoch"]
        self._set_cursors(state["lanes"], state["turn"])
        self.num_packs = state["given"]
        self.num_tokens = state["tokens"]

    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        """Continue the lanes of other ranks than these, from the states of all of them; no row comes twice or never.

        Ranks that share their data have the same state, which counts once.
        """
        by_rank = {state["rank"]: state for state in states}
        for state in by_rank.values():
            self._check(state)
        saved = [by_rank[rank] for rank in sorted(by_rank)]
        ranks = self.dataset.world_size
        lanes = move_lanes(saved, self.dataset.lanes_per_epoch, ranks)
        self.epoch = saved[0]["epoch"]
        self._set_cursors(lanes[self.dataset.rank], 0)
        self.num_packs = sum(state["given"] for state in saved) // ranks
        self.num_tokens = sum(state["tokens"] for state in saved) // ranks

    def _check(self, state: dict[str, Any]) -> None:
        if state["of"] != self._fingerprint([self.dataset.seed, self.dataset.shuffle]):
            raise UserError(
                "the streams, the processor or the packing is not what the checkpoint was trained with, so its "
                "position in the streams is not valid here: restore them, set resume_data=restart, or start a new "
                "run (model.path)"
            )

    def _of_earlier_version(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state without the rules of its lanes: it is valid on as many ranks with as many lanes only."""
        data = self.dataset
        sizes = [data.lanes_per_epoch, data.rank, data.world_size, data.seed, data.shuffle]
        if state["of"] != self._fingerprint(sizes):
            raise UserError(
                "the streams, the processor, the packing or the number of ranks is not what the checkpoint was trained "
                "with, so its position in the streams is not valid here: restore them, set resume_data=restart, or "
                "start a new run (model.path)"
            )
        lanes = []
        for first, cursor in zip(data.first_cursors(), state["lanes"], strict=True):
            is_new = cursor["window"] == 0 and cursor["packs"] == 0
            lanes.append({**first, "next": 0 if is_new else None, **cursor})
        own = {"rank": data.rank, "ranks": data.world_size}
        return {**state, **own, "lanes": lanes, "of": self._fingerprint([data.seed, data.shuffle])}

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
        """A row by the values of `source` and `sample` in `sequence_fields`: its stream and its number in it."""
        return f"{self.dataset.streams.streams[source].name}, row {sample}"

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
        sizes = [data.budget, data.window, *settings]
        streams = [(stream.name, stream.format) for stream in data.streams.streams]
        parts: list[Any] = [sizes, streams, data.streams.weights]
        parts += [data.row_encoder.overlong, data.row_encoder.max_tokens]
        text = repr(parts) + data.row_encoder.fingerprint
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
