"""PreferenceEngine: an MLLMEngine that trains on preference pairs, or on rows with a label (KTO).

A recipe subclasses it as it would an MLLMEngine. What it adds: the loss, its reference model, and the numbers that all
ranks agree on before a step.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mvp_engine.config.schema import Config
from mvp_engine.data import rng_state, set_rng_state
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.kit.loss import sequence_log_probs
from mvp_engine.kit.mfu import MFUKit
from mvp_engine.kit.mllm import MLLMEngine
from mvp_engine.kit.preference.losses import (
    PreferenceLossKit,
    StepTerms,
    check_pairs,
    mismatched_batches,
)
from mvp_engine.kit.preference.reference import (
    AdaptersOffReference,
    CachedReference,
    CopyReference,
    Reference,
    frozen_model,
)
from mvp_engine.kit.preference.settings import PreferenceConfig
from mvp_engine.model_engine import ModelEngine


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
        budget = self.config.mllm.pack_tokens
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
