"""Reinforcement learning in an environment: the policy learns to walk to a goal, with a reward for every move."""

from typing import Any

from mvp_engine.kit.rl import Chat, RLEngine

from .data import prepare
from .settings import GridConfig
from .world import GridWorld


class GridEngine(RLEngine):
    config_class = GridConfig
    config: GridConfig

    def episode(self, row: dict[str, Any], chat: Chat) -> dict[str, float]:
        """A walk: each answer is a move, and the next message is what the policy sees then."""
        world = GridWorld()
        world.reset(seed=row["seed"])
        while True:
            observation, reward, terminated, truncated, _ = world.step(chat.answer().text)
            chat.reward(reward)
            if terminated or truncated:
                return {"goal": float(terminated)}
            chat.user(observation)

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        if config.made is not None:
            prepare(config.made)
        return super().data_kit(config)
