"""Reference models of preference losses: the log-prob of each sequence under the model that training started from.

Four kinds: a second, frozen model (`copy`), the model without its adapters (`adapters_off`), log-probs that were
computed once before training (`cached`), and none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mvp_engine.config.schema import Experts
from mvp_engine.data import keep_rng_state
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_path
from mvp_engine.hf.lora.lora_layers import adapters_off
from mvp_engine.hf.model.adapter import cast_frozen_weights
from mvp_engine.hf.weights.load import NewRows, fingerprint
from mvp_engine.kit.data import MLLMDataKit
from mvp_engine.kit.loss import sequence_log_probs
from mvp_engine.kit.mfu import MFUKit
from mvp_engine.kit.mllm import MLLMEngine
from mvp_engine.kit.model import MLLMModelKit
from mvp_engine.model_engine import ModelEngine, ModelSource, Settings, engine_class, precision_on
from mvp_engine.model_engine.base import DTYPES


class Reference(Protocol):
    def log_probs(self, batch: PackedBatch, split: str) -> Tensor:
        """The log-prob of each sequence's tokens with a label, on the batch's device, without a gradient."""

    def count_flops(self, ctx: StepContext) -> None:
        """Count the FLOPs of this step's `log_probs`."""


def frozen_model(
    source: Any, model_type: str = "language_model", new_rows: NewRows | None = None
) -> Any:
    """A model without adapters that never trains, on the meta device; `source` is a path or the section `model`."""
    source = ModelSource(source) if isinstance(source, str) else source
    return MLLMModelKit().build(source, model_type, new_rows).requires_grad_(False)


def frozen_engine(engine: MLLMEngine, model: Any, settings: Settings | None = None) -> ModelEngine:
    """A second model engine on the layout of the first: in a forward step both run the same micro-batch."""
    config = engine.config
    if settings is None:
        settings = Settings.from_config(config, precision_on(engine.device, config.train.precision))
    dtype = DTYPES[settings.precision]
    # Half of the memory, and exact: the folder has this dtype.
    if model.export_dtype == dtype and dtype != torch.float32:
        cast_frozen_weights(model, dtype)
    frozen = dataclasses.replace(
        settings,
        freeze=(),
        activation_checkpointing="none",
        clip_grad_norm=None,
        spike_sigmas=None,
        offload_outside_steps="none",
        quantize={},  # for adapters, which it has not
        experts=Experts(),
    )
    kind = engine_class(config.model.type, config.model.backend)
    second: ModelEngine = kind(model, engine.layout, frozen)
    second.initialize()
    return second


def open_reference(engine: Any, splits: Iterable[str]) -> Reference | None:
    """The reference of `config.reference`, for a policy that has its weights. The random state stays as it is."""
    with keep_rng_state():  # a resumed run has its random state by now
        if engine.config.reference == "adapters_off":
            if (folder := getattr(engine.model, "adapter_folder", None)) is not None:
                raise UserError(
                    f"preference.reference=adapters_off: training starts from the adapter {folder}, so the model "
                    "without it is no reference. Set preference.reference=cached, or merge the adapter first (mvp "
                    "export RUN OUT)"
                )
            return AdaptersOffReference(engine)
        if engine.config.reference == "cached":
            return CachedReference(engine, splits)
    reference: Reference | None = engine.reference  # a copy was opened with the model
    return reference


class ForwardReference:
    """A reference that runs a forward of its own in each step: its FLOPs count."""

    def __init__(self, engine: MLLMEngine) -> None:
        self.config = engine.config.model

    @cached_property
    def mfu(self) -> MFUKit:
        with keep_rng_state():
            return MFUKit(frozen_model(self.config, self.config.type))

    def count_flops(self, ctx: StepContext) -> None:
        self.mfu.count(ctx)


class CopyReference(ForwardReference):
    """A second model engine with the weights that the policy starts from."""

    def __init__(self, engine: MLLMEngine) -> None:
        super().__init__(engine)
        model = engine.config.model
        self.engine = frozen_engine(engine, frozen_model(model, model.type, engine.data.new_rows))

    def log_probs(self, batch: PackedBatch, split: str) -> Tensor:
        with self.engine.eval_mode():
            return sequence_log_probs(self.engine.model(batch, ["log_probs"])["log_probs"], batch)


