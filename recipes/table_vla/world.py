"""The table: a hand picks up a block and puts it on the plate that an instruction names. Numpy, many tables at once.

It has gymnasium's vector API: `reset(seed=[...])` and `step(actions)`. An action is an absolute target of the hand in
table units (x, y, both 0 to 1) and whether the gripper is closed (above 0.5). The hand moves at most SPEED per step. An
episode ends when the block is released on any plate; it succeeds if the instruction named that plate.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

CAMERA = "observation.images.top"
STATE = "observation.state"
STATE_NAMES = ["x", "y", "closed", "holds"]
ACTION_NAMES = ["x", "y", "close"]
SIZE = 32  # pixels of an image side
SPEED = 0.1
REACH = 0.08  # the gripper holds a block that is at most this far away
PLATE = 0.12  # half the side of a plate
NAMES = ("red", "blue", "green", "yellow")
PLATES = np.array([[0.15, 0.15], [0.85, 0.15], [0.15, 0.85], [0.85, 0.85]], np.float32)
COLORS = np.array([[200, 60, 60], [70, 90, 210], [60, 170, 80], [220, 200, 70]], np.float32)
PHRASES = ("put the block on the {} plate", "move the block to the {} plate", "take the block to the {} plate")
_PIXELS = (np.arange(SIZE) + 0.5) / SIZE


class Table:
    """`num_envs` tables. A table is determined by its seed alone."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self._background = np.full((1, SIZE, SIZE, 3), [150, 120, 90], np.float32)
        for plate, color in zip(PLATES, COLORS, strict=True):
            self._background = _draw_box(self._background, plate[None], PLATE, color)

    def reset(self, *, seed: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
        tables = [_random_table(np.random.default_rng(one)) for one in seed]
        self.block = np.array([one[0] for one in tables], np.float32)
        self.hand = np.array([one[1] for one in tables], np.float32)
        self.plate = np.array([one[2] for one in tables])
        self.tasks = [PHRASES[one[3]].format(NAMES[one[2]]) for one in tables]
        self.closed = np.zeros(self.num_envs, bool)
        self.holds = np.zeros(self.num_envs, bool)
        self.done = np.zeros(self.num_envs, bool)
        self.success = np.zeros(self.num_envs, bool)
        return self.observe(), {}

    def step(self, actions: np.ndarray) -> tuple[dict[str, Any], Any, Any, Any, dict[str, Any]]:
        live = ~self.done
        way = actions[:, :2] - self.hand
        length = np.maximum(np.linalg.norm(way, axis=1, keepdims=True), 1e-6)
        moved = np.clip(self.hand + way * np.minimum(1, SPEED / length), 0, 1)
        self.hand[live] = moved[live]
        close = actions[:, 2] > 0.5
        near = np.abs(self.hand - self.block).max(axis=1) < REACH
        held = self.holds
        # Only a gripper that closes at the block takes it: one that comes closed pushes nothing.
        self.holds = np.where(live, close & (held | (near & ~self.closed)), held)
        self.closed = np.where(live, close, self.closed)
        self.block[self.holds] = self.hand[self.holds]
        released = live & held & ~self.holds
        on_plate = np.abs(self.block[:, None] - PLATES).max(axis=2) < PLATE
        self.done |= released & on_plate.any(axis=1)
        self.success |= released & on_plate[np.arange(self.num_envs), self.plate]
        never = np.zeros(self.num_envs, bool)
        return self.observe(), self.success.astype(float), self.done, never, {"is_success": self.success}

    def observe(self) -> dict[str, Any]:
        frames = np.repeat(self._background, self.num_envs, axis=0)
        frames = _draw_box(frames, self.block, 0.075, np.array([230, 230, 230], np.float32))
        color = np.where(self.closed[:, None], [[20, 20, 20]], [[90, 20, 120]])
        frames = _draw_box(frames, self.hand, 0.045, color[:, None, None].astype(np.float32))
        state = np.column_stack([self.hand, self.closed, self.holds]).astype(np.float32)
        return {CAMERA: frames.round().astype(np.uint8), STATE: state, "task": self.tasks}

    def expert(self) -> np.ndarray:
        """The actions of the demonstrations: waypoints, first the block, then the plate."""
        target = np.where(self.holds[:, None], PLATES[self.plate], self.block)
        there = np.linalg.norm(self.hand - target, axis=1) < 0.03
        return np.column_stack([target, np.where(self.holds, ~there, there)]).astype(np.float32)


def _random_table(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Block, hand, plate and phrase; the block lies on no plate."""
    while True:
        block = random.uniform(0.12, 0.88, 2)
        if (np.abs(block - PLATES).max(axis=1) > PLATE + 0.1).all():
            break
    hand = random.uniform(0.1, 0.9, 2)
    return block, hand, int(random.integers(len(NAMES))), int(random.integers(len(PHRASES)))


def _draw_box(frames: np.ndarray, centers: np.ndarray, half: float, color: np.ndarray) -> np.ndarray:
    """Draw a square at each center, with soft edges: its place is visible to a fraction of a pixel."""
    cover = np.clip((half - np.abs(_PIXELS - centers[:, :, None])) * SIZE + 0.5, 0, 1)
    alpha = (cover[:, 1, :, None] * cover[:, 0, None, :])[..., None].astype(np.float32)
    return frames + alpha * (color - frames)
