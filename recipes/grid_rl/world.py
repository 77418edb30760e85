"""A grid in which a policy walks to a goal by words. The methods are those of a `gymnasium.Env` with text."""

from random import Random
from typing import Any

SIZE = 4
MAX_STEPS = 8
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


class GridWorld:
    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """A place and another one as the goal, drawn by the seed."""
        places = [(x, y) for x in range(SIZE) for y in range(SIZE)]
        self.place, self.goal = Random(seed).sample(places, 2)
        self.steps = 0
        return self.observation(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Observation, reward, whether the goal is reached, whether the time is over. A wall or another word: no move.

        The reward is by how much the goal came nearer, minus a little for the time.
        """
        before = self.distance()
        x, y = (a + b for a, b in zip(self.place, MOVES.get(action, (0, 0)), strict=True))
        if 0 <= x < SIZE and 0 <= y < SIZE:
            self.place = (x, y)
        self.steps += 1
        is_there = self.place == self.goal
        reward = 0.25 * (before - self.distance()) - 0.05
        return self.observation(), reward, is_there, self.steps == MAX_STEPS, {}

    def distance(self) -> int:
        return sum(abs(a - b) for a, b in zip(self.place, self.goal, strict=True))

    def comes_nearer(self, action: str) -> bool:
        moved = tuple(a + b for a, b in zip(self.place, MOVES[action], strict=True))
        return sum(abs(a - b) for a, b in zip(moved, self.goal, strict=True)) < self.distance()

    def observation(self) -> str:
        (x, y), (goal_x, goal_y) = self.place, self.goal
        return f"you {x} {y} goal {goal_x} {goal_y}"
