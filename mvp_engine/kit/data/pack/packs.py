"""The packs of a plan: a dataset that reads, tokenizes and decodes their rows in workers, and its loader.

A watchdog for DataLoader workers: an error names the row at which a worker died or hangs.

torch reports the death of a worker without what it was reading, and waits forever for one that hangs.
"""

from __future__ import annotations

import hashlib
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass
from functools import partial
from multiprocessing.connection import wait
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from mvp_engine.data import SampleLoader, derived_seed
from mvp_engine.data.batch import PackedBatch
from mvp_engine.data.loader import ROW_TIMER, MediaKinds
from mvp_engine.errors import UserError, count
from mvp_engine.kit.data.encode.row_encoder import RowEncoder
from mvp_engine.kit.data.pack.costs import MEDIA_BITS, Costs, locked
from mvp_engine.kit.data.pack.packer import WINDOW_PACKS, packed_rows
from mvp_engine.kit.data.pack.plan import (
    LARGE_ROWS,
    PACED_WINDOW,
    Mixture,
    Origin,
    PacedMixture,
    Plan,
    make_plan,
    paced,
)
from mvp_engine.kit.data.read.bad_rows import BadRecord, BadRows
from mvp_engine.kit.data.read.row_types import BadRow, RowFormat

MAX_WORKERS = 256
MAX_POSITION_BYTES = 256
CHECK_SECONDS = 5.0


def check_seconds(stall_seconds: float) -> float:
    """The timeout of a DataLoader: only after it does torch look whether its workers are alive."""
    return min(CHECK_SECONDS, stall_seconds)


class WorkerWatchdog:
    """The current row of each worker, in shared memory: workers write it, the main process reads it."""

    def __init__(self) -> None:
        shape = (MAX_WORKERS, MAX_POSITION_BYTES)
        self.positions_WB = torch.zeros(shape, dtype=torch.uint8).share_memory_()

    def set_position(self, where: str) -> None:
        """Record that this process starts to read the row at `where`, and when; the main process reads the places."""
        ROW_TIMER.begin(where)
        info = get_worker_info()
        if info is None:
            return
        text = where.encode()[:MAX_POSITION_BYTES].ljust(MAX_POSITION_BYTES, b"\0")
        self.positions_WB[info.id % MAX_WORKERS] = torch.frombuffer(
            bytearray(text), dtype=torch.uint8
        )

    def positions(self) -> list[str]:
        found = []
        for worker, row in enumerate(self.positions_WB):
            text = bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
            if text:
                found.append(f"worker {worker} at {text}")
        return found

    def iterate(self, start: Callable[[], Iterator[Any]], seconds: float) -> Iterator[Any]:
        """The items of a DataLoader that has a timeout of `check_seconds`.

        Timeouts are an error only if no worker moved to another row for twice as many seconds as given.
        """
        self.positions_WB.zero_()
        iterator: Any = None
        last_positions = None
        moved = 0.0
        while True:
            try:
                if iterator is None:
                    iterator = start_without_sigchld_handler(start)
                    end_all_after_the_first(iterator)
                item = next(iterator)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                positions, death = self._inspect(iterator, error)
                where = "; ".join(positions) or "none at a row yet"
                if death:
                    raise UserError(
                        f"data: {death} What was being read: {where}. Out of memory? Then set data.num_workers lower; "
                        "or look at the row with mvp data inspect --row"
                    ) from error
                if not str(error).startswith("DataLoader timed out"):
                    raise
                if positions != last_positions:
                    last_positions, moved = positions, time.monotonic()
                elif time.monotonic() - moved >= 2 * seconds:
                    raise UserError(
                        f"data: nothing came from the workers for {2 * seconds:g} seconds, and they did not get any "
                        f"further: {where}. Take the row out, or raise data.limits.timeout"
                    ) from error
                continue
            last_positions = None
            yield item

    def _inspect(self, iterator: Any, error: Exception) -> tuple[list[str], str | None]:
        """Where the workers are, and the death of a worker if that is what the error is about."""
        try:
            return self.positions(), _worker_death(iterator, error)
        except RuntimeError as later:
            # torch's signal handler raises in whatever runs when it hears of a death, here too.
            return self.positions(), _worker_death(iterator, later)


def _worker_death(iterator: Any, error: Exception) -> str | None:
    """A description of the dead worker; None if the error has another cause.

    torch's own error describes it, except when the main process was fetching what the worker had ready: that is an
    OSError or EOFError.
    """
    if re.match(r"DataLoader worker \(pid", str(error)):
        return f"{str(error).rstrip(' .')}."
    if isinstance(error, RuntimeError):
        return None
    workers = {worker.sentinel: worker for worker in getattr(iterator, "_workers", ())}
    dead = wait(workers, timeout=1.0)
    if not dead:
        return None
    worker = workers[dead[0]]
    return f"DataLoader worker (pid {worker.pid}) is gone, exit code {worker.exitcode}."


