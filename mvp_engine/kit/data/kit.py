"""MLLMDataKit: rows of text, images, video and audio as users have them, to packed batches by a plan.

    kit = MLLMDataKit(config.mllm, processor, model_config=read_config(path, {}))
    print(kit.summary("train"))
    loader = kit.engine_loader(engine, "train")  # in prepare_dataloader

Text only is the case of a tokenizer instead of a processor.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.row_encoder import RopePositions, Sampler
from mvp_engine.kit.data.pack.costs import Costs, find_costs
from mvp_engine.kit.data.pack.mixture import Mixture
from mvp_engine.kit.data.pack.packs import PackDataset, PackLoader
from mvp_engine.kit.data.pack.stream_loader import StreamLoader, WindowedPacks
from mvp_engine.kit.data.read.bad_rows import BadRecord, BadRows
from mvp_engine.kit.data.read.sources import Source, open_source
from mvp_engine.kit.data.read.streams import Stream, Streams
from mvp_engine.kit.data.settings import DataSource, MLLMData
from mvp_engine.model_engine import precision_on

LOGGER = logging.getLogger("mvp_engine")
GENERATION = "generation_config.json"
LEAST = 1000  # rows of a stream, before which a fraction of bad ones says little


class MLLMDataKit:
    """Data for one model. `processor` may be a tokenizer; `processor` of the kit is the one to save with the model.

    `model_config` is the model's Hugging Face config, for models with positions on three axes.
    """

    def __init__(
        self, settings: MLLMData, processor: Any, *, model_config: Any = None, num_workers: int = 0
    ) -> None:
        self.settings, self.num_workers = settings, num_workers
        self.sampler = Sampler(
            processor,
            settings.limits,
            most_tokens=min(
                settings.row_tokens or settings.micro_batch_tokens, settings.micro_batch_tokens
            ),
            overlong=settings.overlong,
            pairs=settings.pairs,
            options=settings.template,
            positions=None if model_config is None else RopePositions.of(model_config),
        )
        if settings.media_dtype == "bfloat16":
            self.sampler.dtype = torch.bfloat16
        self.processor = self.sampler.media.processor
        default = (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mvp_engine" / "data"
        )
        self.cache = Path(settings.cache).expanduser() if settings.cache else default
        self._opened: dict[str, tuple[Mixture, list[Costs]]] = {}

    def is_stream(self, split: str = "train") -> bool:
        return self._sources(split)[0].stream

    def names(self, split: str = "train") -> list[str]:
        """The sources; a batch's `sequences["source"]` is an index into them."""
        return [source.name or _name(source.path) for source in self._sources(split)]

    def dataset(
        self,
        split: str = "train",
        *,
        global_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
    ) -> PackDataset:
        packs = global_batch_size or self.settings.global_batch_packs(None)
        if packs is None:
            raise UserError(
                "data: the global batch is not set: give global_batch_size=PACKS, or set mllm.global_batch_tokens"
            )
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
        global_batch_size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool | None = None,
        num_workers: int | None = None,
        pin_memory: bool = False,
        folder: str | Path | None = None,
    ) -> PackLoader:
        """Micro-batches of one pack each. Bad rows are listed in `folder`/bad_rows.jsonl; only training shuffles."""
        dataset = self.dataset(
            split, global_batch_size=global_batch_size, seed=seed, shuffle=shuffle
        )
        if not len(dataset):
            raise UserError(f"data: no row of {split} can be trained on. {self._lost(split)}")
        file = None if folder is None else Path(folder) / "bad_rows.jsonl"
        bad = BadRows(
            self.settings, sum(map(len, dataset.mixture.sources)), self.names(split), file
        )
        bad.add(self.bad_rows(split), list_them=rank == 0)
        return PackLoader(
            dataset,
            bad,
            self._data_id(split),
            self.settings.stall_seconds,
            rank=rank,
            world_size=world_size,
            num_workers=self.num_workers if num_workers is None else num_workers,
            pin_memory=pin_memory,
        )

    def stream_loader(
        self,
        split: str = "train",
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool | None = None,
        num_workers: int | None = None,
        pin_memory: bool = False,
        folder: str | Path | None = None,
    ) -> StreamLoader:
        """Micro-batches of one pack each, from sources that are streams. How many there will be nobody knows."""
        given, streams = self._sources(split), self._streams(split)
        lanes, workers = (
            self.settings.stream_lanes,
            self.num_workers if num_workers is None else num_workers,
        )
        if any(stream.once for stream in streams):
            lanes, workers = 1, 0
            if world_size > 1:
                raise UserError("data: a pipe can be read by one rank alone: write it to a file")
        packs = WindowedPacks(
            Streams(streams, [source.weight or 1.0 for source in given]),
            self.sampler,
            budget=self.settings.micro_batch_tokens,
            window=self.settings.stream_window,
            lanes=lanes,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=split == "train" if shuffle is None else shuffle,
        )
        file = None if folder is None else Path(folder) / "bad_rows.jsonl"
        bad = BadRows(self.settings, 0, self.names(split), file, LEAST)
        stall = self.settings.stall_seconds
        return StreamLoader(
            packs, bad, num_workers=workers, pin_memory=pin_memory, stall_seconds=stall
        )

    def engine_loader(self, engine: Any, split: str = "train") -> PackLoader | StreamLoader:
        """For `prepare_dataloader`: sizes, ranks, workers, seed and precision of the engine. All ranks must call it."""
        data = engine.config.data
        packs = self.settings.global_batch_packs(data.global_batch_size) or engine.global_batch_size
        if data.micro_batch_size != 1:
            raise UserError("a micro-batch is one pack: set data.micro_batch_size=1")
        if packs != engine.global_batch_size:
            raise UserError(
                f"mllm.global_batch_tokens: {type(engine).__name__} does not read it. "
                f"Set data.global_batch_size={packs} instead"
            )
        if (
            self.settings.media_dtype == "auto"
        ):  # bf16 is what an encoder's first layer makes of them
            bf16 = precision_on(engine.device, engine.config.loop.precision) == "bf16"
            self.sampler.dtype = torch.bfloat16 if bf16 else torch.float32
        options = {
            "rank": engine.layout.data_rank,
            "world_size": engine.layout.data_size,
            "seed": engine.config.seed,
        }
        options |= {"num_workers": data.num_workers, "pin_memory": engine.device.type == "cuda"}
        if self.is_stream(split):
            return self.stream_loader(split, folder=engine.run.dir, **options)
        loader = self.loader(split, global_batch_size=packs, folder=engine.run.dir, **options)
        if len(set(engine.world.all_gather(loader._plan_id()))) > 1:
            raise UserError(
                "data: the ranks found different costs for the same rows. Do all nodes see the same files?"
            )
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
        words = [
            f"{name}: {rows:,}"
            for name, rows in zip(dataset.mixture.names, counts.tolist(), strict=True)
        ]
        return (
            f"{split}: {counts.sum():,} rows an epoch ({', '.join(words)}) -> {len(plan.rows):,} rows with "
            f"{int(plan.tokens.sum()):,} tokens in {len(plan):,} packs of {plan.budget:,}, {plan.fill:.1%} full; "
            f"{plan.steps:,} steps of {plan.packs_per_step}. {self._lost(split)}"
        )

    def source_losses(
        self, log_probs: Tensor, batch: PackedBatch, split: str = "train"
    ) -> dict[str, tuple[Any, Any]]:
        """Name -> (summed loss, tokens) of each source, for `ctx.log`; nothing waits for the device."""
        names = self.names(split)
        of_token = batch.sequence_fields["source"].repeat_interleave(
            batch.lengths, output_size=batch.num_tokens
        )
        learnt = (batch.labels != IGNORE).float()
        sums, weights = (
            torch.zeros(len(names), device=learnt.device).index_add_(0, of_token, value)
            for value in (-log_probs.detach().float() * learnt, learnt)
        )
        return {f"loss_{name}": (sums[i], weights[i]) for i, name in enumerate(names)}

    def row(self, split: str, sample: int) -> tuple[Source, Any, str | None]:
        """Of a batch's `sequences["sample"]`: its source, the row as it is there, and its format where one is named."""
        mixture, _ = self._open(split)
        for one, source in zip(self._sources(split), mixture.sources, strict=True):
            if sample < len(source):
                return source, source[sample], one.format
            sample -= len(source)
        raise IndexError(f"{split} has no sample {sample}")

    @property
    def stops(self) -> list[int]:
        """Tokens that end what the model writes: the tokenizer's own, and what the chat template puts behind answers.

        They are not the same where a base model, whose texts end in one way, learns to chat.
        """
        tokenizer, written = self.sampler.media.tokenizer, self.sampler.template.stop
        found = [
            tokenizer.eos_token_id,
            tokenizer.convert_tokens_to_ids(written) if written else None,
        ]
        return list(dict.fromkeys(id for id in found if id is not None))

    def save_processor(self, folder: Path, model: str | None = None) -> None:
        """What goes with a model into a Hugging Face folder: the processor with this kit's limits, and how to generate.

        The latter is that of the model's own folder, if it has one, and says where answers end: nothing else does.
        """
        self.processor.save_pretrained(folder)
        given = None if model is None else Path(model).expanduser() / GENERATION
        pad = {"pad_token_id": self.sampler.media.tokenizer.eos_token_id}
        about = json.loads(given.read_text()) if given is not None and given.is_file() else pad
        ends = about.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        ends += [id for id in self.stops if id not in ends]
        about["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
        (folder / GENERATION).write_text(json.dumps(about, indent=2) + "\n")

    def _sources(self, split: str) -> list[DataSource]:
        found = [source for source in self.settings.sources if source.split == split]
        if not found:
            raise UserError(f"data: no source has split: {split}")
        return found

    def _streams(self, split: str) -> list[Stream]:
        given = self._sources(split)
        if not given[0].stream:
            raise UserError(
                f"data: the sources of {split} are no streams: set stream: true for each, or use loader"
            )
        names = self.names(split)
        return [
            Stream(name, one.path, one.root, one.format)
            for name, one in zip(names, given, strict=True)
        ]

    def _open(self, split: str) -> tuple[Mixture, list[Costs]]:
        if split not in self._opened:
            given = self._sources(split)
            sources = [open_source(one.path, one.root) for one in given]
            if given[0].stream:
                raise UserError(
                    f"data: the sources of {split} are streams, of which no plan is made: use stream_loader"
                )
            names = self.names(split)
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
        found = [
            (s, row)
            for s, cost in zip(mixture.sources, costs, strict=True)
            for row in cost.long.tolist()
        ]
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
        fate = {"drop": "dropped", "truncate": "truncated", "shrink": "shrunk"}.get(
            self.settings.overlong, "refused"
        )
        return (
            f"Bad rows: {words}. Over-long rows {fate}: {sum(len(cost.long) for cost in costs):,}"
        )

    def _data_id(self, split: str) -> str:
        told = " ".join(source.fingerprint for source in self._open(split)[0].sources)
        return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


def load_processor(folder: str | Path) -> Any:
    """The processor of a model's folder, or its tokenizer where it has no processor."""
    if not Path(folder).expanduser().is_dir():
        raise UserError(f"there is no folder {folder} with a model's processor or tokenizer")
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(Path(folder).expanduser(), local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} has no processor or tokenizer that transformers can read: {error}"
        ) from None


def _name(path: str | list[str]) -> str:
    """Of a file, of a function, or stdin."""
    first = Path(path if isinstance(path, str) else path[0])
    if ":" in first.name and not first.exists():
        return first.name.rpartition(":")[2]
    return "stdin" if first.name == "-" else Path(first.name.removesuffix(".gz")).stem
