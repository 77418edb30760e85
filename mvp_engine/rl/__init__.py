"""Reinforcement learning by one controller: prompts, rollouts, rewards, advantages, updates."""

from typing import TYPE_CHECKING

from mvp_engine.imports import lazy_exports

if TYPE_CHECKING:
    from mvp_engine.rl.engine import RLEngine
    from mvp_engine.rl.prompts import Prompt
    from mvp_engine.rl.rewards import Answer
    from mvp_engine.rl.rl_settings import RLConfig
    from mvp_engine.rl.rollout import Rollout, Sample, Sampling
else:  # configs name `RLConfig`, and `mvp config CONFIG` imports no torch
    __getattr__ = lazy_exports(__name__)

__all__ = ["Answer", "Prompt", "RLConfig", "RLEngine", "Rollout", "Sample", "Sampling"]
