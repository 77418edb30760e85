"""Advantages of policy optimization, against loops written after the papers."""

import subprocess
import sys

import pytest
import torch
from conftest import user_error

from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.rl import (
    ALGORITHMS,
    PolicyLoss,
    advantage_fields,
    gae,
    group_advantages,
    has_signal,
    kl_penalty,
    overlong_penalty,
    reinforce_pp,
    remax,
    token_rewards,
    whiten,
)

REWARDS = torch.tensor([0.5, 0.1, 1.0, 0.1, -2.0, 0.1, 0.7])
# Not in order; group 1 has one sample, group 8 equal rewards.
GROUPS = torch.tensor([3, 8, 3, 8, 1, 8, 3])
MASKS = [
    "0001111",
    "011001",
    "0011",
    "01",
    "0000",
    "0101011",
    "001",
]  # one answer has a tool's tokens, one is empty


def batch_of():
    masks = [torch.tensor([digit == "1" for digit in mask]) for mask in MASKS]
    return PackedBatch.from_sequences([torch.arange(len(mask)) for mask in MASKS], masks)


def places():
    """For each sequence, the tokens whose labels are its answer: the ones before."""
    found, start = [], 0
    for mask in MASKS:
        found.append([start + place - 1 for place, digit in enumerate(mask) if digit == "1"])
        start += len(mask)
    return found


def random_values(seed):
    return torch.randn(sum(map(len, MASKS)), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("value", [0.1, 1 / 3 * 1e9, 1e30])
def test_group_advantages_equal_rewards_of_any_size_are_zero(value):
    """The mean of equal numbers differs from them by rounding, which their deviation would scale up to 1."""
    rewards = torch.full((7,), value, dtype=torch.float64)
    assert group_advantages(rewards, torch.zeros(7, dtype=torch.long)).tolist() == [0.0] * 7


@pytest.mark.parametrize("std, leave_one_out", [(True, False), (False, False), (False, True)])
def test_group_advantages_equal_loop_over_groups(std, leave_one_out):
    found = group_advantages(REWARDS, GROUPS, std=std, leave_one_out=leave_one_out)
    for place, (reward, group) in enumerate(zip(REWARDS, GROUPS, strict=True)):
        members = [i for i, other in enumerate(GROUPS) if other == group]
        others = [i for i in members if i != place] if leave_one_out else members
        wanted = torch.tensor(0.0)
        if len(members) > 1:
            wanted = reward - REWARDS[others].mean()
            wanted = wanted / (REWARDS[members].std() + 1e-6) if std else wanted
        assert torch.allclose(found[place], wanted, atol=1e-6)
    assert (found[GROUPS == 8] == 0).all(), "equal rewards give exactly 0, whatever their rounding"


def test_has_signal_is_false_for_groups_of_equal_rewards():
    assert has_signal(REWARDS, GROUPS).tolist() == [True, False, True, False, False, False, True]


def test_token_rewards_lie_on_last_action_minus_kl_on_each():
    kl = random_values(1)
    found = token_rewards(REWARDS, batch_of(), kl, 0.3)
    wanted = torch.zeros(len(kl))
    for row, tokens in enumerate(places()):
        for token in tokens:
            wanted[token] = -0.3 * kl[token] + (REWARDS[row] if token == tokens[-1] else 0.0)
    assert torch.allclose(found, wanted, atol=1e-7)


def test_gae_equals_backward_loop_over_each_answer():
    values, rewards = random_values(2), random_values(3)
    advantages, returns = gae(values, rewards, batch_of(), gamma=0.9, lam=0.8)
    wanted = torch.zeros(len(values))
    for tokens in places():
        following, after = 0.0, 0.0
        for token in reversed(tokens):
            following = float(rewards[token] + 0.9 * after - values[token] + 0.9 * 0.8 * following)
            wanted[token], after = following, float(values[token])
    assert torch.allclose(advantages, wanted, atol=1e-6)
    is_action = wanted != 0
    assert torch.allclose(returns, torch.where(is_action, wanted + values, 0.0), atol=1e-6)


def test_gae_of_gamma_and_lambda_1_is_return_minus_value():
    values, batch = random_values(2), batch_of()
    advantages, returns = gae(values, token_rewards(REWARDS, batch), batch, gamma=1.0, lam=1.0)
    for row, tokens in enumerate(places()):
        assert torch.allclose(returns[tokens], REWARDS[row].expand(len(tokens)), atol=1e-6)
        assert torch.allclose(advantages[tokens], REWARDS[row] - values[tokens], atol=1e-6)


def test_reinforce_pp_whitens_discounted_returns_over_all_answers():
    rewards = random_values(4)
    found = reinforce_pp(rewards, batch_of(), gamma=0.7)
    returns = torch.zeros(len(rewards))
    for tokens in places():
        for place, token in enumerate(tokens):
            returns[token] = sum(
                0.7**step * rewards[later] for step, later in enumerate(tokens[place:])
            )
    every = [token for tokens in places() for token in tokens]
    wanted = torch.zeros(len(rewards))
    wanted[every] = (returns[every] - returns[every].mean()) / returns[every].std()
    assert torch.allclose(found, wanted, atol=1e-5)


def test_whiten_of_equal_values_is_0():
    batch = batch_of()
    assert (whiten(torch.full((batch.num_tokens,), 0.1), batch).abs() < 1e-6).all()


def test_kl_estimators_agree_with_true_kl_in_expectation():
    policy, reference = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.25, 0.4, 0.35])
    true = (policy * (policy / reference).log()).sum()
    for estimator, tolerance in (("k1", 1e-7), ("k2", 1e-3), ("k3", 1e-7)):
        estimates = kl_penalty(policy.log(), reference.log(), estimator)
        assert (policy * estimates).sum() == pytest.approx(float(true), abs=tolerance), estimator
    assert (kl_penalty(policy.log(), reference.log(), "k3") >= 0).all()


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_advantage_fields_of_each_algorithm_fit_its_loss(name):
    algorithm, batch = ALGORITHMS[name], batch_of()
    kl, values = random_values(5), random_values(6)
    batch.sequence_fields["source"] = GROUPS
    batch.sequence_fields["baseline"] = REWARDS / 2
    found = advantage_fields(algorithm, batch, REWARDS, GROUPS, values_T=values, kl_T=kl, kl=0.2)
    sums = torch.stack([kl[tokens].sum() for tokens in places()])
    counts = torch.tensor([len(tokens) for tokens in places()])
    token_values = token_rewards(REWARDS, batch, kl, 0.2)
    advantages, returns = gae(values, token_values, batch)
    wanted = {
        "leave_one_out": lambda: group_advantages(
            REWARDS - 0.2 * sums, GROUPS, std=False, leave_one_out=True
        ),
        "group": lambda: group_advantages(REWARDS - 0.2 * sums, GROUPS, std=name != "dr_grpo"),
        "optimal": lambda: group_advantages(
            REWARDS - 0.2 * sums, GROUPS, std=False, weights_S=counts
        ),
        "source": lambda: group_advantages(REWARDS - 0.2 * sums, GROUPS),
        "greedy": lambda: remax(token_values, REWARDS / 2, batch),
        "teacher": lambda: torch.where(batch.labels == -100, 0.0, -0.2 * kl),
        "reinforce_pp": lambda: reinforce_pp(token_values, batch),
        "gae": lambda: whiten(advantages, batch),
    }[algorithm.advantages]()
    if algorithm.has_groups or algorithm.advantages == "source":
        wanted = torch.where(batch.labels == -100, 0.0, wanted.repeat_interleave(batch.lengths))
    assert torch.allclose(found["advantages"], wanted, atol=1e-5)
    assert algorithm.has_critic == ("returns" in found)
    if algorithm.has_critic:
        assert torch.equal(found["returns"], returns)
        assert torch.equal(found["old_values"], values)
    PolicyLoss(**algorithm.loss, **({"length": 8} if algorithm.loss["norm"] == "constant" else {}))


