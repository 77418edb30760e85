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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.kit.loss import per_token, sequence_sums
from mvp_engine.kit.rl.settings import Algorithm, Correction, RLConfig

Estimator = Literal["k1", "k2", "k3"]
Norm = Literal["token", "sequence", "constant"]
RATIOS = ("token", "sequence", "clipped_sequence")
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


def old_log_probs(batch: PackedBatch) -> Tensor:
    """Of the policy before the step: by the actor where it has computed them, else by the sampler."""
    return batch.token_fields.get("old_log_probs", batch.token_fields["sampler_log_probs"])


# ---- Groups of samples of one prompt --------------------------------------------------------------------------------


def group_advantages(
    rewards_S: Tensor,
    groups_S: Tensor,
    *,
    std: bool = True,
    leave_one_out: bool = False,
    weights_S: Tensor | None = None,
    episodes_S: Tensor | None = None,
) -> Tensor:
    """Each sample's reward minus the mean of its group: the samples with the same number in `groups_S`.

    `std` divides by the group's standard deviation. `leave_one_out` takes the mean of the other samples alone.
    `weights_S` are the weights of that mean; with lengths it is the optimal baseline of OPO (Hao et al., 2025). Where
    all rewards of a group are equal, as that of a sample without others, advantages are 0. Sequences with the same
    number in `episodes_S` are one sample, whose reward is the mean of theirs and whose weight is the sum.
    """
    if episodes_S is not None:
        numbers, episode_S = episodes_S.unique(return_inverse=True)
        sizes_E = episode_S.bincount()
        groups_E = torch.zeros_like(numbers).index_add(0, episode_S, groups_S) // sizes_E
        sums_E = torch.zeros(len(numbers), dtype=torch.float64)
        rewards_E = sums_E.index_add(0, episode_S, rewards_S.double()) / sizes_E
        options: dict[str, Any] = {"std": std, "leave_one_out": leave_one_out}
        if weights_S is not None:
            options["weights_S"] = sums_E.index_add(0, episode_S, weights_S.double())
        return group_advantages(rewards_E, groups_E, **options)[episode_S]
    rewards = rewards_S.double()
    numbers, group_S = groups_S.unique(return_inverse=True)
    zeros = rewards.new_zeros(len(numbers))
    size_S = zeros.index_add(0, group_S, torch.ones_like(rewards))[group_S]
    weights = torch.ones_like(rewards) if weights_S is None else weights_S.double()
    total_S = zeros.index_add(0, group_S, weights)[group_S]
    mean_S = zeros.index_add(0, group_S, weights * rewards)[group_S] / total_S
    others_S = (size_S - 1).clamp(min=1)
    difference_S = rewards - mean_S
    advantages_S = difference_S
    if leave_one_out:
        advantages_S = advantages_S * size_S / others_S
    if std:
        squares_S = zeros.index_add(0, group_S, difference_S.square())[group_S]
        advantages_S = advantages_S / ((squares_S / others_S).sqrt() + EPSILON)
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
    return of_labels(values_S.float().repeat_interleave(batch.lengths), batch)


def of_labels(values_T: Tensor, batch: PackedBatch) -> Tensor:
    """The values at tokens with a label, 0 elsewhere."""
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
        rest_S = rest_S - batch.sequence_fields["rewarded"] - sums_of_actions(turn_rewards_T, batch)
    rewards_A[actions.last] += rest_S[actions.counts > 0]
    if kl_T is not None:
        rewards_A -= kl * kl_T.double()[actions.tokens]
    return actions.on_tokens(rewards_A, batch)


def sums_of_actions(values_T: Tensor, batch: PackedBatch) -> Tensor:
    """(S,) float64: the sum of the values at the actions of each sequence."""
    actions = Actions.of(batch)
    sequence_A = torch.arange(batch.num_sequences).repeat_interleave(actions.counts)
    zeros = torch.zeros(batch.num_sequences, dtype=torch.float64)
    return zeros.index_add(0, sequence_A, values_T.double()[actions.tokens])


def whiten(values_T: Tensor, batch: PackedBatch) -> Tensor:
    """Values with a mean of 0 and a variance of 1 over all actions of the batch."""
    actions = Actions.of(batch)
    values_A = values_T.double()[actions.tokens]
    mean = values_A.mean()
    variance = (values_A - mean).square().sum() / max(1, len(values_A) - 1)
    return actions.on_tokens((values_A - mean) / (variance + 1e-8).sqrt(), batch)


