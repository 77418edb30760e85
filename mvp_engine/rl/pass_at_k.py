"""pass@k: the probability that at least one of k completions of a prompt is right, from n >= k of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from mvp_engine.rl.rewards import Reward
from mvp_engine.rl.rollout import Sample


def pass_at_k(total: int, right: int, k: int) -> float:
    """The unbiased estimate from `total` completions, of which `right` are right (Chen et al., 2021)."""
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


def pass_metrics(
    samples: Sequence[Sample], rewards: Sequence[Reward], right_from: float
) -> dict[str, tuple[float, float]]:
    """pass@1, pass@2, pass@4, ... up to the completions of each prompt, as (sum, prompts).

    A completion is right if its reward is `right_from` or more. One without a reward is left out, as it is of the mean
    reward: pass@k is the mean over the prompts with at least k rewards.
    """
    completions = Counter(sample.prompt for sample in samples)
    judged: dict[int, list[bool]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        if reward.value is not None:
            judged.setdefault(sample.prompt, []).append(reward.value >= right_from)
    fewest = min(completions.values(), default=0)
    found = {}
    for k in sorted({*(2**i for i in range(fewest.bit_length())), fewest} - {0}):
        groups = [group for group in judged.values() if len(group) >= k]
        if groups:
            total = sum(pass_at_k(len(group), sum(group), k) for group in groups)
            found[f"pass@{k}"] = (total, float(len(groups)))
    return found
