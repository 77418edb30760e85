"""Closed-loop rollouts: results do not depend on the number of environments; gymnasium's vector API fits."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from conftest import user_error

from mvp_engine.kit.actions.simulation import GymEnv, rollout, strip_image, success_rate

STATE = "observation.state"
CAMERA = "observation.images.top"


class Line:
    """A walk on a line: the place starts at the seed's parity, an episode ends at 3 or at -3, success at 3."""

    def __init__(self, num_envs, final_info=False):
        self.num_envs = num_envs
        self.final_info = final_info

    def reset(self, *, seed=None):
        self.place = np.array([float(one % 2) for one in seed])
        self.tasks = [f"walk from {one % 2}" for one in seed]
        return self.seen(), {}

    def seen(self):
        images = np.zeros((self.num_envs, 4, 6, 3), np.uint8)
        return {STATE: self.place[:, None].copy(), CAMERA: images, "task": self.tasks}

    def step(self, actions):
        self.place += actions[:, 0]
        done = np.abs(self.place) >= 3
        info = {"is_success": self.place >= 3}
        never = np.zeros(self.num_envs, bool)
        return (
            self.seen(),
            np.zeros(self.num_envs),
            done,
            never,
            {"final_info": info} if self.final_info else info,
        )


class Walker:
    """Steps up, or down where the noise of its key is below a threshold; each chunk has two steps."""

    def __init__(self, threshold=-0.8):
        self.threshold = threshold
        self.keys: list[tuple[int, int]] = []
        self.tasks: list[str] = []

    def act(self, observations, seed, keys):
        self.keys += keys
        self.tasks += [one.task for one in observations]
        steps = []
        for seen, (episode, decision) in zip(observations, keys, strict=True):
            assert set(seen.images) == {CAMERA}
            noise = np.random.default_rng([seed, episode, decision]).normal()
            steps.append([[1.0 if noise > self.threshold else -1.0]] * 2)
        return np.array(steps)


@pytest.mark.parametrize("final_info", [False, True])
def test_rollout_results_do_not_depend_on_the_number_of_environments(final_info):
    found = []
    for num_envs in (1, 3, 10):
        results = rollout(Walker(), Line(num_envs, final_info), 10, 5, max_steps=12)
        found.append([(one.index, one.task, one.success, one.steps) for one in results])
    assert found[0] == found[1] == found[2]
    assert [index for index, *_ in found[0]] == list(range(10))
    assert sum(success for *_, success, _ in found[0]) > 0


def test_rollout_executes_part_of_a_chunk_and_stops_at_max_steps():
    walker = Walker(-100)
    results = rollout(walker, Line(2), 2, 0, execute=1, max_steps=2, strips=1)
    assert walker.keys == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [one.steps for one in results] == [2, 2]
    assert success_rate(results) == 0.5  # one starts at 1 and is there after two steps
    assert [len(one.strip) for one in results] == [2, 0]
    assert strip_image(results[0].strip)[0].startswith(b"\x89PNG")


def test_rollout_task_replaces_the_instruction():
    walker = Walker()
    results = rollout(walker, Line(2), 2, 0, task="", max_steps=2)
    assert set(walker.tasks) == {""}
    assert results[1].task == "walk from 1"  # what the environment asked for


def test_rollout_observations_or_infos_without_an_entry_are_a_user_error():
    with user_error("observations of Line have no entry 'state'; they have"):
        rollout(Walker(), Line(1), 1, state_key="state")
    results = rollout(
        Walker(),
        Line(1),
        1,
        state_key="state",
        max_steps=4,
        observe=lambda seen, _: {**seen, "state": seen[STATE]},
    )
    assert results[0].steps <= 4

    class Silent(Line):
        def step(self, actions):
            *rest, _ = super().step(actions)
            return *rest, {}

    with user_error("infos have no entry 'is_success' or 'success'; they have none"):
        rollout(Walker(), Silent(1), 1)


class Renamed(Line):
    """Line with the names of its own, images in a dict, no instruction, and infos as before gymnasium 1.0."""

    def seen(self):
        seen = super().seen()
        return {"place": seen[STATE], "pixels": {"top": seen[CAMERA]}}

    def step(self, actions):
        seen, rewards, done, never, infos = super().step(actions)
        ended = [
            {"is_success": infos["is_success"][at]} if done[at] else None
            for at in range(self.num_envs)
        ]
        return seen, rewards, done, never, {"final_info": np.array(ended, object)}


def test_gym_env_has_names_of_the_folder_and_an_instruction():
    names = {"place": STATE, "pixels/top": CAMERA}
    found = rollout(Walker(), GymEnv(Renamed(4), names, "walk"), n=10, seed=3)
    assert [one.task for one in found] == ["walk"] * 10
    wanted = rollout(Walker(), Line(4), n=10, seed=3)
    assert [(one.success, one.steps) for one in found] == [
        (one.success, one.steps) for one in wanted
    ]
    assert 0 < success_rate(found) < 1
    with user_error(r"no entry 'pixel/top'\. Did you mean pixels/top\?"):
        rollout(Walker(), GymEnv(Renamed(1), {"pixel/top": CAMERA}, "walk"), n=1)


def test_gym_env_without_gymnasium_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with user_error(r"PushT-v0 needs the package gymnasium: pip install 'mvp-engine\[sim\]'"):
        GymEnv.make("gym_pusht:gym_pusht/PushT-v0", 1, {}, "push")


class Pusher:
    """Moves to the far side of the middle from where the hand is: it touches the block in some episodes."""

    def act(self, observations, seed, keys):
        steps = []
        for seen, (episode, decision) in zip(observations, keys, strict=True):
            assert seen.images["observation.image"].shape == (96, 96, 3)
            assert seen.images["observation.image"].std() > 10
            dice = np.random.default_rng([seed, episode, decision])
            steps.append([512 - seen.state + dice.normal(0, 20, 2)] * 4)
        return np.array(steps)


def test_rollouts_in_pusht_do_not_depend_on_the_number_of_environments():
    pytest.importorskip("gym_pusht", reason="needs the extra sim")
    names = {"agent_pos": STATE, "pixels": "observation.image"}
    strips = []
    for num_envs in (1, 3):
        env = GymEnv.make(
            "gym_pusht:gym_pusht/PushT-v0", num_envs, names, "push", obs_type="pixels_agent_pos"
        )
        found = rollout(Pusher(), env, n=3, seed=5, max_steps=12, strips=1)
        assert [(one.steps, one.success, one.task) for one in found] == [(12, False, "push")] * 3
        strips.append(np.stack(found[0].strip))
    assert np.array_equal(*strips)
    assert np.abs(strips[0][0].astype(int) - strips[0][-1]).max() > 50  # something moved
    with user_error("gymnasium has no environment gym_pusht/NoSuch"):
        GymEnv.make("gym_pusht/NoSuch", 1, names, "push")
