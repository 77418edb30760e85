"""PreferenceEngine: an MLLMEngine that trains on preference pairs, or on rows with a label (KTO).

A recipe subclasses it as it would an MLLMEngine. What it adds: the loss, its reference model, and the numbers that all
ranks agree on before a step.
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
import torch.distributed as dist
from torch import Tensor

from mvp_engine.config.schema import Config, Experts
from mvp_engine.data import rng_state, set_rng_state
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_path
from mvp_engine.hf.lora.lora_layers import adapters_off
from mvp_engine.hf.model.adapter import cast_frozen_weights
from mvp_engine.hf.weights.load import fingerprint
from mvp_engine.kit.data import MLLMDataKit
from mvp_engine.kit.loss import sequence_log_probs
from mvp_engine.kit.mfu import MFUKit
from mvp_engine.kit.mllm import MLLMEngine
from mvp_engine.kit.model import MLLMModelKit
from mvp_engine.kit.preference.losses import (
    PreferenceLossKit,
    StepTerms,
    check_pairs,
    mismatched_batches,
)
from mvp_engine.kit.preference.settings import PreferenceConfig
from mvp_engine.model_engine import ModelEngine, Settings, engine_class
from mvp_engine.model_engine.base import DTYPES


class PreferenceEngine(MLLMEngine):
    config_class: type[Config] = PreferenceConfig
    config: PreferenceConfig
    title = "What the model answers after preference training"
    reference: Reference | None = None
    terms = StepTerms()

    @cached_property
    def preference(self) -> PreferenceLossKit:
        return PreferenceLossKit(self.config.preference)

    # ---- The reference ------------------------------------------------------------------------------------

    def _build_model_engine(self) -> ModelEngine:
        model_engine = super()._build_model_engine()
        if self.config.reference == "copy":
            self.reference = CopyReference(self, model_engine.settings)
        return model_engine

    def before_train(self) -> None:
        super().before_train()
        self._open_reference(["train", "eval"] if self.config.loop.eval_interval else ["train"])
        if self.config.reference in ("copy", "adapters_off"):
            self.reference_mfu = MFUKit(frozen_model(self))

    def before_evaluate(self) -> None:
        super().before_evaluate()
        self._open_reference(["eval"])

    def _open_reference(self, splits: list[str]) -> None:
        outside = rng_state()  # a resumed run has its random state by now
        if self.config.reference == "adapters_off":
            self.reference = AdaptersOffReference(self)
        elif self.config.reference == "cached":
            self.reference = CachedReference(self, splits)
        set_rng_state(outside)

    def _reference_log_probs(self, batch: PackedBatch, split: str) -> Tensor | None:
        return None if self.reference is None else self.reference.log_probs(batch, split)

    # ---- Rows and steps ---------------------------------------------------------------------------------

    def prepare_dataloader(self, split: str) -> Any:
        if self.config.preference.loss != "kto" and not self.config.preference.nll_weight:
            self.data.require_pairs(split)
        return super().prepare_dataloader(split)

    def train_pre_step(self, ctx: StepContext) -> None:
        super().train_pre_step(ctx)
        if self.config.reference in ("copy", "adapters_off"):
            self.reference_mfu.count(ctx)
        if self.config.preference.loss != "kto":
            for batch in ctx.micro_batches:
                check_pairs(batch)
        self.terms = self.step_terms(ctx)

    def step_terms(self, ctx: StepContext) -> StepTerms:
        """What the micro-batches of all ranks must know of the step before their losses."""
        return StepTerms(self._nll_scale(ctx.micro_batches), self._kl(ctx))

    def _nll_scale(self, micro_batches: list[PackedBatch]) -> float:
        """Pairs per token of the NLL term in the whole step: the engine divides both terms by the pairs."""
        if not self.config.preference.nll_weight:
            return 0.0
        counts = [float(number) for number in self.preference.count(micro_batches)]
        pairs, tokens = self.world.all_reduce(counts, torch.add)
        return pairs / max(1.0, tokens)

    def _kl(self, ctx: StepContext) -> Tensor | float:
        """KTO: the mean log-ratio of mismatched answers over all rows of the step, at least 0."""
        if self.config.preference.loss != "kto":
            return 0.0
        budget = self.config.mllm.tokens_per_pack
        parts, rows = mismatched_batches(ctx.micro_batches, self.layout, budget)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self.model_engine.eval_mode():
            for log_ratio in self.model_engine.infer_micro_batches(parts, self._log_ratio):
                total += log_ratio
        if self.world.size > 1:
            dist.all_reduce(total)
        kl = (total / self.layout.model_parallel_size / max(1, rows)).clamp(min=0).float()
        ctx.log("kl", kl)
        return kl

    def _log_ratio(self, batch: PackedBatch) -> Tensor:
        policy_S = sequence_log_probs(self.model(batch, ["log_probs"])["log_probs"], batch)
        assert self.reference is not None
        return (policy_S - self.reference.log_probs(batch, "train")).sum()

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        # The reference first: its activations are gone before those of the policy are kept.
        reference_S = self._reference_log_probs(micro_batch, ctx.split)
        terms = self.terms if ctx.split == "train" else StepTerms()
        return self.preference(ctx, self.model, micro_batch, reference_S, terms)

    # ---- Evaluation ---------------------------------------------------------------------------------------

    def generation_rows(self, micro_batch: PackedBatch) -> Tensor:
        """Good answers only: a pair has its prompt twice."""
        return self.preference.is_good(micro_batch) & super().generation_rows(micro_batch)

    def eval_end(self, ctx: StepContext) -> None:
        if self.config.preference.nll_weight:
            self._add_nll_to_loss(ctx)
        super().eval_end(ctx)

    def _add_nll_to_loss(self, ctx: StepContext) -> None:
        """The loss of an evaluation has the NLL term too: its mean is known at the end."""
        own = ctx.metrics.state_dict()
        sums = dict(zip(own["names"], own["device"].tolist(), strict=True))
        gathered = self.world.all_gather([sums.get(f"mean/{name}") for name in ("loss", "nll")])
        pairs = sum(loss[1] for loss, _ in gathered if loss)
        nll = sum(nll[0] for _, nll in gathered if nll)
        tokens = sum(nll[1] for _, nll in gathered if nll)
        if self.layout.is_metrics_rank:
            ctx.log("loss", self.config.preference.nll_weight * nll / max(1, tokens) * pairs, 0.0)


# Reference models of preference losses: the log-prob of each sequence under the model that training started from.
#
# Four kinds: a second, frozen model (`copy`), the model without its adapters (`adapters_off`), log-probs that were
# computed once before training (`cached`), and none.


class Reference(Protocol):
    def log_probs(self, batch: PackedBatch, split: str) -> Tensor:
        """The log-prob of each sequence's tokens with a label, on the batch's device, without a gradient."""


def frozen_model(engine: PreferenceEngine) -> Any:
    """The model that training starts from, without adapters, on the meta device."""
    model = MLLMModelKit().build(engine.config.model, engine.config.model.type)
    return model.requires_grad_(False)


def frozen_engine(engine: MLLMEngine, model: Any, settings: Settings) -> ModelEngine:
    """A second model engine on the layout of the first: in a forward step both run the same micro-batch."""
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
        offload="none",
        quantize={},  # for adapters, which it has not
        experts=Experts(),
    )
    kind = engine_class(engine.config.model.type, engine.config.model.backend)
    second: ModelEngine = kind(model, engine.layout, frozen)
    second.initialize()
    return second


class CopyReference:
    """A second model engine with the weights that the policy starts from."""

    def __init__(self, engine: PreferenceEngine, settings: Settings) -> None:
        self.engine = frozen_engine(engine, frozen_model(engine), settings)

    def log_probs(self, batch: PackedBatch, split: str) -> Tensor:
        with self.engine.eval_mode():
            return sequence_log_probs(self.engine.model(batch, ["log_probs"])["log_probs"], batch)


class AdaptersOffReference:
    """The policy with its LoRA adapters switched off."""

    def __init__(self, engine: PreferenceEngine) -> None:
        self.engine = engine.model_engine
        with adapters_off(self.engine.model):
            pass  # the switch exists before anything is compiled

    def log_probs(self, batch: PackedBatch, split: str) -> Tensor:
        model = self.engine.model
        with self.engine.eval_mode(), adapters_off(model):
            return sequence_log_probs(model(batch, ["log_probs"])["log_probs"], batch)


class CachedReference:
    """Log-probs of all rows, by sample and side. A file per split in the data kit's cache, for all runs alike."""

    def __init__(self, engine: PreferenceEngine, splits: Iterable[str]) -> None:
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


def cache_file(engine: PreferenceEngine, split: str) -> Path:
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


def compute_table(engine: PreferenceEngine, split: str) -> np.ndarray:
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
        kit.settings.model_copy(update={"sources": sources}),
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
