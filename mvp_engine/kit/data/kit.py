"""MLLMDataKit: rows of text, images, video and audio as users have them, to packed batches by a plan.

    kit = MLLMDataKit(config.mllm, processor, model_config=read_config(path, {}))
    print(kit.summary("train"))
    loader = kit.engine_loader(engine, "train")  # in prepare_dataloader

Text only is the case of a tokenizer instead of a processor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, TypeAdapter, field_validator, model_validator
from torch import Tensor

from mvp_engine.batch import IGNORE, PackedBatch
from mvp_engine.config.schema import Count, Fraction, Positive, Section
from mvp_engine.data import SampleLoader
from mvp_engine.errors import UserError
from mvp_engine.kit.data.limits import Limits
from mvp_engine.kit.data.plan import BadRecord, Costs, PackDataset, find_costs
from mvp_engine.kit.data.rows import FORMATS
from mvp_engine.kit.data.samples import RopePositions, Sampler
from mvp_engine.kit.data.sources import Mixture, open_source

LOGGER = logging.getLogger("mvp_engine")


class DataSource(Section):
    path: str | list[str]  # a file, a folder, a glob, or several
    name: str | None = None  # in metrics and messages; None: that of the file
    split: str = "train"
    format: str | None = None  # of its rows; None: recognised
    repeats: Positive | None = None  # how often an epoch has its rows; None: once
    weight: Positive | None = None  # instead: its share of the rows; for all sources or none
    root: str | None = None  # the folder that media paths are in; None: the file's

    @field_validator("format")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in FORMATS:
            raise ValueError(f"choose one of {', '.join(FORMATS)}")
        return value


class MLLMData(Section):
    """The settings of a kit, for a recipe's config."""

    sources: list[DataSource] = Field(min_length=1)
    micro_batch_tokens: Count  # of a pack, which is a micro-batch
    packs_per_step: Count | None = None  # in a step, over all ranks; or ...
    global_batch_tokens: Count | None = None  # ... a multiple of micro_batch_tokens. With an engine neither is needed
    row_tokens: Count | None = None  # the longest row; None: a whole pack
    overlong: Literal["drop", "truncate", "shrink", "error"] = "drop"
    limits: Limits = Limits()
    template: dict[str, Any] = Field(default_factory=dict)  # options for the chat template
    max_bad_fraction: Fraction = 0.01  # of the rows; with more bad ones the run stops
    max_bad_rows: int | None = Field(default=None, ge=0)
    cache: str | None = None  # where costs are kept; None: in the user's cache folder

    @field_validator("limits", mode="before")
    @classmethod
    def _read_limits(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        known = [field.name for field in dataclasses.fields(Limits)]
        if unknown := [name for name in value if name not in known]:
            raise ValueError(f"there is no limit {unknown[0]}; there are {', '.join(known)}")
        return TypeAdapter(Limits).validate_python(dict(value))

    @model_validator(mode="after")
    def _agree(self) -> MLLMData:
        total = self.global_batch_tokens
        if total is not None and (self.packs_per_step is not None or total % self.micro_batch_tokens):
            raise ValueError("give packs_per_step, or global_batch_tokens as a multiple of micro_batch_tokens")
        for split in {source.split for source in self.sources}:
            mixed = [source for source in self.sources if source.split == split]
            weighed = [source.weight is not None for source in mixed]
            if any(weighed) and (not all(weighed) or any(source.repeats is not None for source in mixed)):
                raise ValueError(f"give all sources of {split} a weight, or none: repeats and weights do not mix")
        return self

    @property
    def step_packs(self) -> int | None:
        return self.global_batch_tokens // self.micro_batch_tokens if self.global_batch_tokens else self.packs_per_step


class BadRows:
    """Counted by source and reason, each row once; listed in a file, where there is one; too many are an error."""

    def __init__(self, settings: MLLMData, rows: int, file: Path | None = None) -> None:
        by_count = rows if settings.max_bad_rows is None else settings.max_bad_rows
        self.most, self.rows, self.file = min(by_count, int(settings.max_bad_fraction * rows)), rows, file
        self.counts: Counter[tuple[str, str]] = Counter()
        self._seen: set[tuple[str, str]] = set()
        self._listed: set[tuple[str, str]] = set()
        if file is not None and file.exists():
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
            self._listed = {(line["source"], line["where"]) for line in lines}

    def add(self, records: Iterable[BadRecord], list_them: bool = True) -> None:
        new = [record for record in records if (record.source, record.where) not in self._seen]
        self._seen |= {(record.source, record.where) for record in new}
        self.counts.update((record.source, record.reason) for record in new)
        fresh = [record for record in new if (record.source, record.where) not in self._listed]
        if self.file is not None and list_them and fresh:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.file, "a", encoding="utf-8") as out:
                out.write("".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in fresh))
        total = self.counts.total()
        if new and total > self.most:
            shown = "; ".join(f"{one.where}: {one.reason}: {one.detail[:200]}" for one in new[:3])
            raise UserError(
                f"data: {total} of {self.rows} rows are bad, and {self.most} are allowed ({self}). Such as {shown}. "
                f"{f'All are in {self.file}. ' if self.file else ''}Mend them, or raise max_bad_fraction, max_bad_rows"
            )

    def __str__(self) -> str:
        return ", ".join(f"{source}: {n} {reason}" for (source, reason), n in sorted(self.counts.items())) or "none"


