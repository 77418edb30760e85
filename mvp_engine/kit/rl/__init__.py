"""Reinforcement learning by one controller: prompts, rollouts, rewards, advantages, updates."""

from typing import TYPE_CHECKING

from mvp_engine.imports import lazy_exports

if TYPE_CHECKING:
    from mvp_engine.kit.rl.buffer import Experience, Updates
    from mvp_engine.kit.rl.chat import Answer, Chat, ContextFull
    from mvp_engine.kit.rl.engine import RLEngine
    from mvp_engine.kit.rl.model_groups import ModelGroups
    from mvp_engine.kit.rl.policy import (
        DistilLoss,
        PolicyLoss,
        ValueLoss,
        advantage_fields,
        gae,
        group_advantages,
        has_signal,
        kl_penalty,
        overlong_penalty,
        reinforce_pp,
        remax,
        spread,
        token_rewards,
        whiten,
    )
    from mvp_engine.kit.rl.prompts import Prompt, prompt_loader
    from mvp_engine.kit.rl.rollout import Rollout, Sample, Sampling, generate
    from mvp_engine.kit.rl.settings import ALGORITHMS, Algorithm, RLConfig
else:  # configs name `RLConfig`, and `mvp config CONFIG` imports no torch
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Answer",
    "Chat",
    "ContextFull",
    "DistilLoss",
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
    "gae",
    "generate",
    "group_advantages",
    "has_signal",
    "kl_penalty",
    "overlong_penalty",
    "prompt_loader",
    "reinforce_pp",
    "remax",
    "spread",
    "token_rewards",
    "whiten",
]
