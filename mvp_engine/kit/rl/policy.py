"""Policy optimization on packed batches: advantages and returns of samples, PolicyLoss and ValueLoss.

Legend: T tokens, S sequences, A actions: tokens with a label, in the order of the batch.

The controller computes advantages for a whole step before its updates. Sums run in float64 and results are float32. The
tokens of a tool or a user inside of an answer have no label: they are no actions, and the next state of an action is
the one before the next action.

The losses are small frozen dataclasses, so that a controller can send them to its workers. They return a sum and a
weight; the model engine adds both over micro-batches and ranks and divides once. All fields are per token: entry t is
about `labels[t]`, and tokens without a label count nowhere. Numbers that a whole step must agree on, such as the
statistics of a group, are in the advantages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.kit.loss import per_token, sequence_sums
from mvp_engine.kit.rl.settings import Algorithm

Estimator = Literal["k1", "k2", "k3"]
Norm = Literal["token", "sequence", "constant"]
Log = Callable[[str, Tensor, Tensor | float], None]
EPSILON = 1e-6  # added to the standard deviation of a group
LARGEST_LOG_RATIO = 20.0  # exp of more overflows in sums, and infinity times a zero gradient is NaN


def clamp_log_ratio(log_ratio_T: Tensor) -> Tensor:
    return log_ratio_T.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def kl_penalty(log_probs_T: Tensor, reference_T: Tensor, estimator: Estimator) -> Tensor:
    """Schulman's estimates of KL(policy, reference) at each sampled token.

    k1 is unbiased and may be negative; k2 is biased with little variance; k3 is unbiased and never negative. As a term
    of a loss k1 has no gradient in expectation: use it inside of rewards.
    """
    log_ratio_T = log_probs_T - reference_T
    match estimator:
        case "k1":
            return log_ratio_T
        case "k2":
            return log_ratio_T.square() / 2
        case "k3":
            inverse_T = clamp_log_ratio(-log_ratio_T)
            return torch.expm1(inverse_T) - inverse_T
    raise UserError(f"KL estimator {estimator!r} is none of k1, k2, k3")


# ---- Groups of samples of one prompt --------------------------------------------------------------------------------


def group_advantages(
    rewards_S: Tensor,
    groups_S: Tensor,
    *,
    std: bool = True,
    leave_one_out: bool = False,
    epsilon: float = EPSILON,
) -> Tensor:
    """Each sample's reward minus the mean of its group: the samples with the same number in `groups_S`.

    `std` divides by the group's standard deviation. `leave_one_out` takes the mean of the other samples alone. Where
    all rewards of a group are equal, as that of a sample without others, advantages are 0.
    """
    rewards = rewards_S.double()
    numbers, group_S = groups_S.unique(return_inverse=True)
    zeros = rewards.new_zeros(len(numbers))
    size_S = zeros.index_add(0, group_S, torch.ones_like(rewards))[group_S]
    mean_S = zeros.index_add(0, group_S, rewards)[group_S] / size_S
    others_S = (size_S - 1).clamp(min=1)
    difference_S = rewards - mean_S
    advantages_S = difference_S
    if leave_one_out:
        advantages_S = advantages_S * size_S / others_S
    if std:
        squares_S = zeros.index_add(0, group_S, difference_S.square())[group_S]
        advantages_S = advantages_S / ((squares_S / others_S).sqrt() + epsilon)
    # Equal rewards differ from their mean by rounding, which `std` would scale up to 1.
    return torch.where(has_signal(rewards, groups_S), advantages_S, 0.0).float()


def has_signal(rewards_S: Tensor, groups_S: Tensor) -> Tensor:
    """For each sample: do the rewards of its group differ? A group of equal rewards teaches nothing."""
    numbers, group_S = groups_S.unique(return_inverse=True)
    largest = rewards_S.new_full((len(numbers),), float("-inf"))
    largest = largest.scatter_reduce(0, group_S, rewards_S, "amax")
    smallest = rewards_S.new_full((len(numbers),), float("inf"))
    smallest = smallest.scatter_reduce(0, group_S, rewards_S, "amin")
    return (largest > smallest)[group_S]


# ---- Rewards, returns and advantages of tokens ----------------------------------------------------------------------


class Actions(NamedTuple):
    """The tokens with a label."""

    tokens: Tensor  # (A,): their places among the tokens of the batch
    counts: Tensor  # (S,)

    @classmethod
    def of(cls, batch: PackedBatch) -> Actions:
        has_label_T = batch.labels != IGNORE
        sequence_T = torch.arange(batch.num_sequences).repeat_interleave(batch.lengths)
        counts_S = sequence_T[has_label_T].bincount(minlength=batch.num_sequences)
        return cls(has_label_T.nonzero()[:, 0], counts_S)

    @property
    def last(self) -> Tensor:
        """The places among the actions of each sequence's last one, without sequences that have none."""
        return (self.counts.cumsum(0) - 1)[self.counts > 0]

    def on_tokens(self, values_A: Tensor, batch: PackedBatch) -> Tensor:
        """(T,) float32: the values at the actions, 0 elsewhere."""
        values_T = torch.zeros(batch.num_tokens)
        values_T[self.tokens] = values_A.float()
        return values_T

    def discounted_sums(self, values_A: Tensor, factor: float) -> Tensor:
        """y[i] = x[i] + factor * y[i + 1], inside each sequence: all sequences at once, from their last actions."""
        sums_A = values_A.clone()
        ends_S = self.counts.cumsum(0)
        for back in range(1, int(self.counts.max())):
            at = (ends_S - 1 - back)[self.counts > back]
            sums_A[at] += factor * sums_A[at + 1]
        return sums_A


