"""Closed-loop rollouts of a policy: a batch of environments, chunks of actions, success rates.

An environment is anything with gymnasium's vector API (`VectorEnv`): `num_envs`, `reset(seed=[...])` and
`step(actions)`. Observations are dicts of arrays, one entry per environment; the instruction is the entry `task`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.kit.data.read.media_source import require_package
from mvp_engine.report import Example

TASK = "task"
SUCCESS = ("is_success", "success")  # entries of `infos`
STRIP_FRAMES = 8  # of each episode that is kept for a report
STRIPS = 8  # episodes whose frames are kept
MAX_ENVS = 50  # environments that run at the same time, on one rank
MIN_SIDE = 96  # pixels in a report: smaller frames are enlarged by a whole factor
GAP = 2  # pixels between frames


class VectorEnv(Protocol):
    """The part of gymnasium's vector API that rollouts use. `actions` are (num_envs, size)."""

    num_envs: int

    def reset(self, *, seed: Any) -> tuple[Any, Mapping[str, Any]]: ...

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, Mapping[str, Any]]: ...


class ActingPolicy(Protocol):
    """What is rolled out: the engine of recipes/table_vla, or anything else that acts on observations."""

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


def rollout_on_ranks(engine: Any, task: str | None = None) -> list[EpisodeResult]:
    """Roll out the policy of an engine by its section `simulation`, and return the episodes of all ranks.

    The engine has `act(observations, seed, keys)` and `make_env(num_envs)`. `task` replaces every instruction.
    """
    settings, world, layout = engine.config.simulation, engine.world, engine.layout
    # Ranks that run a forward together run the same episodes. Otherwise each rank runs a share of them.
    is_independent = layout.data_size == world.size and layout.shard_mesh is None
    rank, ranks = (world.rank, world.size) if is_independent else (0, 1)
    episodes = list(range(settings.episodes))[rank::ranks]
    results: list[EpisodeResult] = []
    if episodes:
        results = rollout(
            engine,
            engine.make_env(min(MAX_ENVS, len(episodes))),
            settings.episodes,
            settings.seed,
            episodes=episodes,
            execute=settings.execute,
            max_steps=settings.max_steps,
            task=task,
            state_key=engine.config.actions.state,
            strips=STRIPS,
        )
    if is_independent:
        results = list(chain.from_iterable(world.all_gather(results)))
    return sorted(results, key=lambda result: result.index)


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


# Episodes in the run folder: `rollouts.jsonl`, and strips of frames in `report.html`.


def append_episodes(file: Path, step: int, episodes: Sequence[EpisodeResult]) -> None:
    """Append the episodes of one evaluation as lines of JSON."""
    with open(file, "a", encoding="utf-8") as out:
        for episode in episodes:
            entry = {"step": step, "episode": episode.index, "task": episode.task}
            entry |= {"success": episode.success, "steps": episode.steps}
            out.write(json.dumps(entry) + "\n")


def episode_examples(episodes: Sequence[EpisodeResult]) -> list[Example]:
    """An example for a report page for each episode whose frames were kept."""
    examples = []
    for episode in episodes:
        if episode.strip:
            result = f"{'success' if episode.success else 'failure'} after {episode.steps} steps"
            media = partial(strip_image, episode.strip)
            examples.append(Example(media, episode.task, "success", result, episode.success))
    return examples


def strip_image(frames: Sequence[np.ndarray]) -> list[bytes]:
    """One PNG file, in a list as `Example` needs it, with the frames in a row."""
    height, width = frames[0].shape[:2]
    scale = max(1, -(-MIN_SIDE // height))
    canvas = np.full((height * scale, (width * scale + GAP) * len(frames) - GAP, 3), 255, np.uint8)
    for number, frame in enumerate(frames):
        left = number * (width * scale + GAP)
        enlarged = frame.repeat(scale, axis=0).repeat(scale, axis=1)
        canvas[:, left : left + width * scale] = enlarged
    file = io.BytesIO()
    Image.fromarray(canvas).save(file, "png")
    return [file.getvalue()]


class GymEnv:
    """An environment of gymnasium, with the names of a LeRobot folder and an instruction."""

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
