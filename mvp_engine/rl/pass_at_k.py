"""pass@k: the probability that at least one of k completions of a prompt is right, from n >= k of them."""

from __future__ import annotations

import math
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

    A completion is right if its reward is `right_from` or more; one whose reward failed is wrong.
    """
    groups: dict[int, list[bool]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        is_right = reward.value is not None and reward.value >= right_from
        groups.setdefault(sample.prompt, []).append(is_right)
    fewest = min((len(group) for group in groups.values()), default=0)
    found = {}
    for k in sorted({*(2**i for i in range(fewest.bit_length())), fewest} - {0}):
        total = sum(pass_at_k(len(group), sum(group), k) for group in groups.values())
        found[f"pass@{k}"] = (total, float(len(groups)))
    return found