def end_all_after_the_first(iterator: Any) -> None:
    """Start a thread that ends all workers some time after one of them has died, if torch has not reported it.

    A worker that is killed while it writes leaves half of a message. The reader waits for the rest
    until no process has the pipe open for writing: neither the other workers nor this one.
    """
    workers = {worker.sentinel: worker for worker in getattr(iterator, "_workers", ())}
    if not workers:
        return
    results = iterator._worker_result_queue

    def watch() -> None:
        first = workers[wait(workers)[0]]
        first.join()  # its exit code may follow a moment later
        if first.exitcode == 0:  # the end of an epoch
            return
        time.sleep(2 * CHECK_SECONDS)
        for worker in workers.values():
            worker.kill()
        results._writer.close()

    threading.Thread(target=watch, name="mvp-workers", daemon=True).start()


def start_without_sigchld_handler(start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Start the workers, but keep the process's own SIGCHLD handler.

    torch installs one that raises in the middle of whatever the main process is doing.
    """
    if threading.current_thread() is not threading.main_thread():
        return start()
    handler = signal.getsignal(signal.SIGCHLD)
    iterator = start()
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)
    return iterator


LOGGER = logging.getLogger("mvp_engine")
STALE_CACHE = "Were its media replaced? Then remove the cached costs (data.cache; by default ~/.cache/mvp_engine/data)"


@dataclass(eq=False, repr=False)
class PackDataset(Dataset[Any]):
    """The packs of an epoch: item i is (PackedBatch, the rows that turned out bad and were left out)."""

    mixture: Mixture
    formats: Sequence[RowFormat | str | None]
    costs: list[Costs]
    row_encoder: RowEncoder
    _: KW_ONLY
    budget: int
    packs_per_step: int
    seed: int = 0
    shuffle: bool = True
    max_packs: int | None = None  # so many packs drawn from all rows, the same ones with any seed
    cache: Path | None = None  # where plans of many rows are stored

    def __post_init__(self) -> None:
        self.watchdog = WorkerWatchdog()
        self.first = self.mixture.first
        self.epoch = -1
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self.plan = self.make_plan(epoch)

    def make_plan(self, epoch: int) -> Plan:
        """The plan of an epoch. One of many rows is made by one process; the others map its file."""
        file = self._plan_file(epoch)
        if file is None:
            return self._make_plan(epoch)
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_suffix(".lock"), f"the plan of epoch {epoch}", "plans the same rows"):
            if not file.exists():
                LOGGER.info(
                    "planning epoch %d: %s rows; kept in %s", epoch, len(self.mixture), file
                )
                self._make_plan(epoch).write(file)
                if epoch > 2:  # the first one is that of each start
                    (file.parent / f"{file.name.partition('.')[0]}.{epoch - 2}.plan").unlink(True)
        plan = Plan.read(file)
        self._count_rows(plan)
        return plan

    def _plan_file(self, epoch: int) -> Path | None:
        versions = [cost.version for cost in self.costs]
        has_own_order = type(self).order is not PackDataset.order
        few = len(self.mixture) < LARGE_ROWS
        if few or self.cache is None or not all(versions) or has_own_order:
            return None
        encoder = self.row_encoder
        parts = [versions, self.mixture.key, encoder.max_tokens, encoder.overlong, self.budget]
        parts += [self.packs_per_step, self._plan_seed, self._draws, self.max_packs, self._window]
        key = hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
        return self.cache / f"{key}.{epoch}.plan"

    def _make_plan(self, epoch: int) -> Plan:
        generator = None
        if self._draws:
            generator = np.random.default_rng(derived_seed(self._plan_seed, "packs", epoch))
        samples, places = self._rows(epoch)
        tokens = self._of_rows("tokens", samples)
        good = tokens > 0
        if not good.all():
            samples, tokens = samples[good], tokens[good]
            places = None if places is None else places[good]
        arrange = None
        if isinstance(self.mixture, PacedMixture) and generator is not None:
            sizes = len(self.mixture.names), self.budget
            source = np.searchsorted(self.first, samples, side="right") - 1
            arrange = partial(paced, source=source, tokens=tokens, sizes=sizes, random=generator)
        plan = make_plan(
            samples,
            tokens,
            self._of_rows("encoder", samples),
            first=self.first,
            media=self._of_rows("media", samples),
            places=places,
            budget=self.budget,
            packs_per_step=self.packs_per_step,
            shuffle=generator,
            max_packs=self.max_packs,
            window=self._window,
            arrange=arrange,
        )
        self._count_rows(plan)
        return plan

    def _count_rows(self, plan: Plan) -> None:
        if isinstance(self.mixture, PacedMixture):
            self.mixture.counts = plan.seen(len(plan))[:, 0].tolist()

    @property
    def _window(self) -> int:
        return PACED_WINDOW if isinstance(self.mixture, PacedMixture) else WINDOW_PACKS

    def epoch_size(self, epoch: int) -> int:
        """Packs of an epoch; of few rows, without its plan."""
        if epoch == self.epoch:
            return len(self.plan)
        if self._plan_file(epoch) is not None:
            return len(self.make_plan(epoch))
        samples, _ = self._rows(epoch)
        tokens = self._of_rows("tokens", samples)
        good = tokens > 0
        encoder = self._of_rows("encoder", samples[good])
        _, ends = packed_rows(tokens[good], encoder, self.budget, self._window)
        return len(ends[: self.max_packs])

    def seen(self, packs: int) -> np.ndarray:
        """Rows and tokens of each source in the first packs of this epoch: (sources, 2)."""
        return self.plan.seen(packs)

    def origin_after(self, packs: int) -> Origin:
        """Where another mixture continues after the first packs of this epoch: no row comes twice or never."""
        mixture = self.mixture
        assert isinstance(mixture, PacedMixture)
        assert self.plan.places is not None
        begin = mixture.origin
        end = self.plan.rows_of(0, packs).stop
        source = np.searchsorted(self.first, self.plan.samples, side="right") - 1
        by_tokens = mixture.mixing.by == "tokens"
        used = int(self.plan.tokens[:end].sum()) if by_tokens else end
        units = begin.units + (self.epoch - begin.epoch) * mixture.epoch_units + used
        following, left = {}, {}
        for index, name in enumerate(mixture.names):
            of_source = source == index
            places = self.plan.places[of_source]
            is_used = np.flatnonzero(of_source) < end
            start = mixture.place_at(index, self._plan_seed if self._draws else None, self.epoch)
            next_place = max([start, *(places[is_used] + 1).tolist()])
            following[name] = next_place
            late = places[~is_used]
            left[name] = sorted(late[late < next_place].tolist())
        return Origin(self.epoch, units, following, left)

    def begin_at(self, origin: Origin) -> None:
        """Continue with this mixture where another one ended, from the next call of `set_epoch` on."""
        assert isinstance(self.mixture, PacedMixture)
        self.mixture.origin = origin
        self.epoch = -1

    def order(self, epoch: int) -> np.ndarray:
        """The (source, row) pairs of an epoch in their order, a function of the seed and the epoch alone.

        A curriculum overrides it (docs/changes.md).
        """
        return self.mixture.order(self._plan_seed, epoch, self._draws)

    def _rows(self, epoch: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The rows of an epoch in their order, also bad ones: sample ids, and places in a `PacedMixture`."""
        if type(self).order is PackDataset.order and not isinstance(self.mixture, PacedMixture):
            return self.mixture.samples(self._plan_seed, epoch, self._draws), None
        order = self.order(epoch)
        places = order[:, 2] if order.shape[1] > 2 else None
        return self.first[order[:, 0]] + order[:, 1], places

    def _of_rows(self, name: str, samples: np.ndarray) -> np.ndarray:
        """A cost of rows."""
        columns = [getattr(costs, name) for costs in self.costs]
        return (np.concatenate(columns) if len(columns) > 1 else np.asarray(columns[0]))[samples]

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
        part = self.plan.rows_of(0, len(self) if packs is None else min(packs, len(self)))
        return torch.from_numpy(np.unique(self.plan.samples[part].astype(np.int64)))

    def summary(self) -> str:
        """Rows, tokens, packs and steps of this epoch."""
        counts = self.mixture.counts
        sources = [f"{name}: {n:,}" for name, n in zip(self.mixture.names, counts, strict=True)]
        plan = self.plan
        return (
            f"{count(sum(counts), 'row')} an epoch ({', '.join(sources)}) -> {count(plan.num_rows, 'row')} with "
            f"{plan.num_tokens:,} tokens in {count(len(plan), 'pack')} of {plan.budget:,}, "
            f"{plan.fill_ratio:.1%} full; {count(plan.steps, 'step')} of {plan.packs_per_step}."
        )

    def media_kinds(self, index: int) -> frozenset[str]:
        """The kinds of media that pack `index` is planned to hold."""
        bits = 0 if self.plan.media is None else int(self.plan.media[index])
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
                raw, format = source[row], self.formats[which]
                sides = self.row_encoder.encode(raw, format, source.root, decode=True)
                tokens = sum(side.num_positions for side in sides)
                # A row may have other tokens than when it was measured, for example if its template writes today's
                # date. But a pack never exceeds its budget.
                grown = max(0, tokens - planned_tokens)
                if grown > free_tokens:
                    raise BadRow(
                        "changed",
                        f"{tokens} tokens, but {planned_tokens} when it was planned. {STALE_CACHE}",
                    )
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
        # Rows and tokens of each source, in the epochs before this one.
        self._seen_before = np.zeros((len(dataset.mixture.names), 2), np.int64)
        self._changes: list[dict[str, Any]] = []  # of the mixture, in mid-run
        if isinstance(dataset.mixture, PacedMixture):
            # For the log: the share of each source in the tokens so far, and its epochs.
            self.seen_metrics = self._seen_metrics
        super().__init__(
            dataset,
            micro_batch_size=1,
            global_batch_size=dataset.packs_per_step,
            seed=dataset.seed,
            shuffle=False,
            collate_fn=itemgetter(0),
            timeout=check_seconds(stall_seconds),
            **options,
        )

    def __iter__(self) -> Iterator[PackedBatch]:
        for batch, bad in super().__iter__():
            if bad:
                self.bad_rows.found_in_training(bad)
            yield batch

    def end_report(self) -> str | None:
        """A line about bad rows for the end of a training; None if there are none."""
        return self.bad_rows.report()

    _media_known = True
    _plans_steps = True

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

    def set_epoch(self, epoch: int) -> None:
        if epoch == self.epoch + 1:
            self._seen_before = self._seen_before + self.dataset.seen(self.size)
        super().set_epoch(epoch)

    def seen(self) -> dict[str, dict[str, float]]:
        """Rows, tokens and epochs of each source that were trained on, over resumes."""
        mixture = self.dataset.mixture
        totals = self._seen_before + self.dataset.seen(super().state_dict()["samples"])
        found = {}
        for name, source, (rows, tokens) in zip(
            mixture.names, mixture.sources, totals.tolist(), strict=True
        ):
            found[name] = {"rows": rows, "tokens": tokens, "epochs": round(rows / len(source), 4)}
        return found

    def _seen_metrics(self) -> dict[str, float]:
        seen = self.seen()
        total = max(1, sum(one["tokens"] for one in seen.values()))
        shares = {f"share_{name}": one["tokens"] / total for name, one in seen.items()}
        return shares | {f"epochs_{name}": one["epochs"] for name, one in seen.items()}

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().state_dict())
        state |= {"plan": self.plan_id(), "seen": self.seen()}
        if isinstance(self.dataset.mixture, PacedMixture):
            mixture = self.dataset.mixture
            state["mixture"] = {
                "settings": mixture.settings(),
                "origin": asdict(mixture.origin),
                "next": asdict(self.dataset.origin_after(state["samples"])),
                "changes": self._changes,
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mixture = self.dataset.mixture
        before = state.get("mixture")
        is_changed = False
        if before is not None and isinstance(mixture, PacedMixture):
            self._changes = list(before["changes"])
            is_changed = before["settings"] != mixture.settings()
            if is_changed:
                self._note_change(before, mixture.settings())
            self.dataset.begin_at(Origin(**before["next" if is_changed else "origin"]))
            state = {**state, "samples": 0} if is_changed else state
        super().load_state_dict(state)
        if not is_changed and state["plan"] != self.plan_id():
            what = "the packing (pack and row size, global batch, data.limits, seed, processor) is"
            if not state["plan"].startswith(f"{self.data_id}-"):
                what = "the rows (files of the sources, hold_out) are"
            raise UserError(
                f"{what} not what the checkpoint was trained with, so its position in the epoch is not valid here: "
                "restore it (config.yaml of the run), set resume_data=restart, or start a new run (model.path). Shares "
                "of sources can change in mid-run where data.mixture was set from its start"
            )
        seen = state.get("seen", {})  # checkpoints of earlier versions do not have it
        rows = [
            [seen.get(name, {}).get(key, 0) for key in ("rows", "tokens")] for name in mixture.names
        ]
        if seen:
            self._seen_before = np.array(rows, np.int64) - self.dataset.seen(state["samples"])

    def _note_change(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        """Record that the mixture is another one from here on. Raises if the rows of a source are others."""
        for name, (fingerprint, *_) in now["sources"].items():
            known = before["settings"]["sources"].get(name)
            if known is not None and known[0] != fingerprint:
                raise UserError(
                    f"the rows of the source {name} are not those that the checkpoint was trained with: restore its "
                    "files, give them another name, or set resume_data=restart"
                )
        change = {"units": before["next"]["units"], "before": before["settings"]}
        self._changes.append(change)
        LOGGER.info(
            "the mixture changes after %.0f %s: each source continues behind its last row. Before: %s; now: %s",
            change["units"],
            now["mixing"]["by"],
            _shown(before["settings"]),
            _shown(now),
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


def _shown(settings: dict[str, Any]) -> str:
    """The weights of a mixture, for the log."""
    weights = {name: weight for name, (_, weight, _) in settings["sources"].items()}
    return f"{weights} {settings['mixing']}"
