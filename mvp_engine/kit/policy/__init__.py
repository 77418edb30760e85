"""Losses and advantages of policy optimization on packed batches."""

from typing import TYPE_CHECKING

from mvp_engine.imports import lazy_exports
from mvp_engine.kit.policy.algorithms import ALGORITHMS, Algorithm

if TYPE_CHECKING:
    from mvp_engine.kit.policy.advantages import (
        advantage_fields,
        gae,
        group_advantages,
        has_signal,
        kl_penalty,
        reinforce_pp,
        spread,
        token_rewards,
        whiten,
    )
    from mvp_engine.kit.policy.loss import PolicyLoss, ValueLoss
else:  # configs name algorithms, and `mvp config CONFIG` imports no torch
    __getattr__ = lazy_exports(__name__)


__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "PolicyLoss",
    "ValueLoss",
    "advantage_fields",
    "gae",
    "group_advantages",
    "has_signal",
    "kl_penalty",
    "reinforce_pp",
    "spread",
    "token_rewards",
    "whiten",
]