class AdaptersOffReference(ForwardReference):
    """The policy with its LoRA adapters switched off."""

    def __init__(self, engine: MLLMEngine) -> None:
        super().__init__(engine)
        self.engine = engine.model_engine
        with adapters_off(self.engine.model):
            pass  # the switch exists before anything is compiled

    def log_probs(self, batch: PackedBatch, split: str) -> Tensor:
        model = self.engine.model
        with self.engine.eval_mode(), adapters_off(model):
            return sequence_log_probs(model(batch, ["log_probs"])["log_probs"], batch)


class CachedReference:
    """Log-probs of all rows, by sample and side. A file per split in the data kit's cache, for all runs alike."""

    def __init__(self, engine: MLLMEngine, splits: Iterable[str]) -> None:
        self.tables: dict[str, Tensor] = {}
        for split in splits:
            file = cache_file(engine, split)
            if not engine.world.broadcast(file.is_file()):
                if engine.checkpoint:
                    raise UserError(
                        f"preference.reference=cached: {file} is missing, and a checkpoint has other weights than "
                        "the reference. Restore the file, or set preference.reference=copy"
                    )
                computed = compute_table(engine, split)
                if engine.world.is_main:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with atomic_path(file) as path, open(path, "wb") as out:
                        np.save(out, computed)
            # Rank 0 alone reads: other nodes may have a cache folder of their own.
            table = np.load(file, allow_pickle=False) if engine.world.is_main else None
            self.tables[split] = torch.from_numpy(engine.world.broadcast(table)).to(engine.device)

    def log_probs(self, batch: PackedBatch, split: str) -> Tensor:
        is_rejected_S = batch.sequence_fields["side"] == -1
        return self.tables[split][batch.sequence_fields["sample"], is_rejected_S.long()]

    def count_flops(self, ctx: StepContext) -> None:
        """A table is read: there are none."""


def cache_file(engine: MLLMEngine, split: str) -> Path:
    """The file of a split, named after everything that the log-probs depend on."""
    model: Any = engine.model
    encoder = engine.data.row_encoder
    source = model.source
    weights = fingerprint(source) if source else f"random {engine.config.seed}"
    settings = engine.model_engine.settings
    facts = [
        engine.data.data_id(split),
        encoder.fingerprint,
        f"{encoder.max_tokens} {encoder.overlong}",
        json.dumps(model.hf.config.to_dict(), default=str, sort_keys=True),
        weights,
        settings.precision,
    ]
    if settings.fp8 or settings.quantize:
        facts.append(f"{settings.fp8} {settings.quantize}")
    key = hashlib.blake2b("\0".join(facts).encode(), digest_size=12).hexdigest()
    return engine.data.cache / f"reference_log_probs-{key}.npy"


def compute_table(engine: MLLMEngine, split: str) -> np.ndarray:
    """The log-probs of the chosen and the rejected side of all rows of a split, by the policy before training.

    All ranks call it. Rows that are left out, such as bad ones, have NaN.
    """
    kit = engine.data
    if kit.is_stream(split):
        raise UserError(
            "preference.reference=cached needs rows with an index: a stream has none. Set preference.reference=copy"
        )
    # Each row once, whatever its source's share of an epoch is.
    sources = [one.model_copy(update={"weight": None, "repeats": None}) for one in kit._all_sources]
    every_row = MLLMDataKit(
        kit.settings.model_copy(
            update={"sources": sources, "mixture": None, "new_tokens": {}}
        ),  # the processor has them
        kit.processor,
        num_workers=kit.num_workers,
    )
    every_row.row_encoder = kit.row_encoder
    loader = every_row.loader(
        split,
        global_batch_size=engine.global_batch_size,
        rank=engine.layout.data_rank,
        world_size=engine.layout.data_size,
        shuffle=False,
    )
    model_engine = engine.model_engine
    rows: list[tuple[list[int], list[int], list[float]]] = []

    def step(batch: PackedBatch) -> None:
        sums_S = sequence_log_probs(model_engine.model(batch, ["log_probs"])["log_probs"], batch)
        if not model_engine.is_dummy:
            fields = batch.sequence_fields
            rows.append((fields["sample"].tolist(), fields["side"].tolist(), sums_S.tolist()))

    with model_engine.eval_mode():
        for _ in model_engine.infer_micro_batches(loader, step):
            pass
    mixture, _ = kit.measured(split)
    table = np.full((sum(len(source) for source in mixture.sources), 2), np.nan, np.float32)
    for of_rank in engine.world.all_gather(rows if engine.layout.is_mp_src_rank else []):
        for samples, sides, sums in of_rank:
            places = [
                (sample, int(side == -1)) for sample, side in zip(samples, sides, strict=True)
            ]
            for place, value in zip(places, sums, strict=True):
                table[place] = value
    return table