def reinforce_pp(rewards_T: Tensor, batch: PackedBatch, gamma: float = 1.0) -> Tensor:
    """REINFORCE++: discounted returns of the token rewards, whitened over the whole batch."""
    actions = Actions.of(batch)
    returns_A = actions.discounted_sums(rewards_T.double()[actions.tokens], gamma)
    return whiten(actions.on_tokens(returns_A, batch), batch)


def remax(rewards_T: Tensor, baseline_S: Tensor, batch: PackedBatch) -> Tensor:
    """ReMax (Li et al., 2023): the return of each token minus the reward of its prompt's greedy completion."""
    actions = Actions.of(batch)
    returns_A = actions.discounted_sums(rewards_T.double()[actions.tokens], 1.0)
    baseline_A = baseline_S.double().repeat_interleave(actions.counts)
    return actions.on_tokens(returns_A - baseline_A, batch)


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


def overlong_penalty(tokens: int, max_new_tokens: int, window: int) -> float:
    """DAPO's soft punishment of long answers (Yu et al., 2025), a term of a reward.

    It is 0 up to `window` tokens below `max_new_tokens`, and falls to -1 at `max_new_tokens`.
    """
    if not 0 < window <= max_new_tokens:
        raise UserError(f"overlong_penalty: window={window} must be in 1 to {max_new_tokens}")
    return -min(1.0, max(0, tokens - (max_new_tokens - window)) / window)


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

    `kl_T` is a penalty that belongs to the rewards, with the weight `kl`. Algorithms that compare samples subtract its
    sum from the sample's reward; of distil it is minus the advantage of its token.
    """
    kind, fields = algorithm.advantages, batch.sequence_fields
    if kind == "teacher":
        assert kl_T is not None
        return {"advantages": of_labels(-kl * kl_T, batch)}
    if kind in ("group", "leave_one_out", "optimal", "source"):
        if kl_T is not None:
            rewards_S = rewards_S.double() - kl * sums_of_actions(kl_T, batch)
        advantages_S = group_advantages(
            rewards_S,
            fields["source"] if kind == "source" else groups_S,
            std=algorithm.std,
            leave_one_out=kind == "leave_one_out",
            weights_S=Actions.of(batch).counts if kind == "optimal" else None,
            episodes_S=fields.get("episode"),
        )
        return {"advantages": spread(advantages_S, batch)}
    rewards_T = token_rewards(rewards_S, batch, kl_T, kl)
    if kind == "greedy":
        return {"advantages": remax(rewards_T, fields["baseline"], batch)}
    if kind == "reinforce_pp":
        return {"advantages": reinforce_pp(rewards_T, batch, gamma)}
    if values_T is None:
        raise UserError(f"{algorithm.name} needs the values of a critic")
    advantages_T, returns_T = gae(values_T, rewards_T, batch, gamma, lam)
    advantages_T = whiten(advantages_T, batch)
    return {"advantages": advantages_T, "returns": returns_T, "old_values": values_T.float()}


# ---- Correction of a sampler that is not the trainer ----------------------------------------------------------------


def importance_weights(
    correction: Correction, batch: PackedBatch
) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """(T,): how much the policy loss of each token counts; and metrics of the whole batch, as (sum, weight).

    Ratios are p(trainer before the step) / p(sampler): of a token, of its sequence (the product), and geometric (the
    geometric mean of the sequence). A weight is the ratio, up to `cap`; out of `bounds` it is 0. Such tokens stay in
    the denominator of the loss, so leaving some out does not make the others count for more.
    """
    fields = batch.token_fields
    has_label_T = batch.labels != IGNORE
    difference_T = fields["old_log_probs"] - fields["sampler_log_probs"]
    token_T = torch.where(has_label_T, difference_T, 0.0)
    sums_S = sums_of_actions(token_T, batch)
    counts_S = Actions.of(batch).counts
    log_ratios = {
        "token": token_T,
        "sequence": sums_S.repeat_interleave(batch.lengths),
        "geometric": (sums_S / counts_S.clamp(min=1)).repeat_interleave(batch.lengths),
    }
    weights_T = has_label_T.float()
    if correction.weights is not None:
        ratio_T = clamp_log_ratio(log_ratios[correction.weights]).exp()
        weights_T = torch.where(has_label_T, ratio_T.clamp(max=correction.cap).float(), 0.0)
    is_masked_T = torch.zeros_like(has_label_T)
    if correction.mask is not None:
        low, high = map(math.log, correction.bounds)
        log_ratio_T = log_ratios[correction.mask]
        is_masked_T = has_label_T & ~((log_ratio_T >= low) & (log_ratio_T <= high))
        weights_T = torch.where(is_masked_T, 0.0, weights_T)
    tokens = int(counts_S.sum())
    masked_S = sums_of_actions(is_masked_T, batch)
    total, squares = weights_T.double().sum(), weights_T.double().square().sum()
    metrics: dict[str, tuple[float, float]] = {
        "masked_tokens": (int(masked_S.sum()), tokens),
        "masked_sequences": (int((masked_S > 0).sum()), int((counts_S > 0).sum())),
        "ess": (float(total.square() / squares) if squares else 0.0, tokens),
    }
    return weights_T, metrics


# ---- Losses -------------------------------------------------------------------------------------------------------


def probability_ratios(
    log_probs_T: Tensor, old_T: Tensor, batch: PackedBatch, *, of_sequence: bool = False
) -> Tensor:
    """p / p_old of each token; `of_sequence`: its geometric mean over the sequence (GSPO)."""
    log_ratio_T = log_probs_T - old_T
    if of_sequence:
        has_loss_T = batch.labels != IGNORE
        sums_S = sequence_sums(torch.where(has_loss_T, log_ratio_T.detach(), 0.0), batch)
        mean_S = sums_S / sequence_sums(has_loss_T, batch).clamp(min=1)
        # The sequence's value with each token's own gradient, so that advantages may differ by token.
        log_ratio_T = per_token(mean_S, batch) + log_probs_T - log_probs_T.detach()
    return clamp_log_ratio(log_ratio_T).exp()


def clipped_log_probs(
    log_probs_T: Tensor, old_T: Tensor, advantages_T: Tensor, clip: tuple[float, float]
) -> Tensor:
    """Log-probs with log-ratios to the old ones within `clip`, on the side to which the advantage pushes (GMPO)."""
    log_ratio_T = log_probs_T - old_T
    low, high = clip
    clipped_T = torch.where(
        advantages_T < 0, log_ratio_T.clamp(min=-low), log_ratio_T.clamp(max=high)
    )
    return torch.where(clipped_T == log_ratio_T, log_probs_T, old_T + clipped_T)


def soft_gate(
    ratio_T: Tensor, advantages_T: Tensor, temperatures: tuple[float, float] = (1.0, 1.05)
) -> Tensor:
    """A bounded function of the ratio with the slope 1 where the ratio is 1 (SAPO).

    `temperatures`: of positive and of other advantages; the higher, the faster the slope falls away from 1.
    """
    positive, negative = temperatures
    tau_T = torch.where(advantages_T > 0, positive, negative)
    return torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T


def dual_clipped(loss_T: Tensor, advantages_T: Tensor, ratio: float | None) -> Tensor:
    """The loss with this largest ratio that counts where the advantage is negative; None: no such limit."""
    if ratio is None:
        return loss_T
    largest_T = -advantages_T * ratio
    return torch.where((advantages_T < 0) & (loss_T > largest_T), largest_T, loss_T)


def normed(
    loss_T: Tensor, batch: PackedBatch, norm: Norm, length: float | None = None
) -> tuple[Tensor, Tensor]:
    """The loss summed over the tokens with a label, and its weight.

    token: the mean over tokens. sequence: the mean over sequences of the mean over a sequence's tokens. constant: the
    sum over tokens, divided by the number of sequences times `length`.
    """
    loss_T = torch.where(batch.labels != IGNORE, loss_T, 0.0)
    if norm == "token":
        return loss_T.sum(), batch.num_loss_tokens
    tokens_S = sequence_sums(batch.labels != IGNORE, batch)
    sequences = (tokens_S > 0).sum()
    if norm == "constant":
        assert length is not None
        return loss_T.sum() / length, sequences
    return (sequence_sums(loss_T, batch) / tokens_S.clamp(min=1)).sum(), sequences


def log_tokens(log: Log, batch: PackedBatch, **values: Tensor) -> None:
    """Log the mean of each value over the tokens with a label."""
    has_loss_T = batch.labels != IGNORE
    for name, values_T in values.items():
        log(name, torch.where(has_loss_T, values_T.detach(), 0.0).sum(), has_loss_T.sum())


def log_distances(log: Log, batch: PackedBatch, log_probs_T: Tensor, old_T: Tensor) -> None:
    """Log `approx_kl`, of the policy from the old one, and `gap`, of the trainer before the step from the sampler."""
    log_probs_T = log_probs_T.detach()
    log_tokens(log, batch, approx_kl=kl_penalty(old_T, log_probs_T, "k3"))
    if "sampler_log_probs" in batch.token_fields:
        trainer_T = batch.token_fields.get("old_log_probs", log_probs_T)
        log_tokens(log, batch, gap=(trainer_T - batch.token_fields["sampler_log_probs"]).abs())


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped policy gradient: PPO, GRPO, GSPO, GMPO, CISPO, SAPO and relatives, by their options.

    It reads the token fields `advantages` and `old_log_probs` (without them the policy is the one that sampled, and the
    ratio is 1), `importance`, of `importance_weights`, `reference_log_probs` for the KL term, `sampler_log_probs` for
    the gap and `ratio_to="sampler"`.
    """

    clip: tuple[float, float] = (0.2, 0.2)  # below and above 1
    dual_clip: float | None = None  # the largest ratio that counts where the advantage is negative
    # sequence: its geometric mean (GSPO). clipped_sequence: that of the tokens' ratios, each clipped before, and `clip`
    # is of their logarithms (GMPO).
    ratio: Literal["token", "sequence", "clipped_sequence"] = "token"
    ratio_to: Literal["old", "sampler"] = "old"  # sampler: samples by older weights, as they are
    cispo: bool = False  # the clipped ratio as a weight without gradient: no token loses its own
    # Instead of clipping, a soft gate with these temperatures, of positive and of other advantages (SAPO).
    gate: tuple[float, float] | None = None
    kl: float = 0.0  # the weight of the KL divergence from the reference
    kl_estimator: Estimator = "k3"
    entropy: float = 0.0  # the weight of the entropy bonus
    norm: Norm = "token"  # see `normed`
    length: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        (low, high), dual = self.clip, self.dual_clip
        is_plain = not self.cispo and self.gate is None and self.ratio != "clipped_sequence"
        one_ratio = not self.cispo and self.ratio == "token"
        above = f"above the clip range's end {1 + high}, or None"
        has_length = self.length is not None and self.length > 0
        for name, is_valid, wanted in (
            ("clip", 0 <= low <= 1 and high >= 0, "(low, high) with 0 <= low <= 1, high >= 0"),
            ("dual_clip", dual is None or dual > 1 + high, above),
            ("dual_clip", dual is None or is_plain, "None with cispo, gate and clipped_sequence"),
            ("ratio", self.ratio in RATIOS, "token, sequence or clipped_sequence"),
            ("gate", self.gate is None or min(self.gate) > 0, "two numbers above 0, or None"),
            ("gate", self.gate is None or one_ratio, "None with cispo and ratios of sequences"),
            ("cispo", not (self.cispo and self.ratio == "clipped_sequence"), "False with it"),
            ("kl_estimator", self.kl_estimator in ("k1", "k2", "k3"), "k1, k2 or k3"),
            ("norm", self.norm in get_args(Norm), "token, sequence or constant"),
            ("length", has_length == (self.norm == "constant"), "set, with norm=constant alone"),
            ("temperature", self.temperature > 0, "above 0"),
            ("ratio_to", self.ratio_to in ("old", "sampler"), "old or sampler"),
        ):
            if not is_valid:
                raise UserError(f"PolicyLoss: {name}={getattr(self, name)} must be {wanted}")

    @classmethod
    def of(cls, config: RLConfig, ratio_to: Literal["old", "sampler"] = "old") -> PolicyLoss:
        """The loss of a config: the options of its algorithm, and those that the section `rl` replaces."""
        rl = config.rl
        options = dict(rl.preset.loss, clip=rl.clip_range, norm=rl.loss_norm)
        if rl.loss_norm == "constant":
            options["length"] = float(config.generation.max_new_tokens)
        if rl.has_reference and not rl.preset.kl_in_reward:
            options["kl"] = rl.kl_coef
        return cls(
            **options,
            dual_clip=rl.dual_clip,
            ratio_to=ratio_to,
            entropy=rl.entropy,
            temperature=config.generation.temperature,
        )

    def __call__(self, model: nn.Module, batch: PackedBatch, log: Log) -> tuple[Tensor, Tensor]:
        """`(loss_sum, weight)` of a micro-batch; `log(name, sum, weight)` gets the metrics."""
        fields = batch.token_fields
        # At temperature 1, too: placeholders of media, which are never sampled, have no probability then.
        outputs = model(batch, ["log_probs", "label_entropy"], temperature=self.temperature)
        log_probs_T, entropy_T = outputs["log_probs"], outputs["label_entropy"]
        # The policy before the step; with ratio_to=sampler, that of this optimizer step.
        old_T = fields.get("old_log_probs", log_probs_T.detach())
        if self.ratio_to == "sampler":
            old_T = self._field(batch, "sampler_log_probs", "ratio_to")
        advantages_T = fields["advantages"]
        own_T = log_probs_T
        if self.ratio == "clipped_sequence":
            own_T = clipped_log_probs(log_probs_T, old_T, advantages_T, self.clip)
        of_sequence = self.ratio != "token"
        ratio_T = probability_ratios(own_T, old_T, batch, of_sequence=of_sequence)
        clipped_T = ratio_T.clamp(1 - self.clip[0], 1 + self.clip[1])
        plain_T = -advantages_T * ratio_T
        if self.cispo:
            loss_T = -clipped_T.detach() * advantages_T * log_probs_T
            is_clipped_T = clipped_T != ratio_T
        elif self.gate is not None:
            loss_T = -advantages_T * soft_gate(ratio_T, advantages_T, self.gate)
            is_clipped_T = torch.zeros_like(ratio_T)  # nothing is
        elif self.ratio == "clipped_sequence":
            loss_T = plain_T
            is_clipped_T = own_T != log_probs_T
        else:
            loss_T = torch.maximum(plain_T, -advantages_T * clipped_T)
            loss_T = dual_clipped(loss_T, advantages_T, self.dual_clip)
            is_clipped_T = loss_T != plain_T
        log_tokens(log, batch, ratio=ratio_T, clip_fraction=is_clipped_T, entropy=entropy_T)
        log_distances(log, batch, log_probs_T, old_T)
        if "importance" in fields:
            if self.ratio_to == "sampler":
                raise UserError(
                    "PolicyLoss: ratio_to=sampler corrects already: leave out the field importance"
                )
            loss_T = loss_T * fields["importance"]
        if self.kl or "reference_log_probs" in fields:
            reference_T = self._field(batch, "reference_log_probs", "kl")
            kl_T = kl_penalty(log_probs_T, reference_T, self.kl_estimator)
            log_tokens(log, batch, kl=kl_T)
            loss_T = loss_T + self.kl * kl_T
        if self.entropy:
            loss_T = loss_T - self.entropy * entropy_T
        return normed(loss_T, batch, self.norm, self.length)

    def _field(self, batch: PackedBatch, name: str, option: str) -> Tensor:
        if name not in batch.token_fields:
            needed = f"{option}={getattr(self, option)} needs the token field {name} in the batch"
            raise UserError(f"PolicyLoss: {needed}")
        return batch.token_fields[name]


