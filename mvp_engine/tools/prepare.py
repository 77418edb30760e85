"""`mvp data prepare`: tokenize the rows of a config once, into a folder that trainings read in their place.

The rows of each source go into shards, whose rows are a function of their number alone: any number of processes and
machines writes the same bytes, and what was written before a kill is not made again. A shard is an Arrow file with the
token ids, the loss as lengths of runs (without loss, with loss, ...), media as references, and the costs of each row.
The manifest is complete when all shards are there.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mvp_engine import __version__
from mvp_engine.config import compose
from mvp_engine.errors import UserError, count
from mvp_engine.files import atomic_path, atomic_write_text
from mvp_engine.kit.data.cpus import available_cpus
from mvp_engine.kit.data.encode.row_encoder import ENCODER_VERSION, EncodedSequence, RowEncoder
from mvp_engine.kit.data.encode.tokenization import has_weights
from mvp_engine.kit.data.kit import MLLMDataKit
from mvp_engine.kit.data.measured_sources import CUTS, MeasuredSources, encoder_hashes
from mvp_engine.kit.data.pack.costs import (
    CHUNK_ROWS,
    Costs,
    Measure,
    RowCost,
    WorkerDied,
    map_chunks,
    write_costs,
)
from mvp_engine.kit.data.read.media_source import require_package
from mvp_engine.kit.data.read.row_files import COSTS, SHARD, open_shard, write_media
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.rows import null_rows
from mvp_engine.kit.data.settings import MANIFEST
from mvp_engine.tools.inspect import config_data_kit

FORMAT = 1  # of the manifest and the shards
MIN_SHARD_ROWS = 1024
MAX_SHARDS = 4096  # of a source of many rows
PROGRESS_SECONDS = 10.0


def prepare(config: str, out: str, overrides: list[str], *, ray: str | None, as_json: bool) -> None:
    """Prepare all splits of a config, and print what was written."""
    require_package("pyarrow", "mvp data prepare")
    preparation = Preparation.of_config(config, overrides, out)
    if preparation.begin():
        every = preparation.jobs
        left = [number for number, job in enumerate(every) if not preparation.file(job).exists()]
        if ray:
            made = _on_ray(ray, config, overrides, preparation.out, left)
        else:
            made = preparation.make_all([every[number] for number in left])
        _show_progress(made, len(left), len(every))
        preparation.finish()
    facts = json.loads((preparation.out / MANIFEST).read_bytes())
    if as_json:
        print(json.dumps({"folder": str(preparation.out), **facts}, indent=2))
        return
    for one in facts["sources"]:
        print(
            f"{one['folder']}: {count(one['rows'], 'row')} of {count(one['documents'], 'row')} read, "
            f"{one['tokens']:,} tokens, {one['learnt']:,} of them with loss; bad {one['bad']:,}, "
            f"over-long {one['overlong']:,}"
        )
    print(f"train on it with data.sources={preparation.out}")


class Job(NamedTuple):
    """A shard: the number of its source in the preparation, its number in the source, and its rows."""

    source: int
    shard: int
    rows: range


@dataclass
class _Prepared:
    """A row of a shard."""

    where: str
    cost: RowCost = (0, 0, 0)  # as it is trained on
    kinds: int = 0  # of media, before it was made to fit
    long: bool = False
    sides: Sequence[EncodedSequence] = ()


@dataclass
class RowWriter(Measure):
    """Encodes rows as a measurement does, and keeps them."""

    kept: dict[int, Sequence[EncodedSequence]] = field(default_factory=dict)

    def keep(self, row: int, sides: Sequence[EncodedSequence]) -> None:
        self.kept[row] = sides

    def prepared(self, rows: range) -> Iterator[_Prepared]:
        cut = self.row_encoder.overlong
        found = chain.from_iterable(
            map(self._chunk, (rows[i : i + CHUNK_ROWS] for i in range(0, len(rows), CHUNK_ROWS)))
        )
        return self._cut(found, joins=cut == "concat") if cut in CUTS else found

    def _chunk(self, rows: range) -> list[_Prepared]:
        """Rows as a training would encode them."""
        self.kept = {}
        most = self.row_encoder.max_tokens
        found = {}
        for row, cost in zip(rows, self(rows).costs, strict=True):
            is_long = len(cost) == 3 and cost[0] > most
            kinds = cost[2] if len(cost) == 3 else 0
            found[row] = _Prepared(self.source.where(row), cost, kinds, is_long)
        long = [row for row, one in found.items() if one.long]
        if long and self.row_encoder.overlong in ("truncate", "shrink"):
            self.fit = True
            for row, cost in zip(long, self(long).costs, strict=True):
                found[row].cost = (0, 0, 0) if cost[0] == "overlong" else cost
            self.fit = False
        elif self.row_encoder.overlong not in CUTS:
            for row in long:
                found[row].cost = (0, 0, 0)
        for row, one in found.items():
            one.sides = self.kept.get(row, ()) if len(one.cost) == 3 and one.cost[0] else ()
        return list(found.values())

    def _cut(self, rows: Iterable[_Prepared], joins: bool) -> Iterator[_Prepared]:
        """Documents in pieces of at most `max_tokens`; with `joins` end to end, else each on its own.

        A piece begins with the last token of the one before it: so each token is predicted once.
        """
        most = self.row_encoder.max_tokens
        ids: list[int] = []
        loss: list[bool | float] = []
        where = ""

        def piece(end: int) -> _Prepared:
            sides = [EncodedSequence(ids[:end], loss[:end], [], [], [], [])]
            return _Prepared(where, (end, 0, 0) if any(loss[1:end]) else (0, 0, 0), sides=sides)

        for row in rows:
            is_text = len(row.sides) == 1 and not row.sides[0].parts
            if len(row.cost) == 3 and row.long and not is_text:
                row.cost, row.sides = (0, 0, 0), ()
            if not row.sides or not is_text or not (joins or row.long):
                yield row
                continue
            where = where if ids else row.where
            ids = ids + row.sides[0].ids
            loss = [*loss, *row.sides[0].loss]
            while len(ids) > most:
                yield piece(most)
                ids, loss, where = ids[most - 1 :], [False, *loss[most:]], row.where
            if not joins and ids:
                yield piece(len(ids))
                ids, loss = [], []
        if len(ids) > 1:
            yield piece(len(ids))


class Preparation:
    """What a config's kit reads, on its way into the folder `out`."""

    def __init__(self, kit: MLLMDataKit, out: Path) -> None:
        self.kit = kit
        self.out = out
        self.encoder = kit.row_encoder
        _refuse_unsupported(kit)
        self.writers: list[RowWriter] = []
        self.places: list[dict[str, Any]] = []  # split, name, weight and repeats of each source
        self.jobs: list[Job] = []
        for split in kit.splits:
            mixture = kit.mixture(split)
            known = zip(
                kit.sources(split),
                mixture.names,
                mixture.sources,
                kit.row_formats(split),
                strict=True,
            )
            for settings, name, source, row_format in known:
                self._add_jobs(len(self.writers), len(source))
                self.writers.append(RowWriter(source, row_format, self.encoder))
                self.places.append(
                    {
                        "split": split,
                        "name": name,
                        "folder": f"{split}/{name}",
                        "weight": settings.weight,
                        "repeats": settings.repeats,
                    }
                )

    @classmethod
    def of_config(cls, config: str, overrides: list[str], out: str) -> Preparation:
        composed = compose(config, overrides)
        kit = config_data_kit(composed.engine_class, composed.config)
        return cls(kit, Path(out).expanduser().absolute())

    def _add_jobs(self, source: int, rows: int) -> None:
        """A shard has a number of rows that depends on that of the source alone."""
        size = max(MIN_SHARD_ROWS, -(-rows // MAX_SHARDS))
        for shard, start in enumerate(range(0, rows, size)):
            self.jobs.append(Job(source, shard, range(start, min(rows, start + size))))

    def file(self, job: Job) -> Path:
        return self.out / self.places[job.source]["folder"] / SHARD.format(job.shard)

    @cached_property
    def head(self) -> dict[str, Any]:
        """The manifest without its sources."""
        import transformers

        encoder = self.encoder
        return {
            "format": FORMAT,
            "versions": {
                "mvp_engine": __version__,
                "transformers": transformers.__version__,
                "encoder": ENCODER_VERSION,
            },
            "made_with": encoder_hashes(encoder),
            "max_tokens": encoder.max_tokens,
            "overlong": encoder.overlong,
            "pairs": encoder.pairs,
            "key": self._key(),
        }

    def _key(self) -> str:
        """A hash of all that the shards are made from."""
        facts: list[Any] = [FORMAT, self.encoder.max_tokens, self.encoder.overlong]
        for place, writer in zip(self.places, self.writers, strict=True):
            facts += [place, writer.source.fingerprint, writer.setup]
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    def begin(self) -> bool:
        """Whether there is anything left to do. Raises for a folder with something else in it."""
        file = self.out / MANIFEST
        if file.is_file():
            manifest = json.loads(file.read_bytes())
            if manifest["key"] != self.head["key"]:
                raise UserError(
                    f"{self.out} has rows that were prepared from other files, or with other settings: give another "
                    "folder, or remove it"
                )
            return not manifest["complete"]
        if self.out.exists() and any(self.out.iterdir()):
            raise UserError(f"{self.out} is not empty, and was not prepared: give another folder")
        for place in self.places:
            (self.out / place["folder"]).mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, json.dumps({**self.head, "complete": False}, indent=1))
        return True

    def make_all(self, jobs: Sequence[Job]) -> Iterator[Any]:
        """Write shards in processes on all cores; each job when it is done."""
        self.encoder.prepare()
        chunks: list[Any] = list(jobs)
        try:
            with closing(map_chunks(self.make, chunks, available_cpus())) as done:
                for job, _ in done:
                    yield job
        except WorkerDied as error:
            found: Any = error.rows
            source, _, rows = found
            where = self.writers[source].source.where
            raise UserError(
                f"data: a process died while it prepared the rows from {where(rows[0])} to {where(rows[-1])}. "
                "Out of memory? What is written is kept; look at the rows with mvp data inspect --row"
            ) from None

    def make(self, job: Any) -> None:
        source, _, rows = job
        num_tokens = len(self.encoder.media.tokenizer)
        write_shard(self.file(job), self.writers[source].prepared(rows), num_tokens)

    def finish(self) -> None:
        """Gather the costs of all shards, and complete the manifest."""
        sources = []
        for number, (place, writer) in enumerate(zip(self.places, self.writers, strict=True)):
            jobs = [job for job in self.jobs if job.source == number]
            sources.append({**place, **self._finish_source(writer, jobs)})
        manifest = {**self.head, "complete": True, "sources": sources}
        atomic_write_text(self.out / MANIFEST, json.dumps(manifest, indent=1))

    def _finish_source(self, writer: RowWriter, jobs: Sequence[Job]) -> dict[str, Any]:
        shards: list[dict[str, np.ndarray]] = []
        for job in jobs:  # one file at a time is open
            found = open_shard.__wrapped__(self.file(job))
            shards.append(
                {name: found[name].to_numpy(zero_copy_only=False).copy() for name in _FACTS}
            )

        def column(name: str) -> np.ndarray:
            return np.concatenate([shard[name] for shard in shards])

        arrays = column("tokens").astype(np.int64), column("encoder"), column("kinds")
        bad = {row: tuple(json.loads(text)) for row, text in enumerate(column("bad")) if text}
        costs = Costs(*arrays, bad, np.flatnonzero(column("long")))
        source = writer.source
        is_cut = self.encoder.overlong in CUTS
        if not is_cut:  # rows are those of the source
            for row, why in null_rows(source, column("all_kinds")).items():
                costs.bad[row] = why
                costs.tokens[row] = costs.encoder[row] = costs.media[row] = 0
        file = self.file(jobs[0])
        write_costs(file.with_name(COSTS), costs)
        sizes = [
            [len(shard["tokens"]), self.file(job).stat().st_size]
            for shard, job in zip(shards, jobs, strict=True)
        ]
        fingerprint = source.fingerprint
        if is_cut:
            fingerprint = hashlib.blake2b(
                f"{fingerprint} {self.head['key']}".encode(), digest_size=16
            ).hexdigest()
        return {
            "root": str(source.root),
            "fingerprint": fingerprint,
            "documents": len(source),
            "rows": len(costs.tokens),
            "tokens": int(costs.tokens.sum()),
            "learnt": int(column("learnt")[costs.tokens > 0].sum()),
            "bad": len(costs.bad),
            "overlong": int((costs.tokens[costs.long] == 0).sum()),
            "has_media": bool(costs.media.any()),
            "shards": sizes,
        }


def _refuse_unsupported(kit: MLLMDataKit) -> None:
    encoder = kit.row_encoder
    own_costs = type(kit).measure_source is not MeasuredSources.measure_source
    if own_costs or type(encoder) is not RowEncoder or encoder.row_part is not None:
        raise UserError(
            f"mvp data prepare writes rows of texts, images, videos and audio; {type(kit).__name__} adds targets "
            "to them (actions, speech), which are read from their files in each epoch"
        )
    if kit.settings.prompt_only == "always":
        raise UserError(
            "mvp data prepare: rollouts read the columns of prompts, which are not kept: use their files"
        )
    for split in kit.splits:
        if kit.is_stream(split):
            raise UserError(
                f"mvp data prepare: the sources of {split} are streams: unpack their files, and remove stream: true"
            )
        for name, source in zip(kit.source_names(split), kit.mixture(split).sources, strict=True):
            if source.prepared is not None:
                raise UserError(
                    f"mvp data prepare: the source {name} is prepared already: {source.prepared.file}"
                )
            if "/" in name or name.startswith("."):
                raise UserError(
                    f"mvp data prepare: the source {name!r} needs a name that can be one of a folder"
                )


def write_shard(file: Path, rows: Iterable[_Prepared], num_tokens: int) -> None:
    """Rows as columns of one record batch."""
    import pyarrow as pa

    columns: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        for name, value in _values(row).items():
            columns[name].append(value)
    arrays = {name: pa.array(columns[name], getattr(pa, of)()) for name, of in _TYPES.items()}
    arrays["blobs"] = pa.array(columns["blobs"], pa.list_(pa.large_binary()))
    arrays["ends"] = _lists(columns["ends"], np.int32)
    arrays["loss"] = _lists(columns["loss"], np.int32)
    arrays["input_ids"] = _lists(columns["ids"], np.uint16 if num_tokens <= 1 << 16 else np.uint32)
    batch = pa.record_batch(list(arrays.values()), list(arrays))
    with atomic_path(file) as temporary, pa.ipc.new_file(str(temporary), batch.schema) as writer:
        writer.write_batch(batch)


_TYPES = {
    "where": "string",
    "media": "large_string",
    "fields": "string",
    "tokens": "int64",
    "encoder": "int64",
    "kinds": "uint8",
    "all_kinds": "uint8",
    "learnt": "int64",
    "bad": "string",
    "long": "bool_",
}


_FACTS = (
    "tokens",
    "encoder",
    "kinds",
    "all_kinds",
    "learnt",
    "bad",
    "long",
)  # of all rows, for the manifest


def _values(row: _Prepared) -> dict[str, Any]:
    """The cells of a row."""
    sides, cost, bad = row.sides, row.cost, None
    try:
        media, blobs = write_media(sides)
    except BadRow as error:
        media, blobs = None, None
        cost = error.reason, error.detail
    if len(cost) == 2:
        sides, cost, bad = (), (0, 0, 0), json.dumps(cost)
    if any(has_weights(side.loss) for side in sides):
        raise UserError(
            f"{row.where}: the row has a weight in the loss, which prepared rows do not keep. Train on the rows "
            "themselves (data.sources), or drop the column by `columns: {weight: null}` of the source"
        )
    loss = np.array(list(chain.from_iterable(side.loss for side in sides)), bool)
    changes = np.flatnonzero(np.diff(loss, prepend=False))
    numbers = dict(sides[0].fields) if sides else {}
    return {
        "where": row.where,
        "media": media,
        "blobs": blobs,
        "fields": json.dumps(numbers) if numbers else None,
        "tokens": cost[0],
        "encoder": cost[1],
        "kinds": cost[2],
        "all_kinds": row.kinds,
        "learnt": sum(sum(side.loss[1:]) for side in sides),
        "bad": bad,
        "long": row.long,
        "ends": np.cumsum([len(side.ids) for side in sides]),
        "loss": np.diff(changes, prepend=0, append=len(loss)) if len(loss) else changes,
        "ids": np.array(list(chain.from_iterable(side.ids for side in sides))),
    }


def _lists(values: Sequence[np.ndarray], dtype: Any) -> Any:
    import pyarrow as pa

    offsets = np.cumsum([0, *map(len, values)])
    if offsets[-1] >= 1 << 31:
        raise UserError("mvp data prepare: a shard has more than 2^31 tokens: split the rows")
    flat = np.concatenate(values).astype(dtype)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat))


