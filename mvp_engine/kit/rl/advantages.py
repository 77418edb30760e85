"""Advantages and returns of samples, which a controller computes for a whole step before its updates.

Legend: T tokens, S sequences, A actions: tokens with a label, in the order of the batch.

Sums run in float64 and results are float32. The tokens of a tool or a user inside of an answer have no label: they are
no actions, and the next state of an action is the one before the next action.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.kit.rl.algorithms import Algorithm

Estimator = Literal["k1", "k2", "k3"]
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
    """(T,): each sequence's reward at its last action, minus `kl` times the penalty `kl_T` at each action."""
    actions = Actions.of(batch)
    rewards_A = torch.zeros(len(actions.tokens), dtype=torch.float64)
    rewards_A[actions.last] = rewards_S.double()[actions.counts > 0]
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
        advantages_S = group_advantages(
            rewards_S, groups_S, std=algorithm.std, leave_one_out=leave_one_out
        )
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
