"""MLLMDataKit: from rows of text, images, video and audio in files to packed batches.

    kit = MLLMDataKit(config.data, processor, model_config=read_config(path, {}))
    print(kit.summary("train"))
    loader = kit.engine_loader(engine, "train")  # in prepare_dataloader

For text-only data, pass a tokenizer as the processor.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mvp_engine.config.schema import Train
from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_write_text
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.hf.weights.export import drop_local_settings
from mvp_engine.hf.weights.load import NewRows
from mvp_engine.kit.build_once import make_data
from mvp_engine.kit.data.encode.processor import save_generation_config, with_new_tokens
from mvp_engine.kit.data.encode.row_encoder import RopePositions, RowEncoder
from mvp_engine.kit.data.measured_sources import MeasuredSources, no_rows, refuse_other_encoder
from mvp_engine.kit.data.pack.packs import PackDataset, PackLoader
from mvp_engine.kit.data.pack.plan import PacedMixture
from mvp_engine.kit.data.read.bad_rows import BadRows, append_new
from mvp_engine.kit.data.settings import MLLMData
from mvp_engine.model_engine import precision_on

if TYPE_CHECKING:
    from mvp_engine.kit.data.pack.stream_loader import StreamLoader
    from mvp_engine.kit.data.read.shards import Stream

LOGGER = logging.getLogger("mvp_engine")
BAD_ROWS_FILE = "bad_rows.jsonl"
OVERLONG_ROWS_FILE = "overlong_rows.jsonl"
HELD_OUT_FILE = "held_out.jsonl"
# A share in `max_bad_rows` of a stream counts at least this many rows: of the first few a fraction means little.
MIN_STREAM_ROWS = 1000
STREAM_WINDOW = 64  # packs that are filled together from a stream


class MLLMDataKit(MeasuredSources):
    """The data of one model. `processor` may be a tokenizer; `kit.processor` is the one to save with the model.

    `model_config` is the model's Hugging Face config, needed for models with three-axis positions (M-RoPE).
    """

    encoder_class = RowEncoder
    dataset_class = PackDataset

    def __init__(
        self, settings: MLLMData, processor: Any, *, model_config: Any = None, num_workers: int = 0
    ) -> None:
        super().__init__(settings, num_workers)
        self.new_rows: NewRows | None = None  # of data.new_tokens
        self.train: Train | None = None  # the length of the training, for weights by progress
        if settings.new_tokens:
            processor, self.new_rows = with_new_tokens(processor, settings.new_tokens)
        max_length = settings.max_length or settings.tokens_per_pack
        self.row_encoder = self.encoder_class(
            processor,
            settings.limits,
            max_tokens=min(max_length, settings.tokens_per_pack),
            overlong=settings.overlong,
            pairs=settings.pairs,
            options=settings.template,
            positions=None if model_config is None else RopePositions.for_config(model_config),
            fields=settings.fields,
            row_part=settings.row_part(model_config, self.cache),
        )
        self.processor = self.row_encoder.media.processor

    @classmethod
    def of(cls, config: Any, make_processor: Callable[[Any], Any]) -> MLLMDataKit:
        """The kit of an engine's config."""
        config.check_engine()
        make_data(config.made)
        model_config = read_config(config.model.path, config.model.config)
        processor, workers = make_processor(config), config.data.num_workers
        kit = cls(config.data, processor, model_config=model_config, num_workers=workers)
        kit.train = config.train
        return kit

    # ---- Loaders --------------------------------------------------------------------------------

    def dataset(
        self,
        split: str = "train",
        *,
        global_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        max_packs: int | None = None,
    ) -> PackDataset:
        """The packs of a split; `global_batch_size` (in packs) takes the place of `global_batch_tokens`.

        `max_packs`: so many packs drawn from the whole split, the same ones with any seed and global batch.
        """
        packs = global_batch_size or self.settings.global_batch_packs(None)
        if packs is None:
            raise UserError(
                "data: the global batch is not set: give global_batch_size=PACKS, or set data.global_batch_tokens"
            )
        mixture, costs = self.measured(split)
        if isinstance(mixture, PacedMixture):
            mixture.set_total(self._training_units(mixture, packs))
        return self.dataset_class(
            mixture,
            self.row_formats(split),
            costs,
            self.row_encoder,
            budget=self.settings.tokens_per_pack,
            packs_per_step=packs,
            seed=seed,
            shuffle=split == "train" if shuffle is None else shuffle,
            max_packs=max_packs,
            cache=self.cache,
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
        max_packs: int | None = None,
        num_workers: int | None = None,
        pin_memory: bool = False,
        folder: str | Path | None = None,
    ) -> PackLoader:
        """Micro-batches of one pack each. Only training shuffles. Rows that are left out are listed in `folder`."""
        dataset = self.dataset(
            split,
            global_batch_size=global_batch_size,
            seed=seed,
            shuffle=shuffle,
            max_packs=max_packs,
        )
        if not len(dataset):
            bad, long = self.bad_rows(split), self.overlong_rows(split)
            raise no_rows(split, self.left_out(split), bad, long, self.row_encoder.max_tokens)
        num_rows = sum(len(source) for source in dataset.mixture.sources)
        bad_rows = self.bad_rows_list(split, num_rows, folder)
        bad_rows.add(self.bad_rows(split), list_them=rank == 0)
        if rank == 0 and folder is not None:
            append_new(Path(folder) / OVERLONG_ROWS_FILE, self.overlong_rows(split))
            self.list_held_out(Path(folder))
        return PackLoader(
            dataset,
            bad_rows,
            self.data_id(split),
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
        global_batch_size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool | None = None,
        num_workers: int | None = None,
        pin_memory: bool = False,
        folder: str | Path | None = None,
    ) -> StreamLoader:
        """Micro-batches of one pack each, from sources that are streams. Their number is not known in advance."""
        from mvp_engine.kit.data.pack.stream_loader import (
            StreamLoader,
            StreamMixture,
            StreamPackDataset,
        )

        streams = self.streams(split)
        lanes = self.settings.stream_lanes
        weights: list[Any] = [source.weight or 1.0 for source in self.sources(split)]
        workers = self.num_workers if num_workers is None else num_workers
        if any(stream.is_pipe for stream in streams):
            if world_size > 1:
                raise UserError("data: a pipe can be read by one rank alone: write it to a file")
            lanes = 1
            workers = 0
        dataset = StreamPackDataset(
            StreamMixture(streams, weights),
            self.row_encoder,
            budget=self.settings.tokens_per_pack,
            window=STREAM_WINDOW,
            lanes_per_epoch=lanes,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=split == "train" if shuffle is None else shuffle,
            shares_lanes=split != "train",
        )
        return StreamLoader(
            dataset,
            self.bad_rows_list(split, 0, folder, MIN_STREAM_ROWS),
            global_batch_size=global_batch_size,
            num_workers=workers,
            pin_memory=pin_memory,
            stall_seconds=self.settings.stall_seconds,
            overlong_file=None if folder is None else Path(folder) / OVERLONG_ROWS_FILE,
        )

    def engine_loader(self, engine: Any, split: str = "train") -> PackLoader | StreamLoader:
        """The loader for `prepare_dataloader`, with the engine's sizes, ranks, workers, seed and precision.
        All ranks must call it."""
        config = engine.config
        self.train = config.train
        packs = self._engine_packs(engine)
        # With bf16 an encoder's first layer casts its input anyway: nothing is lost on the way.
        bf16 = precision_on(engine.device, config.train.precision) == "bf16"
        self.row_encoder.dtype = torch.bfloat16 if bf16 else torch.float32
        options = {
            "global_batch_size": packs,
            "rank": engine.layout.data_rank,
            "world_size": engine.layout.data_size,
            "seed": config.seed,
            "num_workers": config.data.num_workers,
            "pin_memory": engine.device.type == "cuda",
            "folder": engine.run.dir,
        }
        if self.is_stream(split):
            return self.stream_loader(split, **options)
        if split != "train":
            # A part of a split is drawn from all of it: in order it would be of the first source.
            options["max_packs"] = config.eval.batches
            # Every rank has packs to evaluate, however few an optimizer step has.
            options["global_batch_size"] = max(packs, engine.layout.data_size)
        loader = self.loader(split, **options)
        if len(set(engine.world.all_gather(loader.plan_id()))) > 1:
            raise UserError(
                "data: the ranks found different costs for the same rows. Do all nodes see the same files?"
            )
        if engine.world.is_main:
            LOGGER.info("%s", self.summary(split, dataset=loader.dataset))
        return loader

    # ---- Reports --------------------------------------------------------------------------------

    def summary(self, split: str = "train", *, dataset: PackDataset | None = None) -> str:
        """One line with rows, tokens, packs, steps and bad rows."""
        dataset = dataset or self.dataset(split)
        return f"{split}: {dataset.summary()} {self.left_out(split)}"

    def source_losses(
        self, log_probs_T: Tensor, batch: PackedBatch, split: str = "train"
    ) -> dict[str, tuple[Any, Any]]:
        """The (summed loss, tokens) of each source by metric name, for `ctx.log`; without a host sync."""
        names = self.source_names(split)
        source_T = batch.sequence_fields["source"].repeat_interleave(
            batch.lengths, output_size=batch.num_tokens
        )
        has_loss_T = (batch.labels != IGNORE).float()
        zeros = torch.zeros(len(names), device=has_loss_T.device)
        loss_T = -log_probs_T.detach().float() * has_loss_T
        sums = zeros.index_add(0, source_T, loss_T)
        weights = zeros.index_add(0, source_T, has_loss_T)
        return {f"loss_{name}": (sums[i], weights[i]) for i, name in enumerate(names)}

    def log_sources(self, ctx: Any, batch: PackedBatch, loss_T: Tensor) -> None:
        """Log the mean loss of the tokens of each source; of a single one, it is the loss itself."""
        if len(self.source_names(ctx.split)) > 1:
            for name, (loss_sum, weight) in self.source_losses(-loss_T, batch, ctx.split).items():
                ctx.log(name, loss_sum, weight)

    # ---- The processor --------------------------------------------------------------------------

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a completion: the tokenizer's own, and the one that the chat template writes after answers.

        They differ where a base model, with its own end-of-text token, is fine-tuned on chats.
        """
        tokenizer = self.row_encoder.media.tokenizer
        stop = self.row_encoder.template.stop_token
        found = [tokenizer.eos_token_id]
        if stop:
            found.append(tokenizer.convert_tokens_to_ids(stop))
        return list(dict.fromkeys(token for token in found if token is not None))

    def save_processor(self, folder: Path, model: str | None = None) -> None:
        """Save what belongs to a model in a Hugging Face folder: the processor with this kit's limits, and the
        generation config of the folder `model` with this kit's end-of-sequence tokens."""
        self.processor.save_pretrained(folder)
        drop_local_settings(folder)
        pad = self.row_encoder.media.tokenizer.eos_token_id
        save_generation_config(folder, model, pad, self.eos_token_ids)

    # ---- Inside ---------------------------------------------------------------------------------

    def _training_units(self, mixture: PacedMixture, packs: int) -> float | None:
        """Tokens of the training, with full packs; None if its length is not known."""
        limits = []
        if self.train is not None and self.train.max_steps is not None:
            limits.append(float(self.train.max_steps * packs * self.settings.tokens_per_pack))
        if self.train is not None and self.train.epochs is not None:
            limits.append(self.train.epochs * mixture.epoch_units)
        return min(limits, default=None)

    def _engine_packs(self, engine: Any) -> int:
        data = engine.config.data
        if data.micro_batch_size != 1:
            raise UserError("a micro-batch is one pack: leave out data.micro_batch_size")
        packs = self.settings.global_batch_packs(data.global_batch_size)
        if packs is not None and packs != engine.global_batch_size:
            raise UserError(
                f"data.global_batch_tokens: {type(engine).__name__} does not read it. "
                f"Set data.global_batch_size={packs} instead"
            )
        return engine.global_batch_size

    def list_held_out(self, folder: Path) -> None:
        """Write the rows that `hold_out` takes out of train: each line has its source and its place."""
        if not any(source.hold_out for source in self._all_sources):
            return
        lines = []
        mixture = self.mixture("eval")
        for settings, source in zip(self.sources("eval"), mixture.sources, strict=True):
            for row in range(len(source) if settings.hold_out else 0):
                record = {"source": settings.label, "where": source.where(row)}
                lines.append(json.dumps(record) + "\n")
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(folder / HELD_OUT_FILE, "".join(lines))

    def streams(self, split: str) -> list[Stream]:
        sources = self.sources(split)
        if not sources[0].stream:
            raise UserError(
                f"data: the sources of {split} are not streams: set stream: true for each, or use loader"
            )
        from mvp_engine.kit.data.read.shards import Stream

        streams = []
        for name, source in zip(self.source_names(split), sources, strict=True):
            row_format = source.row_format(self.settings)
            stream = Stream(name, source.path, source.root, row_format)
            if stream.prepared is not None:
                refuse_other_encoder(stream.prepared, self.row_encoder)
            streams.append(stream)
        if len({stream.name for stream in streams}) < len(streams):
            raise UserError("data: streams need different names: set name of each source")
        return streams

    def stream_shares(self, split: str) -> dict[str, float]:
        """The share of each stream in the rows, by name, until the first of them ends."""
        weights: list[Any] = [source.weight or 1.0 for source in self.sources(split)]
        shares = [weight / sum(weights) for weight in weights]
        return dict(zip(self.source_names(split), shares, strict=True))

    def facts(self, split: str) -> dict[str, Any]:
        """What `mvp data inspect` shows more of a split: entries of the extension point `inspect`."""
        return {}

    def bad_rows_list(
        self, split: str, num_rows: int, folder: str | Path | None, min_rows: int = 0
    ) -> BadRows:
        file = None if folder is None else Path(folder) / BAD_ROWS_FILE
        return BadRows(self.settings, num_rows, self.source_names(split), file, min_rows)


# The loss of each source of a batch, for the log.
