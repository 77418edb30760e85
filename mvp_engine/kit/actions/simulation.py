"""Closed-loop rollouts of a policy: a batch of environments, chunks of actions, success rates.

An environment is anything with gymnasium's vector API (`VectorEnv`): `num_envs`, `reset(seed=[...])` and
`step(actions)`. Observations are dicts of arrays, one entry per environment; the instruction is the entry `task`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mvp_engine.errors import UserError

TASK = "task"
SUCCESS = ("is_success", "success")  # entries of `infos`
STRIP_FRAMES = 8  # of each episode that is kept for a report


class VectorEnv(Protocol):
    """The part of gymnasium's vector API that rollouts use. `actions` are (num_envs, size)."""

    num_envs: int

    def reset(self, *, seed: Any) -> tuple[Any, Mapping[str, Any]]: ...

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, Mapping[str, Any]]: ...


class ActingPolicy(Protocol):
    """What is rolled out: an ActionEngine, or anything else that acts on observations."""

    def act(
        self, observations: Sequence[Observation], seed: int, keys: Sequence[tuple[int, int]]
    ) -> np.ndarray:
        """Actions (observations, steps, size). Noise comes from the seed and each observation's key alone."""


@dataclass(frozen=True)
class Observation:
    """What a policy sees at one moment: images by camera, the state, the instruction."""

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    task: str


@dataclass
class EpisodeResult:
    """One episode: whether it succeeded, its steps, and some of its frames."""

    index: int
    task: str
    success: bool = False
    steps: int = 0
    strip: list[np.ndarray] = field(default_factory=list)


def success_rate(results: Sequence[EpisodeResult]) -> float:
    return sum(result.success for result in results) / max(1, len(results))


def rollout(
    engine: ActingPolicy,
    env: VectorEnv,
    n: int,
    seed: int = 0,
    *,
    episodes: Sequence[int] | None = None,
    execute: int | None = None,
    max_steps: int = 200,
    task: str | None = None,
    state_key: str = "observation.state",
    observe: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None,
    strips: int = 0,
) -> list[EpisodeResult]:
    """Roll out `n` episodes (or those of `episodes`), `env.num_envs` at a time. Episode i resets with `seed + i`.

    After each observation, `execute` actions of the chunk are executed (None: all of them). `task` replaces every
    instruction. `observe` turns the environment's observations and infos into a dict with the state, images by camera
    (arrays of 4 axes) and `task`. The results do not depend on `num_envs`: noise is drawn by episode and decision.
    """
    chosen = list(range(n)) if episodes is None else list(episodes)
    results: list[EpisodeResult] = []
    for first in range(0, len(chosen), env.num_envs):
        wave = chosen[first : first + env.num_envs]
        runner = _Wave(env, wave, seed, state_key, observe, task, strips - first)
        results += runner.run(engine, execute, max_steps)
    return results


class _Wave:
    """Episodes that run together, one in each environment; environments without an episode stand still."""

    def __init__(
        self,
        env: VectorEnv,
        episodes: list[int],
        seed: int,
        state_key: str,
        observe: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None,
        task: str | None,
        strips: int,
    ) -> None:
        self.env = env
        self.seed = seed
        self.state_key = state_key
        self.observe = observe
        self.task = task
        self.strips = strips
        padded = episodes + episodes[:1] * (env.num_envs - len(episodes))
        seen, infos = env.reset(seed=[seed + episode for episode in padded])
        self.seen = self._read(seen, infos)
        tasks = [str(one) for one in self.seen[TASK]]
        self.results = [EpisodeResult(i, tasks[at]) for at, i in enumerate(episodes)]
        self.live = list(range(len(episodes)))

    def run(self, policy: ActingPolicy, execute: int | None, max_steps: int) -> list[EpisodeResult]:
        steps = 0
        decision = 0
        actions = np.zeros(0)
        while self.live and steps < max_steps:
            observations = [self._observation(at) for at in self.live]
            keys = [(self.results[at].index, decision) for at in self.live]
            chunks = policy.act(observations, self.seed, keys)
            if actions.size == 0:
                actions = np.zeros((self.env.num_envs, chunks.shape[2]), np.float32)
            planned = list(self.live)
            length = min(execute or chunks.shape[1], chunks.shape[1], max_steps - steps)
            for step in range(length):
                actions[planned] = chunks[:, step]
                self._step(actions)
                steps += 1
                if not self.live:
                    break
            decision += 1
        for result in self.results:
            kept = np.linspace(0, len(result.strip) - 1, STRIP_FRAMES).round().astype(int)
            result.strip = (
                [result.strip[at] for at in sorted(set(kept.tolist()))] if result.strip else []
            )
        return self.results

    def _step(self, actions: np.ndarray) -> None:
        seen, _, terminated, truncated, infos = self.env.step(actions)
        self.seen = self._read(seen, infos)
        for at in list(self.live):
            result = self.results[at]
            result.steps += 1
            if at < self.strips:
                result.strip.append(self._first_image(at))
            if terminated[at] or truncated[at]:
                result.success = _succeeded(infos, at)
                self.live.remove(at)

    def _read(self, seen: Any, infos: Mapping[str, Any]) -> Mapping[str, Any]:
        found = self.observe(seen, infos) if self.observe else seen
        missing = [key for key in (self.state_key, TASK) if key not in found]
        if missing:
            raise UserError(
                f"observations of {type(self.env).__name__} have no entry {missing[0]!r}; they have "
                f"{', '.join(map(str, found))}. Give rollout() observe=, which builds it"
            )
        return dict(found)

    def _observation(self, at: int) -> Observation:
        images = {key: value[at] for key, value in self.seen.items() if np.ndim(value) == 4}
        task = str(self.seen[TASK][at]) if self.task is None else self.task
        return Observation(images, np.asarray(self.seen[self.state_key][at]), task)

    def _first_image(self, at: int) -> np.ndarray:
        images = self._observation(at).images
        return np.array(next(iter(images.values()))) if images else np.zeros((1, 1, 3), np.uint8)


def _succeeded(infos: Mapping[str, Any], at: int) -> bool:
    """Whether an episode that just ended succeeded.

    Where gymnasium resets an environment in the same step, its last infos are in `final_info`: a dict of arrays, and
    before version 1.0 an array of dicts.
    """
    final = infos.get("final_info")
    if final is not None and not isinstance(final, Mapping) and isinstance(final[at], Mapping):
        final = {name: {at: value} for name, value in final[at].items()}
    for found in (final, infos):
        for name in SUCCESS:
            if isinstance(found, Mapping) and name in found:
                return bool(found[name][at])
    names = " or ".join(map(repr, SUCCESS))
    raise UserError(
        f"the environment's infos have no entry {names}; they have {', '.join(infos) or 'none'}"
    )
