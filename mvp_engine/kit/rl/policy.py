"""PolicyLoss and ValueLoss: policy optimization on packed batches.

Legend: T tokens, S sequences.

Both are small frozen dataclasses, so that a controller can send them to its workers. They return a sum and a weight;
the model engine adds both over micro-batches and ranks and divides once. All fields are per token: entry t is about
`labels[t]`, and tokens without a label count nowhere. Numbers that a whole step must agree on, such as the statistics
of a group, are in the advantages (`advantages.py`), which are computed before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.kit.loss import per_token, sequence_sums
from mvp_engine.kit.rl.advantages import Estimator, clamp_log_ratio, kl_penalty

Log = Callable[[str, Tensor, Tensor | float], None]
Norm = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped policy gradient: PPO, GRPO, GSPO, CISPO and relatives, by their options.

    It reads the token fields `advantages` and `old_log_probs` (without them the policy is the one that sampled, and the
    ratio is 1), `reference_log_probs` for the KL term, `sampler_log_probs` for the gap, the importance correction and
    `ratio_to="sampler"`.
    """

    clip: tuple[float, float] = (0.2, 0.2)  # below and above 1
    dual_clip: float | None = None  # the largest ratio that counts where the advantage is negative
    ratio: Literal["token", "sequence"] = "token"  # sequence: its geometric mean (GSPO)
    ratio_to: Literal["old", "sampler"] = "old"  # sampler: samples by older weights, as they are
    cispo: bool = False  # the clipped ratio as a weight without gradient: no token loses its own
    kl: float = 0.0  # the weight of the KL divergence from the reference
    kl_estimator: Estimator = "k3"
    entropy: float = 0.0  # the weight of the entropy bonus
    # token: the mean over tokens. sequence: the mean over sequences of the mean over a sequence's tokens.
    # constant: the sum over tokens, divided by the number of sequences times `length`.
    norm: Norm = "token"
    length: float | None = None
    temperature: float = 1.0
    # The largest weight exp(old - sampler) of a token, which corrects for a sampler that is not the trainer.
    importance_cap: float | None = None

    def __post_init__(self) -> None:
        low, high = self.clip
        self._check(
            "clip", 0 <= low <= 1 and high >= 0, "(low, high) with 0 <= low <= 1, high >= 0"
        )
        above = self.dual_clip is None or self.dual_clip > 1 + high
        self._check("dual_clip", above, f"above the clip range's end {1 + high}, or None")
        self._check("dual_clip", self.dual_clip is None or not self.cispo, "None with cispo")
        self._check("ratio", self.ratio in ("token", "sequence"), "token or sequence")
        self._check("kl_estimator", self.kl_estimator in ("k1", "k2", "k3"), "k1, k2 or k3")
        self._check(
            "norm", self.norm in ("token", "sequence", "constant"), "token, sequence or constant"
        )
        has_length = self.length is not None and self.length > 0
        self._check(
            "length",
            has_length == (self.norm == "constant"),
            "set, above 0, with norm=constant alone",
        )
        self._check("temperature", self.temperature > 0, "above 0")
        is_cap = self.importance_cap is None or self.importance_cap > 0
        self._check("importance_cap", is_cap, "above 0, or None")
        self._check("ratio_to", self.ratio_to in ("old", "sampler"), "old or sampler")
        both = self.ratio_to == "sampler" and self.importance_cap is not None
        self._check(
            "importance_cap", not both, "None with ratio_to=sampler, which corrects already"
        )

    def _check(self, name: str, is_valid: bool, wanted: str) -> None:
        if not is_valid:
            raise UserError(f"PolicyLoss: {name}={getattr(self, name)} must be {wanted}")

    def __call__(self, model: nn.Module, batch: PackedBatch, log: Log) -> tuple[Tensor, Tensor]:
        """`(loss_sum, weight)` of a micro-batch; `log(name, sum, weight)` gets the metrics."""
        fields = batch.token_fields
        # At temperature 1, too: placeholders of media, which are never sampled, have no probability then.
        outputs = model(batch, ["log_probs", "label_entropy"], temperature=self.temperature)
        log_probs_T = outputs["log_probs"]
        # The policy before the step; with ratio_to=sampler, that of this optimizer step.
        trainer_T = fields.get("old_log_probs", log_probs_T.detach())
        old_T = trainer_T
        if self.ratio_to == "sampler":
            old_T = self._field(batch, "sampler_log_probs")
        has_loss_T = batch.labels != IGNORE
        tokens = has_loss_T.sum()

        def log_mean(name: str, values_T: Tensor) -> None:
            log(name, torch.where(has_loss_T, values_T.detach(), 0.0).sum(), tokens)

        ratio_T = self._ratios(log_probs_T, old_T, batch)
        loss_T, is_clipped_T = self._surrogate(ratio_T, log_probs_T, fields["advantages"])
        log_mean("ratio", ratio_T)
        log_mean("clip_fraction", is_clipped_T.float())
        log_mean("approx_kl", kl_penalty(old_T, log_probs_T.detach(), "k3"))
        log_mean("entropy", outputs["label_entropy"])
        if "sampler_log_probs" in fields:
            log_mean("gap", (trainer_T - fields["sampler_log_probs"]).abs())
        if self.importance_cap is not None:
            weight_T = clamp_log_ratio(old_T - self._field(batch, "sampler_log_probs")).exp()
            loss_T = loss_T * weight_T.clamp(max=self.importance_cap)
        if self.kl or "reference_log_probs" in fields:
            reference_T = self._field(batch, "reference_log_probs")
            kl_T = kl_penalty(log_probs_T, reference_T, self.kl_estimator)
            log_mean("kl", kl_T)
            loss_T = loss_T + self.kl * kl_T
        if self.entropy:
            loss_T = loss_T - self.entropy * outputs["label_entropy"]
        return self._normed(torch.where(has_loss_T, loss_T, 0.0), batch)

    # ---- Inside -------------------------------------------------------------------------------------------

    def _ratios(self, log_probs_T: Tensor, old_T: Tensor, batch: PackedBatch) -> Tensor:
        log_ratio_T = log_probs_T - old_T
        if self.ratio == "sequence":
            has_loss_T = batch.labels != IGNORE
            sums_S = sequence_sums(torch.where(has_loss_T, log_ratio_T.detach(), 0.0), batch)
            mean_S = sums_S / sequence_sums(has_loss_T, batch).clamp(min=1)
            # The sequence's value with each token's own gradient, so that advantages may differ by token.
            log_ratio_T = per_token(mean_S, batch) + log_probs_T - log_probs_T.detach()
        return clamp_log_ratio(log_ratio_T).exp()

    def _surrogate(
        self, ratio_T: Tensor, log_probs_T: Tensor, advantages_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of each token, and where the clipping takes its gradient (of cispo: bounds its weight)."""
        low, high = self.clip
        clipped_T = ratio_T.clamp(1 - low, 1 + high)
        if self.cispo:
            return -clipped_T.detach() * advantages_T * log_probs_T, clipped_T != ratio_T
        plain_T = -advantages_T * ratio_T
        bounded_T = -advantages_T * clipped_T
        loss_T = torch.maximum(plain_T, bounded_T)
        is_clipped_T = bounded_T > plain_T
        if self.dual_clip is not None:
            largest_T = -advantages_T * self.dual_clip
            is_over_T = (advantages_T < 0) & (loss_T > largest_T)
            loss_T = torch.where(is_over_T, largest_T, loss_T)
            is_clipped_T = is_clipped_T | is_over_T
        return loss_T, is_clipped_T

    def _normed(self, loss_T: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        if self.norm == "token":
            return loss_T.sum(), batch.num_loss_tokens
        tokens_S = sequence_sums(batch.labels != IGNORE, batch)
        sequences = (tokens_S > 0).sum()
        if self.norm == "constant":
            assert self.length is not None
            return loss_T.sum() / self.length, sequences
        return (sequence_sums(loss_T, batch) / tokens_S.clamp(min=1)).sum(), sequences

    def _field(self, batch: PackedBatch, name: str) -> Tensor:
        if name not in batch.token_fields:
            option = "kl" if name == "reference_log_probs" else "importance_cap"
            if self.ratio_to == "sampler" and option != "kl":
                option = "ratio_to"
            value = getattr(self, option)
            raise UserError(
                f"PolicyLoss: {option}={value} needs the token field {name} in the batch"
            )
        return batch.token_fields[name]


@dataclass(frozen=True)
class ValueLoss:
    """Half of the squared error of values, per token; with `clip`, PPO's bound on how far a value may move.

    It reads the token fields `returns`, and `old_values` with `clip`.
    """

    clip: float | None = None

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip <= 0:
            raise UserError(f"ValueLoss: clip={self.clip} must be above 0, or None")

    def __call__(self, model: nn.Module, batch: PackedBatch, log: Log) -> tuple[Tensor, Tensor]:
        """`(loss_sum, weight)` of a micro-batch; `log(name, sum, weight)` gets the metrics."""
        has_loss_T = batch.labels != IGNORE
        values_T = torch.where(has_loss_T, model(batch, ["values"])["values"], 0.0)
        returns_T = batch.token_fields["returns"]
        tokens = batch.num_loss_tokens
        error_T = (values_T - returns_T).square()
        loss_T = error_T
        if self.clip is not None:
            old_T = batch.token_fields["old_values"]
            bounded_T = old_T + (values_T - old_T).clamp(-self.clip, self.clip)
            bounded_error_T = (bounded_T - returns_T).square()
            loss_T = torch.maximum(error_T, bounded_error_T)
            is_clipped_T = has_loss_T & (bounded_error_T > error_T)
            log("value_clip_fraction", is_clipped_T.sum(), tokens)
        log("values", values_T.detach().sum(), tokens)
        log("returns", torch.where(has_loss_T, returns_T, 0.0).sum(), tokens)
        return torch.where(has_loss_T, 0.5 * loss_T, 0.0).sum(), tokens
