"""The loader of packs from streams: micro-batches of one pack each, and a cursor that resumes bit-exactly."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, default_convert

from mvp_engine.data.batch import PackedBatch
from mvp_engine.data.loader import accumulation_steps, pinned
from mvp_engine.data.rng import keep_rng_state
from mvp_engine.data.worker_memory import KeepLastBatches, LoadedBatch, SlowRow, start_worker
from mvp_engine.errors import UserError
from mvp_engine.kit.data.pack.stream_lanes import Cursor, move_lanes
from mvp_engine.kit.data.pack.stream_packs import LaneOutput, StreamPackDataset
from mvp_engine.kit.data.pack.worker_watchdog import check_seconds
from mvp_engine.kit.data.read.bad_rows import BadRows, append_new
from mvp_engine.process.watchdog import end_with_this_process

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
                "position in the streams is not valid here: restore them, or start a new run (model.path)"
            )

    def _of_earlier_version(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state without the rules of its lanes: it is valid on as many ranks with as many lanes only."""
        data = self.dataset
        sizes = [data.lanes_per_epoch, data.rank, data.world_size, data.seed, data.shuffle]
        if state["of"] != self._fingerprint(sizes):
            raise UserError(
                "the streams, the processor, the packing or the number of ranks is not what the checkpoint was trained "
                "with, so its position in the streams is not valid here: restore them, or start a new run (model.path)"
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
