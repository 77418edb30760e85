"""The algorithms of policy optimization as data: how each computes advantages, and the options of its loss.

It imports no torch, so that configs can name an algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Algorithm:
    name: str
    # group: the reward minus the mean of the prompt's samples. leave_one_out: minus the mean of the other samples.
    # reinforce_pp: returns, whitened over the step. gae: with the values of a critic.
    advantages: Literal["group", "leave_one_out", "reinforce_pp", "gae"]
    std: bool = False  # divide by the standard deviation of a group's rewards
    kl_in_reward: bool = (
        False  # where a KL penalty belongs: inside of the rewards, or a term of the loss
    )
    loss: dict[str, Any] = field(default_factory=dict)  # options of PolicyLoss, as published

    @property
    def has_critic(self) -> bool:
        return self.advantages == "gae"

    @property
    def has_groups(self) -> bool:
        return self.advantages in ("group", "leave_one_out")


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("grpo", "group", std=True, loss={"norm": "sequence"}),
        Algorithm("dr_grpo", "group", loss={"norm": "constant"}),
        Algorithm("rloo", "leave_one_out", kl_in_reward=True, loss={"norm": "constant"}),
        Algorithm("reinforce_pp", "reinforce_pp", kl_in_reward=True, loss={"norm": "token"}),
        Algorithm("ppo", "gae", kl_in_reward=True, loss={"norm": "token"}),
        Algorithm(
            "gspo",
            "group",
            std=True,
            loss={"norm": "sequence", "ratio": "sequence", "clip": (3e-4, 4e-4)},
        ),
        # No lower bound, and ratios up to 5.
        Algorithm(
            "cispo", "group", std=True, loss={"norm": "token", "cispo": True, "clip": (1.0, 4.0)}
        ),
    )
}
