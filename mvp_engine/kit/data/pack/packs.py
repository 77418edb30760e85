"""The packs of a plan: a dataset that reads, tokenizes and decodes their rows in workers, and its loader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mvp_engine.data import SampleLoader, derived_seed
from mvp_engine.data.batch import PackedBatch
from mvp_engine.data.step_plan import MediaKinds
from mvp_engine.errors import UserError, count
from mvp_engine.kit.data.encode.row_encoder import RowEncoder
from mvp_engine.kit.data.encode.sequences import EncodedSequence
from mvp_engine.kit.data.pack.cost_cache import Costs
from mvp_engine.kit.data.pack.costs import MEDIA_BITS
from mvp_engine.kit.data.pack.mixture import Mixture
from mvp_engine.kit.data.pack.plan import Plan, make_packs, make_plan
from mvp_engine.kit.data.pack.worker_watchdog import (
    WorkerWatchdog,
    check_seconds,
    start_without_sigchld_handler,
)
from mvp_engine.kit.data.read.bad_rows import BadRecord, BadRows
from mvp_engine.kit.data.read.row_types import BadRow, RowFormat
from mvp_engine.kit.data.read.sources import Source

STALE_CACHE = "Were its media replaced? Then remove the cached costs (mllm.cache; by default ~/.cache/mvp_engine/data)"


class PackDataset(Dataset[Any]):
    """The packs of an epoch: item i is (PackedBatch, the rows that turned out bad and were left out)."""

    def __init__(
        self,
        mixture: Mixture,
        formats: Sequence[RowFormat | str | None],
        costs: list[Costs],
        row_encoder: RowEncoder,
        *,
        budget: int,
        packs_per_step: int,
        seed: int = 0,
        shuffle: bool = True,
        max_packs: int | None = None,
    ) -> None:
        """`max_packs`: so many packs drawn from all rows, the same ones with any seed."""
        self.mixture = mixture
        self.formats = formats
        self.costs = costs
        self.row_encoder = row_encoder
        self.budget = budget
        self.packs_per_step = packs_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.max_packs = max_packs
        self.watchdog = WorkerWatchdog()
        # The sample id of the first row of each source: ids count through all sources.
        self.first = np.cumsum([0, *(len(source) for source in mixture.sources)])
        self.epoch = -1
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self.plan = self.make_plan(epoch)

    def make_plan(self, epoch: int) -> Plan:
        generator = None
        if self._draws:
            generator = np.random.default_rng(derived_seed(self._plan_seed, "packs", epoch))
        return make_plan(
            *self._rows(epoch),
            budget=self.budget,
            packs_per_step=self.packs_per_step,
            shuffle=generator,
            max_packs=self.max_packs,
        )

    def epoch_size(self, epoch: int) -> int:
        """Packs of an epoch, without its plan: 3 s for a million rows."""
        if epoch == self.epoch:
            return len(self.plan)
        _, tokens, encoder = self._rows(epoch)
        return len(make_packs(tokens, encoder, self.budget)[: self.max_packs])

    def _rows(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The good rows of an epoch in their order: (source, row) pairs, tokens, encoder costs."""
        order = self.mixture.order(self._plan_seed, epoch, self._draws)
        sample_ids = self.first[order[:, 0]] + order[:, 1]
        tokens = np.concatenate([costs.tokens for costs in self.costs])[sample_ids]
        encoder = np.concatenate([costs.encoder for costs in self.costs])[sample_ids]
        good = tokens > 0
        return order[good], tokens[good], encoder[good]

    @property
    def _draws(self) -> bool:
        return self.shuffle or self.max_packs is not None

    @property
    def _plan_seed(self) -> int:
        """Trainings with other seeds are evaluated on the same rows."""
        return self.seed if self.max_packs is None else 0

    def __len__(self) -> int:
        return len(self.plan)

    def samples(self, packs: int | None = None) -> Tensor:
        """The sample ids in the first packs, sorted; None: in all of them."""
        end = None if packs is None or packs >= len(self) else int(self.plan.ends[packs - 1])
        rows = self.plan.rows[:end]
        return torch.from_numpy(np.unique(self.first[rows[:, 0]] + rows[:, 1]))

    def summary(self) -> str:
        """Rows, tokens, packs and steps of this epoch."""
        counts = self.mixture.counts
        sources = [f"{name}: {n:,}" for name, n in zip(self.mixture.names, counts, strict=True)]
        plan = self.plan
        return (
            f"{count(sum(counts), 'row')} an epoch ({', '.join(sources)}) -> {count(len(plan.rows), 'row')} with "
            f"{int(plan.tokens.sum()):,} tokens in {count(len(plan), 'pack')} of {plan.budget:,}, "
            f"{plan.fill_ratio:.1%} full; {count(plan.steps, 'step')} of {plan.packs_per_step}."
        )

    def media_kinds(self, index: int) -> frozenset[str]:
        """The kinds of media that pack `index` is planned to hold."""
        rows, _ = self.plan.pack(index)
        bits = 0
        for which, row in rows.tolist():
            bits |= int(self.costs[which].media[row])
        return self.row_encoder.media_names(kind for kind, bit in MEDIA_BITS.items() if bits & bit)

    def __getitem__(self, index: int) -> tuple[PackedBatch, list[BadRecord]]:
        rows, planned = self.plan.pack(index)
        free_tokens = self.budget - int(planned.sum())
        batches: list[PackedBatch] = []
        bad: list[BadRecord] = []
        for (which, row), planned_tokens in zip(rows.tolist(), planned.tolist(), strict=True):
            source = self.mixture.sources[which]
            fields = {"source": which, "sample": int(self.first[which]) + row}
            self.watchdog.set_position(source.where(row))
            try:
                sides, grown = self._prepare(source, which, row, planned_tokens, free_tokens)
                free_tokens -= grown
                batches += self.row_encoder.load(sides, source.root, fields)
            except BadRow as error:
                name = self.mixture.names[which]
                bad.append(BadRecord(name, source.where(row), error.reason, error.detail))
            except Exception as error:
                error.add_note(f"while reading {source.where(row)}")
                raise
        if not batches:
            batches = [self.row_encoder.empty_batch({"source": 0, "sample": -1})]
        return (PackedBatch.concat(batches) if len(batches) > 1 else batches[0]), bad

    def _prepare(
        self, source: Source, which: int, row: int, planned_tokens: int, free_tokens: int
    ) -> tuple[list[EncodedSequence], int]:
        """The encoded row, and how many tokens more it has than planned: at most `free_tokens`.

        A row may have other tokens than when it was measured, for example if its template writes today's date. But a
        pack never exceeds its budget.
        """
        raw, format = source[row], self.formats[which]
        sides = self.row_encoder.encode(raw, format, source.root, decode=True)
        tokens = sum(side.num_positions for side in sides)
        grown = max(0, tokens - planned_tokens)
        if grown > free_tokens:
            raise BadRow(
                "changed",
                f"{tokens} tokens, but {planned_tokens} when it was planned. {STALE_CACHE}",
            )
        return sides, grown