def test_ppo_without_values_raises():
    with user_error("ppo needs the values of a critic"):
        advantage_fields(ALGORITHMS["ppo"], batch_of(), REWARDS, GROUPS)


@pytest.mark.slow
def test_algorithms_import_no_torch():
    code = "import sys; from mvp_engine.kit.rl import ALGORITHMS; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_opo_baseline_is_the_mean_reward_weighted_by_length():
    lengths = torch.tensor([4, 3, 2, 1, 5, 4, 1])
    found = group_advantages(REWARDS, GROUPS, std=False, weights_S=lengths)
    for place, (reward, group) in enumerate(zip(REWARDS, GROUPS, strict=True)):
        members = [i for i, other in enumerate(GROUPS) if other == group]
        total = sum(float(lengths[i]) * float(REWARDS[i]) for i in members)
        wanted = float(reward) - total / sum(int(lengths[i]) for i in members)
        assert float(found[place]) == pytest.approx(wanted, abs=1e-6)
    batch = batch_of()
    [of_preset] = advantage_fields(ALGORITHMS["opo"], batch, REWARDS, GROUPS).values()
    counts = torch.tensor([len(tokens) for tokens in places()])
    same = group_advantages(REWARDS, GROUPS, std=False, weights_S=counts)
    for row, tokens in enumerate(places()):
        assert torch.equal(of_preset[tokens], same[row].expand(len(tokens)))


def test_opo_length_of_an_episode_is_that_of_all_its_sequences():
    episodes = torch.tensor([0, 0, 1])
    lengths, rewards = torch.tensor([1, 2, 1]), torch.tensor([1.0, 1.0, 0.0])
    options = {"std": False, "weights_S": lengths, "episodes_S": episodes}
    found = group_advantages(rewards, torch.zeros(3, dtype=torch.long), **options)
    assert torch.allclose(found, rewards - 3 / 4)


def test_remax_is_the_return_minus_the_greedy_reward():
    batch, kl = batch_of(), random_values(5)
    baseline = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    batch.sequence_fields["baseline"] = baseline
    [found] = advantage_fields(
        ALGORITHMS["remax"], batch, REWARDS, GROUPS, kl_T=kl, kl=0.3
    ).values()
    wanted = torch.zeros(len(kl))
    for row, tokens in enumerate(places()):
        for place, token in enumerate(tokens):
            wanted[token] = REWARDS[row] - 0.3 * kl[tokens[place:]].sum() - baseline[row]
    assert torch.allclose(found, wanted, atol=1e-6)


def test_reinforce_source_compares_all_samples_of_a_source():
    batch = batch_of()
    batch.sequence_fields["source"] = sources = torch.tensor([0, 1, 0, 1, 0, 1, 1])
    [found] = advantage_fields(
        ALGORITHMS["reinforce_source"], batch, REWARDS, torch.arange(7)
    ).values()
    for row, tokens in enumerate(places()):
        mine = REWARDS[sources == sources[row]]
        wanted = (REWARDS[row] - mine.mean()) / (mine.std() + 1e-6)
        assert torch.allclose(found[tokens], wanted.expand(len(tokens)), atol=1e-6)


def test_overlong_penalty_falls_from_0_to_minus_1_in_its_window():
    found = [overlong_penalty(tokens, 100, 20) for tokens in (0, 80, 81, 90, 100, 120)]
    assert found == pytest.approx([0, 0, -0.05, -0.5, -1, -1])
    with user_error("window=0 must be in 1 to 100"):
        overlong_penalty(5, 100, 0)
