"""MeasuredSources: the sources of a data kit by split, opened once, and the costs of their rows."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError, count
from mvp_engine.kit.data.cpus import num_processes
from mvp_engine.kit.data.encode.processor import load_processor, tokenizer_hash
from mvp_engine.kit.data.encode.row_encoder import RowEncoder
from mvp_engine.kit.data.pack.costs import (
    CHUNK_ROWS,
    ChunkCosts,
    Costs,
    Measure,
    MeasureWorkers,
    Progress,
    Records,
    cost_file,
    default_cache,
    measure_costs,
    read_costs,
    set_cost,
    try_locked,
    write_costs,
)
from mvp_engine.kit.data.pack.plan import Mixture, PacedMixture
from mvp_engine.kit.data.read.bad_rows import BadRecord
from mvp_engine.kit.data.read.row_files import COSTS, PreparedFile, content_hash
from mvp_engine.kit.data.read.row_types import MAX_TEXT, BadRow, RowFormat
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.data.read.sources import Source, open_source
from mvp_engine.kit.data.settings import (
    DataSource,
    MLLMData,
    check_splits,
    resolve_sources,
    with_held_out,
)

CUTS = ("split", "concat")  # values of data.overlong for documents, which `mvp data prepare` cuts
SAMPLED_TOKENS = 16384  # of the rows of a sample
SAMPLED_ROWS = 256  # at most


class MeasuredSources:
    """The sources of `settings`. A subclass gives the `row_encoder` that the costs of rows are for."""

    row_encoder: RowEncoder

    def __init__(self, settings: MLLMData, num_workers: int) -> None:
        self.settings = settings
        self.num_workers = num_workers
        self.cache = Path(settings.cache).expanduser() if settings.cache else default_cache()
        resolved = [resolve_sources(source) for source in settings.sources]
        self._all_sources = with_held_out(list(chain.from_iterable(resolved)))
        if any(len(found) > 1 for found in resolved):
            check_splits(self._all_sources)
        settings.check_mixture(self._all_sources)
        self._source_names: dict[str, list[str]] = {}  # by split
        self._mixtures: dict[str, Mixture] = {}
        self._measured: dict[str, tuple[Mixture, list[Costs]]] = {}
        self._ahead: MeasureAhead | None = None
        self._started = time.time()

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(source.split for source in self._all_sources))

    def has_split(self, split: str) -> bool:
        return any(source.split == split for source in self._all_sources)

    def sources(self, split: str) -> list[DataSource]:
        found = [source for source in self._all_sources if source.split == split]
        if not found:
            raise no_source(split)
        return found

    def is_stream(self, split: str = "train") -> bool:
        return self.sources(split)[0].stream

    def source_names(self, split: str = "train") -> list[str]:
        """The names of the sources; a batch's `sequence_fields["source"]` is an index into them."""
        if split not in self._source_names:
            self._source_names[split] = [source.label for source in self.sources(split)]
        return self._source_names[split]

    def row_formats(self, split: str = "train") -> list[RowFormat]:
        """How the rows of each source are read."""
        return [source.row_format(self.settings) for source in self.sources(split)]

    def row(self, split: str, sample: int) -> tuple[Source, Any, RowFormat]:
        """The source, the raw row and how it is read, for a value of `sequence_fields["sample"]`."""
        mixture, _ = self.measured(split)
        for settings, source in zip(self.sources(split), mixture.sources, strict=True):
            if sample < len(source):
                return source, source[sample], settings.row_format(self.settings)
            sample -= len(source)
        raise IndexError(f"{split} has no sample {sample}")

    def data_id(self, split: str) -> str:
        mixture, _ = self.measured(split)
        fingerprints = " ".join(source.fingerprint for source in mixture.sources)
        return hashlib.blake2b(fingerprints.encode(), digest_size=8).hexdigest()

    # ---- Costs ----------------------------------------------------------------------------------

    def measured(self, split: str) -> tuple[Mixture, list[Costs]]:
        """The sources of a split as a mixture, and the costs of their rows; measured at the first call."""
        if split not in self._measured:
            if self._ahead is not None:
                self._ahead.wait()
            mixture, costs = self.mixture(split), self._measure(split)
            self._measured[split] = self._paced(split, mixture, costs), costs
        return self._measured[split]

    def _paced(self, split: str, mixture: Mixture, costs: list[Costs]) -> Mixture:
        """The mixture of `data.mixture`, which needs the tokens of rows; of other configs the same one."""
        mixing = self.settings.mixing if split == "train" else None
        if mixing is None:
            return mixture
        settings = self.sources(split)
        sources = [
            (name, source, one.weight, one.repeats or 1.0)
            for name, source, one in zip(mixture.names, mixture.sources, settings, strict=True)
        ]
        return PacedMixture(sources, [cost.tokens for cost in costs], mixing)

    def measure_ahead(self, splits: Iterable[str]) -> bool:
        """Start to measure rows in processes of their own, for which `measured` waits; False: there is nothing to do.

        Errors in rows are those of `measured`. `stop_measuring` ends the processes. What a row part prepares comes
        before costs: with one, all is measured here and now.
        """
        if self._ahead is None:
            own = type(self).measure_source is not MeasuredSources.measure_source
            sources = []
            for split in splits:
                if self.is_stream(split) or own:
                    continue
                if self.row_encoder.row_part is not None:
                    self.measured(split)
                    continue
                mixture = self.mixture(split)
                formats = self.row_formats(split)
                for name, source, form in zip(mixture.names, mixture.sources, formats, strict=True):
                    if source.prepared is None:
                        sources.append((name, Measure(source, form, self.row_encoder)))
            self._ahead = MeasureAhead(sources, self.cache, num_processes(self.num_workers))
        return bool(self._ahead)

    @property
    def is_measuring(self) -> bool:
        """Whether rows are being measured ahead."""
        return self._ahead is not None and self._ahead.is_running

    def stop_measuring(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()

    def sample(self, split: str = "train") -> PackedBatch:
        """Some rows in one batch, chosen at random and always the same. Only these are read."""
        batches = self._read_sample(split, self.mixture(split).some(SAMPLED_ROWS))
        if not batches:  # bad rows, of which a plan leaves out all
            _, costs = self.measured(split)
            order = self.mixture(split).order(0, 0)
            good = [costs[which].tokens[row] > 0 for which, row in order.tolist()]
            batches = self._read_sample(split, order[np.array(good, bool)][:SAMPLED_ROWS])
        if not batches:
            limit = self.row_encoder.max_tokens
            bad, long = self.bad_rows(split), self.overlong_rows(split)
            raise no_rows(split, self.left_out(split), bad, long, limit)
        return PackedBatch.concat(batches)

    def sample_costs(self, split: str = "train") -> np.ndarray:
        """Tokens and encoder work of the rows of `sample` and of more after them, whose media are not decoded."""
        sources = self.mixture(split).sources
        formats = self.row_formats(split)
        costs: list[tuple[int, int]] = []
        for which, row in self.mixture(split).some(SAMPLED_ROWS).tolist():
            source = sources[which]
            with contextlib.suppress(BadRow):
                sides = self.row_encoder.encode(source[row], formats[which], source.root)
                tokens = sum(side.num_positions for side in sides)
                costs.append((tokens, self.row_encoder.encoder_cost(sides)))
        return np.array(costs, np.int64).reshape(-1, 2)

    def _read_sample(self, split: str, order: np.ndarray) -> list[PackedBatch]:
        sources = self.mixture(split).sources
        formats = self.row_formats(split)
        batches: list[PackedBatch] = []
        for which, row in order.tolist():
            source = sources[which]
            fields = {"source": which, "sample": row}
            with contextlib.suppress(BadRow):
                sides = self.row_encoder.encode(
                    source[row], formats[which], source.root, decode=True
                )
                batches += self.row_encoder.load(sides, source.root, fields)
            if sum(batch.num_tokens for batch in batches) >= SAMPLED_TOKENS:
                break
        return batches

    def bad_rows(self, split: str = "train") -> list[BadRecord]:
        """The rows that were found to be bad before any media were decoded."""
        mixture, costs = self.measured(split)
        found = []
        for name, source, cost in zip(mixture.names, mixture.sources, costs, strict=True):
            for row, (reason, detail) in sorted(cost.bad.items()):
                found.append(BadRecord(name, source.where(row), reason, detail))
        return found

    def overlong_rows(self, split: str = "train") -> list[BadRecord]:
        """The rows that are dropped because they have more tokens than allowed."""
        return overlong_records(*self.measured(split), self.row_encoder.max_tokens)

    def require_pairs(self, split: str) -> None:
        """Raise if the rows of a split are no preference pairs."""
        if not self.is_stream(split):
            refuse_no_pairs(split, self.mixture(split).sources, self.row_formats(split))

    def left_out(self, split: str) -> str:
        return describe_left_out(*self.measured(split), self.settings.overlong)

    def mixture(self, split: str) -> Mixture:
        """The sources of a split, opened once."""
        if split not in self._mixtures:
            self._mixtures[split] = self._open(split)
        return self._mixtures[split]

    def _open(self, split: str) -> Mixture:
        settings = self.sources(split)
        if settings[0].stream:
            raise UserError(
                f"data: the sources of {split} are streams, which have no packing plan: use stream_loader"
            )
        sources = [self.open_rows(one) for one in settings]
        by = "weight" if settings[0].weight is not None else "repeats"
        shares = [getattr(one, by) or 1.0 for one in settings]
        if self.settings.mixture is not None and split == "train":  # see `_paced`
            by, shares = "repeats", [1.0] * len(settings)
        return Mixture(list(zip(self.source_names(split), sources, shares, strict=True)), by)

    def open_rows(self, settings: DataSource) -> Source:
        """The rows of a source that belong to its split."""
        if settings.tokenized_by:
            self._check_tokenizer(settings.label, settings.tokenized_by)
        source = open_source(settings.path, settings.root, MAX_TEXT)
        if source.prepared is not None:
            refuse_other_encoder(source.prepared, self.row_encoder)
        if not settings.hold_out:
            return source
        return source.split(settings.hold_out, settings.split == "eval", settings.label)

    def _check_tokenizer(self, name: str, folder: str) -> None:
        """Raise unless the tokenizer that made the token ids of a source is that of the model."""
        made = load_processor(folder)
        added = self.settings.new_tokens
        own = tokenizer_hash(self.row_encoder.media.tokenizer, added)
        if tokenizer_hash(getattr(made, "tokenizer", made), added) != own:
            raise UserError(
                f"data.sources.{name}.tokenized_by={folder} is not the tokenizer of the model, so its ids stand for "
                "other tokens: give the text of the rows, or train a model with that tokenizer"
            )

    def _measure(self, split: str) -> list[Costs]:
        mixture = self.mixture(split)
        costs = []
        formats = self.row_formats(split)
        for name, source, row_format in zip(mixture.names, mixture.sources, formats, strict=True):
            costs.append(self.measure_source(name, source, row_format))
        if self.settings.overlong == "error":
            refuse_overlong(mixture, costs, self.row_encoder.max_tokens)
        return costs

    def measure_source(self, name: str, source: Source, row_format: RowFormat) -> Costs:
        """The costs of the rows of a source."""
        if source.prepared is not None:
            return prepared_costs(source, source.prepared, self.row_encoder)
        if self.settings.overlong in CUTS:
            raise UserError(
                f"data.overlong={self.settings.overlong}: {name} has rows that are not prepared. Prepare them with mvp "
                "data prepare, or set data.overlong to drop, truncate, shrink or error"
            )
        warn_of_missing_columns(name, source, row_format)
        if self.row_encoder.row_part is not None:
            self.row_encoder.row_part.prepare(name, source, row_format)
        where = self.cache, self.num_workers, name, self._started
        return measure_costs(source, row_format, self.row_encoder, *where)


# Costs of rows measured ahead: worker processes fill the cost cache while this process builds the model.
#
# The processes are forked at once, by the caller's thread. One that is forked later, while another thread imports or
# allocates, could inherit a lock that nobody releases. A thread takes their results and writes the cache. It raises
# nothing: `measure_costs` comes afterwards, reads what is there, measures the rest, and raises what went wrong.


class _Chunk(NamedTuple):
    source: int  # which of the measured sources
    rows: range


class MeasureAhead:
    """Sources, as (name, `Measure`), that are being measured into the cache, unless they are in it already.

    Of several processes one measures a source. The others start nothing for it, and wait in `measure_costs`.
    """

    def __init__(self, sources: Sequence[tuple[str, Measure]], cache: Path, workers: int) -> None:
        self._sources = []
        if workers:
            for name, measure in sources:
                file = cost_file(measure, cache, measure.setup)
                lock = None if file.exists() else try_locked(file.with_suffix(".lock"))
                if lock is not None:
                    self._sources.append(_Source(name, measure, cache, file, lock, workers))
        chunks = []
        for index, source in enumerate(self._sources):
            for start in range(0, source.left, CHUNK_ROWS):
                chunks.append(_Chunk(index, range(start, min(start + CHUNK_ROWS, source.left))))
        # Fewer chunks are measured faster than processes start.
        is_long = len(chunks) > 1
        self._workers = MeasureWorkers(self._measure, chunks, workers) if is_long else None
        self._thread = threading.Thread(target=self._take_results, name="mvp-measure", daemon=True)
        self._thread.start()

    def __bool__(self) -> bool:
        """Whether there was anything to measure."""
        return self._workers is not None

    @property
    def is_running(self) -> bool:
        return self._workers is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until all is measured, or something failed."""
        self._thread.join()

    def stop(self) -> None:
        """End the processes now. What they have measured is kept."""
        if self._workers is not None and self._thread.is_alive():
            self._workers.kill()
        self._thread.join()

    def _measure(self, chunk: _Chunk) -> ChunkCosts:
        return self._sources[chunk.source].measure(chunk.rows)

    def _take_results(self) -> None:
        try:
            # Whatever fails here, a process that died or a full disk, fails again in `measure_costs`.
            with contextlib.suppress(Exception):
                for chunk, found in self._workers.results() if self._workers else ():
                    self._sources[chunk.source].add(chunk.rows, found)
        finally:
            if self._workers is not None:
                self._workers.kill()
            for source in self._sources:
                source.lock.close()


class _Source:
    """The costs of one source on their way into its cache file."""

    def __init__(
        self, name: str, measure: Measure, cache: Path, file: Path, lock: IO[Any], workers: int
    ) -> None:
        self.measure = measure
        self.file = file
        self.lock = lock
        self.left = len(measure.source)
        self.costs = Costs.zeros(self.left)
        self.records = Records(cache, measure.setup, measure)
        self.progress = Progress(name, self.left, workers, cache)

    def add(self, rows: range, found: ChunkCosts) -> None:
        self.records.append(found)
        for row, cost in zip(rows, found.costs, strict=True):
            set_cost(self.costs, row, cost)
        self.progress.add(len(rows))
        self.left -= len(rows)
        if not self.left:
            write_costs(self.file, self.costs)
            self.lock.close()


def repeated(sample: PackedBatch, tokens: int) -> PackedBatch:
    """About `tokens` tokens of the sample, which is repeated or cut between rows."""
    copies, rest = divmod(tokens, sample.num_tokens)
    # Batches that hold the same Media object would share its items.
    batches = [
        replace(sample, media={name: replace(item) for name, item in sample.media.items()})
        for _ in range(copies)
    ]
    ends = np.cumsum(sample.host_lengths)
    rows = int(np.searchsorted(ends, rest, side="right"))
    if rows or not batches:
        batches.append(sample.select(list(range(max(1, rows)))))
    return PackedBatch.concat(batches)


LOGGER = logging.getLogger("mvp_engine")
_OUTCOMES = {"truncate": "truncated", "shrink": "shrunk"}
_SHOWN = 3  # names in a message
_FIRST_ROWS = 100  # their columns are compared with the settings


def overlong_records(
    mixture: Mixture, costs: list[Costs], max_tokens: int, dropped: bool = True
) -> list[BadRecord]:
    """The over-long rows of all sources that are dropped, or the others, which were made to fit."""
    detail = f"more than {max_tokens} tokens"
    records = []
    for name, source, cost in zip(mixture.names, mixture.sources, costs, strict=True):
        for row in cost.long.tolist():
            if row not in cost.bad and (cost.tokens[row] == 0) == dropped:
                records.append(BadRecord(name, source.where(row), "overlong", detail))
    return records


def refuse_overlong(mixture: Mixture, costs: list[Costs], max_tokens: int) -> None:
    found = overlong_records(mixture, costs, max_tokens)
    if found:
        raise UserError(
            f"data: {count(len(found), 'row')} of more than {max_tokens} tokens, such as {_names(found)}: raise "
            "data.pack_tokens or data.max_length, or set data.overlong to drop, truncate or shrink"
        )


def no_source(split: str) -> UserError:
    """The error for a split that the config gives no rows."""
    fix = f"give a source split: {split}"
    if split == "eval":
        fix += " or hold_out, a share of its rows; or set eval.steps=null"
    return UserError(f"data: no source has split: {split}. To fix it, {fix}")


def no_rows(
    split: str, left_out: str, bad: list[BadRecord], long: list[BadRecord], max_tokens: int
) -> UserError:
    """The error for a split of which every row is left out: the first bad row, and what to do about over-long ones."""
    text = f"data: no row of {split} can be trained on. {left_out}"
    if bad:
        text += f". Such as {bad[0].where}: {bad[0].reason}: {bad[0].detail}"
    if long:
        text += (
            f". Over-long rows have more than {max_tokens} tokens: raise data.pack_tokens or "
            "data.max_length, or set data.overlong"
        )
    return UserError(text)


def describe_left_out(mixture: Mixture, costs: list[Costs], overlong: str) -> str:
    """Bad rows by reason, and the number of over-long rows with the first of them."""
    reasons = Counter[str]()
    for cost in costs:
        reasons.update(reason for reason, _ in cost.bad.values())
    bad = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or "none"
    outcomes = ["dropped"]
    if overlong in _OUTCOMES:
        outcomes.insert(0, _OUTCOMES[overlong])
    parts = []
    for outcome in outcomes:
        long = overlong_records(mixture, costs, 0, outcome == "dropped")
        parts.append(f"{outcome}: {len(long):,}" + (f" ({_names(long)})" if long else ""))
    return f"Bad rows: {bad}. Over-long rows {', '.join(parts)}"


def refuse_no_pairs(split: str, sources: list[Source], formats: list[RowFormat]) -> None:
    """Raise if the first rows of the sources are no preference pairs: nothing would be trained."""
    seen = None
    for source, row_format in zip(sources, formats, strict=True):
        for index in range(min(len(source), _FIRST_ROWS)):
            with contextlib.suppress(BadRow):
                if read_row(source[index], row_format).rejected:
                    return
                seen = seen or source.where(index)
    if seen:
        raise UserError(
            f"data: no preference pairs among the first rows of {split}, such as {seen}: rows need chosen and rejected"
        )


def warn_of_missing_columns(name: str, source: Source, row_format: RowFormat) -> None:
    """Warn if `columns` renames a column that none of the first rows has: it may be misspelt."""
    if not row_format.columns:
        return
    found: set[str] = set()
    for index in range(min(len(source), _FIRST_ROWS)):
        with contextlib.suppress(BadRow):
            found |= source[index].keys()
    missing = [old for old in row_format.columns if old not in found]
    if missing:
        LOGGER.warning(
            "%s: columns names %s, but the first rows have only %s",
            name,
            ", ".join(missing),
            ", ".join(sorted(found)),
        )


def _names(records: list[BadRecord]) -> str:
    more = ", ..." if len(records) > _SHOWN else ""
    return ", ".join(record.where for record in records[:_SHOWN]) + more


# ---- Prepared rows ------------------------------------------------------------------------------


def encoder_hashes(encoder: RowEncoder) -> dict[str, str]:
    """What prepared rows depend on: the tokenizer, the chat template, and of rows with media the processor."""
    import transformers

    renderer = encoder.template.renderer
    processor = encoder.media.processor.to_json_string() if encoder.media.kinds else ""
    of_template = renderer.chat_template, sorted(renderer.options.items()), encoder.pairs
    texts = {
        "template": repr((of_template, sorted(encoder.fields.items()))),
        "processor": repr((transformers.__version__, encoder.media.limits, processor)),
    }
    hashes = {name: content_hash(text.encode()).hexdigest() for name, text in texts.items()}
    return {"tokenizer": tokenizer_hash(encoder.media.tokenizer), **hashes}


_FIXES = {
    "tokenizer": "train the model that they were prepared for",
    "template": "restore data.template, data.pairs and data.fields",
    "processor": "restore data.limits, the processor and the version of transformers",
}


def refuse_other_encoder(file: PreparedFile, encoder: RowEncoder) -> None:
    """Raise if the rows were prepared with another tokenizer, template or processor, or for other lengths."""
    made = file.manifest["made_with"]
    now = encoder_hashes(encoder)
    for part, fix in _FIXES.items():
        if made[part] != now[part] and (part != "processor" or file.entry["has_media"]):
            raise UserError(
                f"data: the rows of {file.file} were prepared with another {part} than that of this training: {fix}, "
                "or prepare them again into another folder (mvp data prepare)"
            )
    most = file.manifest["max_tokens"]
    is_cut = most > encoder.max_tokens and encoder.overlong in CUTS
    if is_cut or (most != encoder.max_tokens and encoder.overlong in ("truncate", "shrink")):
        raise UserError(
            f"data: the rows of {file.file} were prepared for at most {most} tokens (data.overlong="
            f"{file.manifest['overlong']}), and this training takes {encoder.max_tokens}: set data.max_length={most}, "
            "or prepare them again into another folder"
        )


def prepared_costs(source: Source, file: PreparedFile, encoder: RowEncoder) -> Costs:
    """The costs of prepared rows, as they were measured; rows that are too long for this training are dropped."""
    known = read_costs(file.file / COSTS)
    if len(source) == file.size and file.manifest["max_tokens"] <= encoder.max_tokens:
        return known  # as it is: nothing reads all of it
    rows = source.chosen_rows()
    place_of = {row: place for place, row in enumerate(rows.tolist())} if known.bad else {}
    bad = {place_of[row]: why for row, why in known.bad.items() if row in place_of}
    costs = Costs(known.tokens[rows], known.encoder[rows], known.media[rows], bad)
    costs.version = known.version
    long = costs.tokens > encoder.max_tokens
    for array in (costs.tokens, costs.encoder, costs.media):
        array[long] = 0
    was_long = np.isin(rows, known.long)
    costs.long = np.flatnonzero(long | was_long)
    return costs