class PackLoader(SampleLoader):
    """A `SampleLoader` over packs: one PackedBatch per micro-batch, and a cursor that counts packs."""

    dataset: PackDataset

    def __init__(
        self,
        dataset: PackDataset,
        bad_rows: BadRows,
        data_id: str,
        stall_seconds: float = 300.0,
        **options: Any,
    ) -> None:
        self.bad_rows = bad_rows
        self.data_id = data_id
        self.stall_seconds = stall_seconds
        self._first: tuple[tuple[int, int], Iterator[Any]] | None = None
        super().__init__(
            dataset,
            micro_batch_size=1,
            global_batch_size=dataset.packs_per_step,
            seed=dataset.seed,
            shuffle=False,
            collate_fn=_single_item,
            timeout=check_seconds(stall_seconds),
            **options,
        )

    def __iter__(self) -> Iterator[PackedBatch]:
        for batch, bad in super().__iter__():
            self.bad_rows.found_in_training(bad)
            yield batch

    def end_report(self) -> str | None:
        """A line about bad rows for the end of a training; None if there are none."""
        return self.bad_rows.report()

    _media_known = True

    def _plans_steps(self) -> bool:
        return True

    def _media_kinds(self, places: range) -> MediaKinds:
        return frozenset().union(*(self.dataset.media_kinds(place) for place in places))

    def _num_samples(self, first: int, last: int) -> int:
        """Rows, not packs."""
        ends = self.dataset.plan.ends
        return sum(int(ends[place - 1]) * sign for place, sign in ((last, 1), (first, -1)) if place)

    @contextmanager
    def started(self) -> Iterator[None]:
        """A context that starts the workers at once, so that the first packs are ready when they are asked for."""
        if self._num_workers:
            self._first = self._place, start_without_sigchld_handler(super()._items)
        try:
            yield
        finally:
            self._first = None  # ends workers that nobody has taken

    @property
    def _place(self) -> tuple[int, int]:
        """Where the iteration starts."""
        return self.epoch, self.start

    def _items(self) -> Iterator[Any]:
        return self.dataset.watchdog.iterate(self._start, self.stall_seconds)

    def _start(self) -> Iterator[Any]:
        """New workers, or those that were started for this place."""
        first = self._first
        self._first = None
        return first[1] if first is not None and first[0] == self._place else super()._items()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "plan": self.plan_id()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["plan"] != self.plan_id():
            what = "the packing (pack and row size, global batch, mllm.limits, seed, processor) is"
            if not state["plan"].startswith(f"{self.data_id}-"):
                what = "the rows (files of the sources, hold_out) are"
            raise UserError(
                f"{what} not what the checkpoint was trained with, so its position in the epoch is not valid here: "
                "restore it (config.yaml of the run), or start a new run from its weights (model.path)"
            )

    def sample_ids(self, first: int, last: int) -> list[Any]:
        """Where the rows of this rank's micro-batches `first` to `last` (exclusive) come from."""
        found = []
        for index in super().sample_ids(first, last):
            rows, _ = self.dataset.plan.pack(index)
            for which, row in rows.tolist():
                found.append(self.dataset.mixture.sources[which].where(row))
        return found

    def row_name(self, source: int, sample: int) -> str:
        """Where a row comes from, for the values of `source` and `sample` in `sequence_fields`."""
        return self.dataset.mixture.sources[source].where(sample - int(self.dataset.first[source]))

    def plan_id(self) -> str:
        """A hash of the data and of the plan of this epoch."""
        return f"{self.data_id}-{self.dataset.plan.digest}"


def _single_item(items: list[Any]) -> Any:
    return items[0]