class PackLoader(SampleLoader):
    """This rank's packs of the current epoch as PackedBatches, with the cursor of a `SampleLoader`: packs done."""

    dataset: PackDataset

    def __init__(self, dataset: PackDataset, bad_rows: BadRows, data_id: str, **options: Any) -> None:
        self.bad_rows, self.data_id = bad_rows, data_id
        options |= {"global_batch_size": dataset.packs_per_step, "seed": dataset.seed, "collate_fn": _only}
        super().__init__(dataset, micro_batch_size=1, shuffle=False, **options)

    def __iter__(self) -> Iterator[PackedBatch]:
        for batch, bad in super().__iter__():
            self.bad_rows.add(bad)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "plan": self._plan_id()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["plan"] != self._plan_id():
            raise UserError(
                "the data, the processor or the packing is not what the checkpoint was trained with, so its place in "
                "the epoch means nothing here: put them back, or start a new run from its weights (model.path)"
            )

    def sample_ids(self, first: int, last: int) -> list[Any]:
        """Where the rows of this rank's micro-batches `first` to `last` (exclusive) come from."""
        sources = self.dataset.mixture.sources
        packs = [self.dataset.plan.pack(index)[0] for index in super().sample_ids(first, last)]
        return [sources[which].where(row) for pack in packs for which, row in pack.tolist()]

    def _plan_id(self) -> str:
        return f"{self.data_id}-{self.dataset.plan.digest}"


def _only(items: list[Any]) -> Any:
    return items[0]