def _show_progress(made: Iterable[Any], left: int, total: int) -> None:
    began = shown = time.monotonic()
    for done, _ in enumerate(made, 1):
        now = time.monotonic()
        if now - shown >= PROGRESS_SECONDS:
            shown = now
            seconds = (now - began) / done * (left - done)
            print(
                f"{total - left + done} of {total} shards, about {seconds:.0f} s left",
                file=sys.stderr,
            )


# ---- On several machines, by Ray Data --------------------------------------------------------------


def _on_ray(
    address: str, config: str, overrides: list[str], out: Path, jobs: Sequence[int]
) -> Iterator[Any]:
    """Write shards in processes of a Ray cluster, whose machines see the same files under the same names."""
    ray = require_package("ray", "mvp data prepare --ray", extra="ray")
    require_package("ray.data", "mvp data prepare --ray", extra="ray")
    if not jobs:
        return
    if not ray.is_initialized():
        try:
            ray.init(address=address, logging_level="WARNING", log_to_driver=False)
        except ConnectionError as error:
            raise UserError(f"--ray {address}: no Ray cluster answers there: {error}") from None
    ray.data.DataContext.get_current().enable_progress_bars = False
    workers = max(1, min(len(jobs), int(ray.cluster_resources().get("CPU", 1))))
    arguments = (os.getcwd(), config, list(overrides), str(out))
    dataset = ray.data.from_items([{"job": number} for number in jobs])
    made = dataset.repartition(len(jobs)).map_batches(
        _RayWriter,
        fn_constructor_args=arguments,
        batch_size=1,
        concurrency=(1, workers),
        num_cpus=1,
    )
    yield from made.iter_rows()


class _RayWriter:
    """Writes shards by their number in the preparation, which it makes from the config as the command does."""

    def __init__(self, folder: str, config: str, overrides: list[str], out: str) -> None:
        os.chdir(folder)
        self.preparation = Preparation.of_config(config, overrides, out)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for number in batch["job"].tolist():
            self.preparation.make(self.preparation.jobs[number])
        return batch
