"""Models that act: LeRobot folders, pi0 and chunk regressors, their loss, closed-loop rollouts and exports."""

from typing import TYPE_CHECKING

from mvp_engine.imports import lazy_exports

if TYPE_CHECKING:
    from mvp_engine.kit.actions.action_model import ActionModel, ActionModelEngine, sample_actions
    from mvp_engine.kit.actions.kit import ActionDataKit
    from mvp_engine.kit.actions.settings import ActionConfig, ActionData, Simulation
    from mvp_engine.kit.actions.simulation import (
        EpisodeResult,
        Observation,
        append_episodes,
        episode_examples,
        rollout,
        rollout_on_ranks,
    )
else:  # sections of configs are here too, and `mvp config CONFIG` imports no torch
    __getattr__ = lazy_exports(__name__)


__all__ = [
    "ActionConfig",
    "ActionData",
    "ActionDataKit",
    "ActionModel",
    "ActionModelEngine",
    "EpisodeResult",
    "Observation",
    "Simulation",
    "append_episodes",
    "episode_examples",
    "rollout",
    "rollout_on_ranks",
    "sample_actions",
]