class MLLMDataKit:
    """Data for one model. `processor` may be a tokenizer; `processor` of the kit is the one to save with the model.

    `model_config` is the model's Hugging Face config, for models with positions on three axes.
    """

    def __init__(self, settings: MLLMData, processor: Any, *, model_config: Any = None, num_workers: int = 0) -> None:
        self.settings, self.num_workers = settings, num_workers
        self.sampler = Sampler(
            processor,
            settings.limits,
            most_tokens=min(settings.row_tokens or settings.micro_batch_tokens, settings.micro_batch_tokens),
            overlong=settings.overlong,
            options=settings.template,
            positions=None if model_config is None else RopePositions.of(model_config),
        )
        self.processor = self.sampler.media.processor
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mvp_engine" / "data"
        self.cache = Path(settings.cache).expanduser() if settings.cache else default
        self._opened: dict[str, tuple[Mixture, list[Costs]]] = {}

    def names(self, split: str = "train") -> list[str]:
        """The sources; a batch's `sequences["source"]` is an index into them."""
        return self._open(split)[0].names

    def dataset(
        self, split: str = "train", *, packs_per_step: int | None = None, seed: int = 0, shuffle: bool | None = None
    ) -> PackDataset:
        packs = packs_per_step or self.settings.step_packs
        if packs is None:
            raise UserError("how large is a step? Set packs_per_step or global_batch_tokens")
        mixture, costs = self._open(split)
        return PackDataset(
            mixture,
            [source.format for source in self._sources(split)],
            costs,
            self.sampler,
            budget=self.settings.micro_batch_tokens,
            packs_per_step=packs,
            seed=seed,
            shuffle=split == "train" if shuffle is None else shuffle,
        )

    def loader(
        self,
        split: str = "train",
        *,
        packs_per_step: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool | None = None,
        num_workers: int | None = None,
        pin_memory: bool = False,
        folder: str | Path | None = None,
    ) -> PackLoader:
        """Micro-batches of one pack each. Bad rows are listed in `folder`/bad_rows.jsonl; only training shuffles."""
        dataset = self.dataset(split, packs_per_step=packs_per_step, seed=seed, shuffle=shuffle)
        if not len(dataset):
            raise UserError(f"data: no row of {split} can be trained on. {self._lost(split)}")
        file = None if folder is None else Path(folder) / "bad_rows.jsonl"
        bad = BadRows(self.settings, sum(map(len, dataset.mixture.sources)), file)
        bad.add(self.bad_rows(split), list_them=rank == 0)
        return PackLoader(
            dataset,
            bad,
            self._data_id(split),
            rank=rank,
            world_size=world_size,
            num_workers=self.num_workers if num_workers is None else num_workers,
            pin_memory=pin_memory,
        )

    def engine_loader(self, engine: Any, split: str = "train") -> PackLoader:
        """For `prepare_dataloader`: sizes, ranks, workers and seed of the engine. All ranks must call it."""
        packs, data = self.settings.step_packs or engine.global_batch_size, engine.config.data
        if data.micro_batch_size != 1 or packs != engine.global_batch_size:
            raise UserError(
                f"a micro-batch is one pack: set data.micro_batch_size=1 and data.global_batch_size={packs}"
            )
        loader = self.loader(
            split,
            packs_per_step=packs,
            rank=engine.layout.data_rank,
            world_size=engine.layout.data_size,
            seed=engine.config.seed,
            num_workers=data.num_workers,
            pin_memory=engine.device.type == "cuda",
            folder=engine.run.dir,
        )
        if len(set(engine.world.all_gather(loader._plan_id()))) > 1:
            raise UserError("data: the ranks found different costs for the same rows. Do all nodes see the same files?")
        if engine.world.is_main:
            LOGGER.info("%s", self.summary(split, dataset=loader.dataset))
        return loader

    def bad_rows(self, split: str = "train") -> list[BadRecord]:
        """Those that were found before any media were decoded."""
        mixture, costs = self._open(split)
        return [
            BadRecord(name, source.where(row), *why)
            for name, source, cost in zip(mixture.names, mixture.sources, costs, strict=True)
            for row, why in sorted(cost.bad.items())
        ]

    def summary(self, split: str = "train", *, dataset: PackDataset | None = None) -> str:
        dataset = dataset or self.dataset(split)
        plan, counts = dataset.plan, np.array(dataset.mixture.counts)
        words = [f"{name}: {rows:,}" for name, rows in zip(dataset.mixture.names, counts.tolist(), strict=True)]
        return (
            f"{split}: {counts.sum():,} rows an epoch ({', '.join(words)}) -> {len(plan.rows):,} rows with "
            f"{int(plan.tokens.sum()):,} tokens in {len(plan):,} packs of {plan.budget:,}, {plan.fill:.1%} full; "
            f"{plan.steps:,} steps of {plan.packs_per_step}. {self._lost(split)}"
        )

    def source_losses(self, log_probs: Tensor, batch: PackedBatch, split: str = "train") -> dict[str, tuple[Any, Any]]:
        """Name -> (summed loss, tokens) of each source, for `ctx.log`; nothing waits for the device."""
        names = self.names(split)
        of_token = batch.sequences["source"].repeat_interleave(batch.lengths, output_size=batch.num_tokens)
        learnt = (batch.labels != IGNORE).float()
        sums, weights = (
            torch.zeros(len(names), device=learnt.device).index_add_(0, of_token, value)
            for value in (-log_probs.detach().float() * learnt, learnt)
        )
        return {f"loss_{name}": (sums[i], weights[i]) for i, name in enumerate(names)}

    def _sources(self, split: str) -> list[DataSource]:
        found = [source for source in self.settings.sources if source.split == split]
        if not found:
            raise UserError(f"data: no source has split: {split}")
        return found

    def _open(self, split: str) -> tuple[Mixture, list[Costs]]:
        if split not in self._opened:
            given = self._sources(split)
            sources = [open_source(one.path, one.root) for one in given]
            names = [one.name or Path(one.path if isinstance(one.path, str) else one.path[0]).stem for one in given]
            by = "weight" if given[0].weight is not None else "repeats"
            shares = [(one.weight if by == "weight" else one.repeats) or 1.0 for one in given]
            mixture = Mixture(list(zip(names, sources, shares, strict=True)), by)
            costs = [
                find_costs(source, one.format, self.sampler, self.cache, self.num_workers, name)
                for name, source, one in zip(names, sources, given, strict=True)
            ]
            if self.settings.overlong == "error":
                self._refuse_long(mixture, costs)
            self._opened[split] = mixture, costs
        return self._opened[split]

    def _refuse_long(self, mixture: Mixture, costs: list[Costs]) -> None:
        found = [(s, row) for s, cost in zip(mixture.sources, costs, strict=True) for row in cost.long.tolist()]
        if found:
            shown = ", ".join(source.where(row) for source, row in found[:3])
            raise UserError(
                f"data: {len(found)} row(s) have more than {self.sampler.most_tokens} tokens, such as {shown}: raise "
                "micro_batch_tokens or row_tokens, or set overlong to drop, truncate or shrink"
            )

    def _lost(self, split: str) -> str:
        _, costs = self._open(split)
        bad = Counter(reason for cost in costs for reason, _ in cost.bad.values())
        words = ", ".join(f"{n} {reason}" for reason, n in sorted(bad.items())) or "none"
        fate = {"drop": "dropped", "truncate": "truncated", "shrink": "shrunk"}.get(self.settings.overlong, "refused")
        return f"Bad rows: {words}. Over-long rows {fate}: {sum(len(cost.long) for cost in costs):,}"

    def _data_id(self, split: str) -> str:
        told = " ".join(source.fingerprint for source in self._open(split)[0].sources)
        return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