@dataclass(frozen=True)
class DistilLoss:
    """The KL divergence between policy and teacher over the whole vocabulary, the mean over sampled tokens.

    The teachers are in the actor's processes (`model_groups.Teachers`), where they give the model the output
    `teacher_kl`. `sources` are the names for the metrics, by the number in the sequence field `source`.
    """

    sources: tuple[str, ...] = ()
    entropy: float = 0.0  # the weight of the entropy bonus
    temperature: float = 1.0

    @classmethod
    def of(cls, config: RLConfig, sources: Sequence[str]) -> DistilLoss:
        """The loss of a config, whose `rl.algorithm` is distil_reverse or distil_forward."""
        return cls(tuple(sources), config.rl.entropy, config.generation.temperature)

    def micro_batches(self, model: Any, cut: PackedBatch | None, budget: int) -> list[PackedBatch]:
        """Those of an optimizer step, each with the hidden states of its teacher."""
        found: list[PackedBatch] = model.teachers.micro_batches(cut, budget)
        return found

    def __call__(self, model: Any, batch: PackedBatch, log: Log) -> tuple[Tensor, Tensor]:
        """`(loss_sum, weight)` of a micro-batch; `log(name, sum, weight)` gets the metrics."""
        names = ["teacher_kl", "log_probs", "label_entropy"]
        with model.teachers.reading(batch):
            outputs = model(batch, names, temperature=self.temperature)
        kl_T, entropy_T = outputs["teacher_kl"], outputs["label_entropy"]
        log_teacher_kl(log, batch, kl_T, self.sources)
        log_tokens(log, batch, entropy=entropy_T)
        log_distances(log, batch, outputs["log_probs"], old_log_probs(batch))
        return normed(kl_T - self.entropy * entropy_T, batch, "token")


def log_teacher_kl(log: Log, batch: PackedBatch, kl_T: Tensor, sources: Sequence[str]) -> None:
    """Log the mean divergence from the teachers over the tokens of each source."""
    source_T = per_token(batch.sequence_fields["source"], batch)
    for index, name in enumerate(sources):
        is_counted_T = (source_T == index) & (batch.labels != IGNORE)
        total = torch.where(is_counted_T, kl_T.detach(), 0.0).sum()
        log(f"teacher_kl/{name}", total, is_counted_T.sum())


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