def spread(values_S: Tensor, batch: PackedBatch) -> Tensor:
    """(T,): the value of each token's sequence at tokens with a label, 0 elsewhere."""
    values_T = values_S.float().repeat_interleave(batch.lengths)
    return torch.where(batch.labels == IGNORE, 0.0, values_T)


def token_rewards(
    rewards_S: Tensor, batch: PackedBatch, kl_T: Tensor | None = None, kl: float = 0.0
) -> Tensor:
    """(T,): each sequence's reward at its last action, minus `kl` times the penalty `kl_T` at each action.

    Of several turns, what the token field `turn_rewards` says is at the turns, and the rest at the last action. A
    sequence gets what comes after its beginning: not the rewards of turns in the episode's sequences before it.
    """
    actions = Actions.of(batch)
    rewards_A = torch.zeros(len(actions.tokens), dtype=torch.float64)
    rest_S = rewards_S.double()
    if "turn_rewards" in batch.token_fields:
        turn_rewards_T = batch.token_fields["turn_rewards"]
        rewards_A += turn_rewards_T.double()[actions.tokens]
        rest_S = rest_S - batch.sequence_fields["rewarded"] - _sums(turn_rewards_T, batch)
    rewards_A[actions.last] += rest_S[actions.counts > 0]
    if kl_T is not None:
        rewards_A -= kl * kl_T.double()[actions.tokens]
    return actions.on_tokens(rewards_A, batch)


def whiten(values_T: Tensor, batch: PackedBatch, *, shift_mean: bool = True) -> Tensor:
    """Values with a mean of 0 and a variance of 1 over all actions of the batch."""
    actions = Actions.of(batch)
    values_A = values_T.double()[actions.tokens]
    mean = values_A.mean()
    variance = (values_A - mean).square().sum() / max(1, len(values_A) - 1)
    whitened_A = (values_A - mean) / (variance + 1e-8).sqrt()
    if not shift_mean:
        whitened_A = whitened_A + mean
    return actions.on_tokens(whitened_A, batch)


def reinforce_pp(rewards_T: Tensor, batch: PackedBatch, gamma: float = 1.0) -> Tensor:
    """REINFORCE++: discounted returns of the token rewards, whitened over the whole batch."""
    actions = Actions.of(batch)
    returns_A = actions.discounted_sums(rewards_T.double()[actions.tokens], gamma)
    return whiten(actions.on_tokens(returns_A, batch), batch)


def gae(
    values_T: Tensor, rewards_T: Tensor, batch: PackedBatch, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: (advantages, returns), (T,) each; the value after the last action is 0."""
    actions = Actions.of(batch)
    values_A = values_T.double()[actions.tokens]
    next_A = values_A.roll(-1)
    next_A[actions.last] = 0.0
    delta_A = rewards_T.double()[actions.tokens] + gamma * next_A - values_A
    advantages_A = actions.discounted_sums(delta_A, gamma * lam)
    returns_A = advantages_A + values_A
    return actions.on_tokens(advantages_A, batch), actions.on_tokens(returns_A, batch)


# ---- By algorithm ---------------------------------------------------------------------------------------------------


def advantage_fields(
    algorithm: Algorithm,
    batch: PackedBatch,
    rewards_S: Tensor,
    groups_S: Tensor,
    *,
    values_T: Tensor | None = None,
    kl_T: Tensor | None = None,
    kl: float = 0.0,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> dict[str, Tensor]:
    """The token fields of a step: `advantages`, and with a critic `returns` and `old_values`.

    `kl_T` is a penalty that belongs to the rewards, with the weight `kl`. Algorithms that compare the samples of a
    group subtract its sum from the sample's reward.
    """
    if algorithm.advantages in ("group", "leave_one_out"):
        if kl_T is not None:
            rewards_S = rewards_S.double() - kl * _sums(kl_T, batch)
        leave_one_out = algorithm.advantages == "leave_one_out"
        episode_S = torch.arange(batch.num_sequences)
        if (
            "episode" in batch.sequence_fields
        ):  # the sequences of an episode count once in its group
            episodes, episode_S = batch.sequence_fields["episode"].unique(return_inverse=True)
            sizes_E = episode_S.bincount()
            groups_S = torch.zeros_like(episodes).index_add(0, episode_S, groups_S) // sizes_E
            sums_E = torch.zeros(len(episodes), dtype=torch.float64)
            rewards_S = sums_E.index_add(0, episode_S, rewards_S.double()) / sizes_E
        advantages_S = group_advantages(
            rewards_S, groups_S, std=algorithm.std, leave_one_out=leave_one_out
        )[episode_S]
        return {"advantages": spread(advantages_S, batch)}
    rewards_T = token_rewards(rewards_S, batch, kl_T, kl)
    if algorithm.advantages == "reinforce_pp":
        return {"advantages": reinforce_pp(rewards_T, batch, gamma)}
    if values_T is None:
        raise UserError(f"{algorithm.name} needs the values of a critic")
    advantages_T, returns_T = gae(values_T, rewards_T, batch, gamma, lam)
    advantages_T = whiten(advantages_T, batch)
    return {"advantages": advantages_T, "returns": returns_T, "old_values": values_T.float()}


def _sums(values_T: Tensor, batch: PackedBatch) -> Tensor:
    actions = Actions.of(batch)
    sequence_A = torch.arange(batch.num_sequences).repeat_interleave(actions.counts)
    zeros = torch.zeros(batch.num_sequences, dtype=torch.float64)
    return zeros.index_add(0, sequence_A, values_T.double()[actions.tokens])


# ---- Losses -------------------------------------------------------------------------------------------------------


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
