"""GymEnv: environments of gymnasium as `rollout` reads them, with the names of a LeRobot folder and an instruction.

class PushEngine(MLLMEngine):  # a copy of recipes/table_vla
    def make_env(self, num_envs):
        names = {"agent_pos": "observation.state", "pixels": "observation.image"}
        return GymEnv.make("gym_pusht:gym_pusht/PushT-v0", num_envs, names, "push the T onto its place",
                           obs_type="pixels_agent_pos")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.kit.actions.simulation import TASK, VectorEnv
from mvp_engine.kit.data.read.media_source import require_package


class GymEnv:
    """A vector environment whose observations have other names, and no instruction."""

    def __init__(self, env: VectorEnv, names: Mapping[str, str], task: str) -> None:
        """`names`: from entries of the observations (`pixels`, or `pixels/top` of a dict in a dict) to features."""
        self.env = env
        self.names = dict(names)
        self.task = task
        self.num_envs = env.num_envs

    @classmethod
    def make(
        cls,
        name: str,
        num_envs: int,
        names: Mapping[str, str],
        task: str,
        vectorization_mode: str = "sync",
        **options: Any,
    ) -> GymEnv:
        """The environment `name` of gymnasium (`package:id` imports a package first), with its own `options`.

        `vectorization_mode="async"` runs each one in a process of its own.
        """
        gymnasium = require_package("gymnasium", f"the environment {name}", "sim")
        try:
            env = gymnasium.make_vec(
                name, num_envs=num_envs, vectorization_mode=vectorization_mode, **options
            )
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise UserError(
                f"gymnasium has no environment {name}: {error}. Install its package (gym-pusht: pip install "
                "'mvp-engine[sim]') and write package:id"
            ) from None
        return cls(env, names, task)

    def reset(self, *, seed: Any = None) -> tuple[dict[str, Any], Mapping[str, Any]]:
        seen, infos = self.env.reset(seed=seed)
        return self._named(seen), infos

    def step(
        self, actions: np.ndarray
    ) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, Mapping[str, Any]]:
        seen, rewards, terminated, truncated, infos = self.env.step(actions)
        return self._named(seen), rewards, terminated, truncated, infos

    def _named(self, seen: Mapping[str, Any]) -> dict[str, Any]:
        flat = dict(_entries(seen))
        found: dict[str, Any] = {TASK: [self.task] * self.num_envs}
        for name, feature in self.names.items():
            if name not in flat:
                raise UserError(
                    f"observations of {type(self.env).__name__} have no entry {name!r}.{did_you_mean(name, flat)} They "
                    f"have {', '.join(flat)}"
                )
            found[feature] = flat[name]
        return found


def _entries(seen: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Arrays by their path, such as `pixels/top`."""
    for name, value in seen.items():
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value
