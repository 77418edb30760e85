"""The Push-T task of LeRobot's dataset: the engine of this recipe, evaluated in the environment gym_pusht."""

from mvp_engine.kit.actions.simulation import GymEnv

from .engine import TableEngine
from .pusht_settings import PushTConfig

NAMES = {"pixels": "observation.image", "agent_pos": "observation.state"}
TASK = "Push the T-shaped block onto the T-shaped target."  # as in meta/tasks.parquet of the dataset


class PushTEngine(TableEngine):
    config_class = PushTConfig
    title = "What pi0 does on Push-T"

    def make_env(self, num_envs: int) -> GymEnv:
        return GymEnv.make("gym_pusht:gym_pusht/PushT-v0", num_envs, NAMES, TASK, obs_type="pixels_agent_pos")

    def before_train(self) -> None:
        if self.config.simulation is not None:
            self.make_env(1)  # a missing package is an error now, not at the first evaluation
        super().before_train()
