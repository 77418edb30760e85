"""Reinforcement learning by one controller: prompts, rollouts, rewards, advantages, updates."""

from typing import TYPE_CHECKING

from mvp_engine.imports import lazy_exports

if TYPE_CHECKING:
    from mvp_engine.kit.rl.collector import Experience, Updates
    from mvp_engine.kit.rl.engine import RLEngine
    from mvp_engine.kit.rl.model_groups import ModelGroups
    from mvp_engine.kit.rl.policy import (
        PolicyLoss,
        ValueLoss,
        advantage_fields,
        dual_clipped,
        gae,
        group_advantages,
        has_signal,
        importance_weights,
        kl_penalty,
        log_gap,
        log_tokens,
        normed,
        old_log_probs,
        probability_ratios,
        reinforce_pp,
        spread,
        sums_of_actions,
        token_rewards,
        whiten,
    )
    from mvp_engine.kit.rl.prompts import Prompt, prompt_loader
    from mvp_engine.kit.rl.rewards import Answer
    from mvp_engine.kit.rl.rollout import Rollout, Sample, Sampling
    from mvp_engine.kit.rl.settings import ALGORITHMS, Algorithm, RLConfig
else:  # configs name `RLConfig`, and `mvp config CONFIG` imports no torch
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Answer",
    "Experience",
    "ModelGroups",
    "PolicyLoss",
    "Prompt",
    "RLConfig",
    "RLEngine",
    "Rollout",
    "Sample",
    "Sampling",
    "Updates",
    "ValueLoss",
    "advantage_fields",
    "dual_clipped",
    "gae",
    "group_advantages",
    "has_signal",
    "importance_weights",
    "kl_penalty",
    "log_gap",
    "log_tokens",
    "normed",
    "old_log_probs",
    "probability_ratios",
    "prompt_loader",
    "reinforce_pp",
    "spread",
    "sums_of_actions",
    "token_rewards",
    "whiten",
]
